"""With every mechanism on, two ranks stay alike, and go on bit for bit when they were killed."""

import signal

import lightning.pytorch as pl
import pytest
import torch

from ppo_lightning.distributed import rank
from ppo_lightning.modules import last_checkpoint
from tests.helpers.deaths import exit_codes
from tests.helpers.everything import (
    ITERATIONS,
    data_with_everything,
    every_callback,
    module_with_everything,
    save_state,
)
from tests.helpers.faults import same
from tests.helpers.runs import trainer


def fit(model_dir, folder):
    """All iterations, from the newest file that there is."""
    pl.seed_everything(0, verbose=False)
    options = {"strategy": "ddp", "devices": 2, "max_epochs": ITERATIONS}
    run = trainer(folder, callbacks=every_callback(), **options)
    module = module_with_everything(model_dir)
    run.fit(module, data_with_everything(), ckpt_path=last_checkpoint(run))
    save_state(run, module, folder / f"final{rank()}.pt")


def finish(model_dir, folder):
    """Run to the end; what each rank leaves."""
    log = folder / "log.txt"
    codes = exit_codes(fit, model_dir, folder, num_ranks=2, log=log)
    assert codes == [0, 0], log.read_text(encoding="utf-8")
    return [torch.load(folder / f"final{number}.pt") for number in (0, 1)]


@pytest.fixture(scope="module")
def whole(tiny_llama_dir, tmp_path_factory):
    return finish(tiny_llama_dir, tmp_path_factory.mktemp("whole"))


def test_t42_ranks_decide_and_stay_alike(whole):
    first, second = whole
    assert first["callbacks"]["CheckpointRollback"]["num_rollbacks"] == 1
    for part in ("weights", "optimizer", "controls", "rewards", "data"):
        assert same(first[part], second[part]), part


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({0: "step:14", 1: "step:14"}, id="update"),
        # test_interrupts.py has it with fewer mechanisms.
        pytest.param({1: "step:9:TERM"}, id="sigterm", marks=pytest.mark.slow),
        pytest.param({0: "decode:11", 1: "decode:14"}, id="rollout", marks=pytest.mark.slow),
        # The second rank is at the next rollout by then.
        pytest.param(
            {0: "checkpoint_write:5200", 1: "decode:40"}, id="file", marks=pytest.mark.slow
        ),
    ],
)
def test_t42_t52_killed_ranks_go_on_bit_for_bit(tiny_llama_dir, tmp_path, whole, faults):
    codes = exit_codes(fit, tiny_llama_dir, tmp_path, num_ranks=2, faults=faults)
    ended = -signal.SIGKILL if len(faults) == 2 else 128 + signal.SIGTERM
    assert ended in codes
    assert 0 not in codes
    found = finish(tiny_llama_dir, tmp_path)
    for ours, theirs in zip(found, whole, strict=True):
        assert all(same(ours[part], value) for part, value in theirs.items())
