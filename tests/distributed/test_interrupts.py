"""Ranks that are told to end, end together; a rank that dies takes nothing with it."""

import errno
import os
import signal

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from ppo_lightning.checkpointing import files, newest_good, parts
from ppo_lightning.distributed import rank
from ppo_lightning.errors import CheckpointError, ConfigError
from ppo_lightning.modules import FSDP2Strategy, last_checkpoint
from tests.helpers.deaths import exit_codes
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import data_module, parameters, ppo_module, trainer
from tests.helpers.sft_runs import sft_data, sft_module, sft_trainer, weights_of

STOPPED = 128 + signal.SIGTERM


def fit(model_dir, folder):
    """Two iterations, from the newest file there is; each rank leaves its weights."""
    pl.seed_everything(0, verbose=False)
    run = trainer(folder, max_epochs=2, strategy="ddp", devices=2)
    module = ppo_module(model_dir)
    run.fit(module, data_module(), ckpt_path=last_checkpoint(run))
    torch.save(parameters(module), folder / f"final{rank()}.pt")


def stopped(model_dir, folder, signalled):
    """Ranks get SIGTERM in the update of the second iteration: exit statuses, what was printed."""
    log = folder / "log.txt"
    faults = dict.fromkeys(signalled, "step:6:TERM")
    codes = exit_codes(fit, model_dir, folder, num_ranks=2, faults=faults, log=log)
    assert newest_good([folder]).iterations == 1
    return codes, log.read_text(encoding="utf-8")


@pytest.mark.parametrize("signalled", [[0], [0, 1]])
def test_t42_sigterm_ends_all_ranks_at_one_place(tiny_llama_dir, tmp_path, signalled):
    codes, said = stopped(tiny_llama_dir, tmp_path, signalled)
    assert codes == [STOPPED, STOPPED]
    assert said.count("stopped by SIGTERM in iteration 1") == 1


def test_t42_t52_ranks_that_another_one_stopped_go_on_bit_for_bit(tiny_llama_dir, tmp_path):
    again, whole = tmp_path / "again", tmp_path / "whole"
    for folder in (again, whole):
        folder.mkdir()
    assert stopped(tiny_llama_dir, again, [1])[0] == [STOPPED, STOPPED]
    for folder in (again, whole):
        assert exit_codes(fit, tiny_llama_dir, folder, num_ranks=2) == [0, 0]
    for name in ("final0.pt", "final1.pt"):
        ours, theirs = torch.load(again / name), torch.load(whole / name)
        assert all(ours[key].equal(value) for key, value in theirs.items())


def fit_supervised(model_dir, folder):
    """Six steps, from the newest file there is; each rank leaves its weights."""
    torch.manual_seed(0)
    run = sft_trainer(folder, strategy="ddp", devices=2)
    module = sft_module(model_dir)
    run.fit(module, sft_data(), ckpt_path=last_checkpoint(run))
    torch.save(weights_of(module), folder / f"final{rank()}.pt")


@pytest.mark.parametrize("step", [2, 3])
def test_t42_t52_a_supervised_run_on_two_ranks_keeps_its_steps(tiny_gpt2_dir, tmp_path, step):
    again, whole = tmp_path / "again", tmp_path / "whole"
    for folder in (again, whole):
        folder.mkdir()
    arguments, faults = (tiny_gpt2_dir, again), {1: f"step:{step}:TERM"}
    assert exit_codes(fit_supervised, *arguments, num_ranks=2, faults=faults) == [STOPPED, STOPPED]
    assert newest_good([again]).steps == step
    for folder in (again, whole):
        assert exit_codes(fit_supervised, tiny_gpt2_dir, folder, num_ranks=2) == [0, 0]
    for name in ("final0.pt", "final1.pt"):
        ours, theirs = torch.load(again / name), torch.load(whole / name)
        assert all(ours[key].equal(value) for key, value in theirs.items())


class FirstRankNamed(Logger):
    """As MLflow's: the other ranks are not told where the run is."""

    def __init__(self, folder):
        super().__init__()
        self.save_dir = str(folder)
        self.name = "film" if rank_zero_only.rank == 0 else None
        self.version = "a" if rank_zero_only.rank == 0 else None

    name = save_dir = version = None

    def log_metrics(self, metrics, step=None): ...

    def log_hyperparams(self, params, *args, **kwargs): ...


def gone_on(model_dir, folder):
    """Go on from a run of one iteration: what this rank found and used, and where it got."""
    for epochs in (1, 2):
        rank_zero_only.rank = int(os.environ["RANK"])
        logger = FirstRankNamed(folder)
        run = trainer(folder, max_epochs=epochs, strategy="ddp", devices=2, logger=logger)
        module, start = ppo_module(model_dir), last_checkpoint(run)
        run.fit(module, data_module(), ckpt_path=start)
    steps = run.fit_loop.epoch_loop.total_batch_idx
    return start is None, str(run.ckpt_path), module.iteration, steps


def test_ranks_that_a_logger_does_not_tell_its_name_start_where_the_first_one_does(
    tiny_llama_dir, tmp_path
):
    first, second = run_on_ranks(gone_on, 2, tiny_llama_dir, tmp_path)
    assert second[0] is True  # it found nothing by itself
    assert first[0] is False
    assert second[1:] == first[1:]
    assert first[1].endswith(".ckpt")
    assert first[2] == 1


def disk_full(model_dir, folder):
    """The first rank, which writes, finds no room; what each rank raises."""

    class Full(files.Watched):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    files.Watched = Full
    run = trainer(folder, max_epochs=2, strategy="ddp", devices=2)
    with pytest.raises(CheckpointError) as caught:
        run.fit(ppo_module(model_dir), data_module())
    return str(caught.value)


def test_t42_a_full_disk_ends_all_ranks(tiny_llama_dir, tmp_path):
    first, second = run_on_ranks(disk_full, 2, tiny_llama_dir, tmp_path)
    assert "No space left on device" in first
    assert "on another rank" in second


def parts_and_a_full_disk(model_dir, folder):
    """The second rank finds no room for its part of the second checkpoint."""

    class Full(files.Watched):
        written = 0

        def write(self, data):
            Full.written += os.environ["RANK"] == "1" and run.current_epoch == 1
            if Full.written > 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    parts.Watched = Full
    strategy = FSDP2Strategy(sharded_checkpoints=True)
    run = trainer(folder, max_epochs=3, strategy=strategy, devices=2)
    with pytest.raises(CheckpointError) as caught:
        run.fit(ppo_module(model_dir), data_module())
    return str(caught.value)


def test_t42_a_full_disk_of_one_rank_leaves_no_parts_and_the_former_checkpoint(
    tiny_llama_dir, tmp_path
):
    first, second = run_on_ranks(parts_and_a_full_disk, 2, tiny_llama_dir, tmp_path)
    assert first == second
    assert "could not be written: rank 1: OSError: [Errno 28] No space left on device" in first
    kept = newest_good([tmp_path])
    assert (kept.iterations, kept.skipped) == (1, ())
    assert [p for p in kept.path.parent.iterdir() if p.name.startswith(".")] == []


def apart(model_dir, folder):
    """Only the first rank sees the checkpoint."""
    alone = trainer(folder, max_epochs=2, strategy="ddp", devices=2)
    ckpt = folder / "checkpoints/last.ckpt" if alone.global_rank == 0 else None
    with pytest.raises(ConfigError, match=r"rank 0: .*last\.ckpt, rank 1: None"):
        alone.fit(ppo_module(model_dir), data_module(), ckpt_path=ckpt)
    return True


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_t42_ranks_that_would_start_apart_are_refused(tiny_llama_dir, tmp_path):
    trainer(tmp_path, max_epochs=1).fit(ppo_module(tiny_llama_dir), data_module())
    assert run_on_ranks(apart, 2, tiny_llama_dir, tmp_path) == [True, True]
