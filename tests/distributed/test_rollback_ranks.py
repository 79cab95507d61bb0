"""Rollback on two gloo processes: one decision, one state, whichever rank has lost a file."""

import os
import warnings

import lightning.pytorch as pl
import torch

from ppo_lightning.callbacks import CheckpointRollback
from ppo_lightning.checkpointing import SnapshotStore
from ppo_lightning.diagnostics import DetectorConfig
from ppo_lightning.distributed import local, rank
from ppo_lightning.modules import FSDP2Strategy
from tests.helpers.faults import SpoiledWeights, States, same
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import data_module, fit, parameters, ppo_module


class LoseFile(SpoiledWeights):
    """Cuts the newest snapshot that is not suspected, on the second rank alone."""

    def __init__(self, folder):
        self.folder = folder

    def on_rollout_end(self, trainer, module, collected):
        if module.iteration == 3 and rank() == 1:
            path = self.folder / "snapshots/after_000002_iterations.rank_1.pt"
            path.write_bytes(path.read_bytes()[:1000])

    def on_update_end(self, trainer, module, stats):
        """The weights are spoiled by the other callback."""


def train(model_dir, folder, storage, lose):
    module, states = ppo_module(model_dir), States()
    callback = CheckpointRollback(storage=storage, thresholds=DetectorConfig(entropy_floor=None))
    recorder = fit(
        folder,
        module,
        data_module(buffer={"num_prompts": 24, "num_minibatches": 2}),
        callbacks=[SpoiledWeights(2), *([LoseFile(folder)] if lose else []), callback, states],
        max_epochs=6,
        strategy="ddp",
        devices=2,
        enable_checkpointing=False,
    )
    back_to = [i for i in (-1, 0, 1, 2) if same(states.after[3], states.after[i])]
    values = {name: value.numpy() for name, value in parameters(module).items()}
    kl = [s.kl_ref for s in recorder.stats]
    return values, back_to, callback.num_rollbacks, kl, module.controls.state_dict()


def test_t42_ranks_go_back_together_and_stay_equal(tiny_llama_dir, tmp_path):
    first, second = run_on_ranks(train, 2, tiny_llama_dir, tmp_path, "memory", False)
    assert all((value == second[0][name]).all() for name, value in first[0].items())
    assert first[1:] == second[1:]
    _, back_to, num_rollbacks, kl, _ = first
    assert (back_to, num_rollbacks) == ([1], 1)
    assert kl[3] > 10
    assert max(kl[4:]) < 5
    assert (tmp_path / "rollbacks/1/report.md").exists()


def test_t42_a_file_that_one_rank_has_lost_is_passed_over_by_both(tiny_llama_dir, tmp_path):
    first, second = run_on_ranks(train, 2, tiny_llama_dir, tmp_path, "disk", True)
    assert all((value == second[0][name]).all() for name, value in first[0].items())
    assert first[1:3] == second[1:3] == ([0], 1)
    report = (tmp_path / "rollbacks/1/report.md").read_text(encoding="utf-8")
    assert "passed over: another rank cannot read its part" in report


def store_with_a_full_disk(folder):
    torch.distributed.init_process_group("gloo")
    kept = SnapshotStore("disk", keep=2, device=torch.device("cpu"), folder=folder)
    kept.put(0, {"x": 0})
    save = torch.save

    def full(*arguments):
        if os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device")
        save(*arguments)

    torch.save = full
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        done = [kept.put(i, {"x": i}) for i in (1, 2, 3)]
    torch.save = save
    kept.drop_after(5)
    if os.environ["RANK"] == "1":
        next(folder.glob("*rank_1.pt")).rename(folder / "moved")
    lost = []
    try:
        kept.latest()
    except ValueError as error:
        lost.append("another rank" in str(error) or "passed over" in str(error))
    return done, len(said), lost


def test_t42_a_disk_that_is_full_on_one_rank_drops_the_snapshot_on_both(tmp_path):
    results = run_on_ranks(store_with_a_full_disk, 2, tmp_path)
    assert results == [([False] * 3, 1, [True])] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "after_000001_iterations.rank_0.pt",
        "moved",
    ]


class Enlarged(pl.Callback):
    """The actor's weights are far too large after one update; shards stay shards."""

    def on_update_end(self, trainer, module, stats):
        if stats.iteration == 2:
            for p in module.networks.actor_parameters():
                p.data.mul_(30.0)


class Shards(pl.Callback):
    """A rank's own weights after each iteration."""

    def __init__(self):
        self.after = {}

    def on_iteration_end(self, trainer, module, stats):
        own = {name: local(p.detach()) for name, p in module.named_parameters()}
        self.after[stats.iteration] = {name: part.clone() for name, part in own.items()}


def back_from_disk(model_dir, folder):
    module, shards = ppo_module(model_dir), Shards()
    back = CheckpointRollback(storage="disk", thresholds=DetectorConfig(entropy_floor=None))
    fit(
        folder,
        module,
        data_module(buffer={"num_prompts": 24, "num_minibatches": 2}),
        callbacks=[Enlarged(), back, shards],
        max_epochs=5,
        strategy=FSDP2Strategy(),
        devices=2,
        enable_checkpointing=False,
    )
    back_to = [i for i in (0, 1, 2) if same(shards.after[3], shards.after[i])]
    return back_to, back.num_rollbacks, sum(p.numel() for p in shards.after[3].values())


def test_t42_ranks_with_shards_go_back_to_their_own_files(tiny_llama_dir, tmp_path):
    alone = ppo_module(tiny_llama_dir)
    alone.configure_model()
    whole = sum(p.numel() for p in alone.parameters())
    first, second = run_on_ranks(back_from_disk, 2, tiny_llama_dir, tmp_path)
    assert first[:2] == second[:2] == ([1], 1)
    assert first[2] + second[2] == whole
    files = {path.name.split(".")[1] for path in (tmp_path / "snapshots").iterdir()}
    assert files == {"rank_0_of_2", "rank_1_of_2"}
