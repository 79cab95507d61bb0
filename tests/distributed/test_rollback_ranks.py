"""Rollback on two gloo processes: one decision, one state, whichever rank has lost a file."""

import os
import warnings

import torch

from ppo_lightning.callbacks import CheckpointRollback
from ppo_lightning.checkpointing import SnapshotStore
from ppo_lightning.diagnostics import DetectorConfig
from ppo_lightning.distributed import rank
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
