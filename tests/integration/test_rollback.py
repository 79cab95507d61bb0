"""A run that falls ill goes back to its last healthy state, bitwise, and goes on."""

import json
import logging
import math
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.callbacks import CheckpointRollback
from ppo_lightning.configs import LoraConfig, RewardProcessing
from ppo_lightning.diagnostics import DetectorConfig
from ppo_lightning.rewards import Reward, RewardTerm
from tests.helpers.faults import RateSpike, Says, SpoiledWeights, States, same
from tests.helpers.runs import PoisonedAt, data_module, fit, parameters, ppo_module

# Only the faults shall be noticed: with few tokens a healthy entropy is noisy.
CALM = DetectorConfig(entropy_floor=None)


def run(folder, model_dir, *callbacks, rollback=None, epochs=6, ckpt=None, spoil=None, **overrides):
    states, options = overrides.pop("states", None) or States(), {}
    if "check_val_every_n_epoch" in overrides:
        options["check_val_every_n_epoch"] = overrides.pop("check_val_every_n_epoch")
    data = {"val_prompts": overrides.pop("val_prompts", None)}
    module = ppo_module(model_dir, **overrides)
    if "gold" in overrides:
        overrides["gold"].module = module
    if spoil is not None:
        PoisonedAt(module, calls=spoil)
    recorder = fit(
        folder,
        module,
        data_module(buffer={"num_prompts": 24, "num_minibatches": 2}, **data),
        **options,
        callbacks=[*callbacks, *([rollback] if rollback else []), states],
        max_epochs=epochs,
        ckpt=ckpt,
        **({} if ckpt or any(isinstance(c, ModelCheckpoint) for c in callbacks) else NO_FILES),
    )
    return module, recorder.stats, states.after


NO_FILES = {"enable_checkpointing": False}


def rollback(**settings):
    return CheckpointRollback(**({"thresholds": CALM} | settings))


def late(stats, name="reward_mean"):
    return sum(getattr(s, name) for s in stats[-2:]) / 2


VARIANTS = {
    "separate": {},
    "shared": {"critic_model": {"kind": "shared"}},
    "lora": {"policy": {"lora": LoraConfig(rank=4)}},
    "normalised": {"reward_processing": RewardProcessing(normalize="running")},
}


@pytest.mark.parametrize(
    ("variant", "storage"),
    [("separate", "disk"), ("shared", "memory"), ("lora", "disk"), ("normalised", "memory")],
)
def test_spoiled_weights_are_undone_bitwise(tiny_llama_dir, tmp_path, variant, storage):
    """Spoiled in iteration 2, seen by the rollout of 3; the state after 1 was the last well one."""
    callback, fault = rollback(storage=storage), SpoiledWeights(2)
    module, stats, after = run(
        tmp_path, tiny_llama_dir, fault, rollback=callback, epochs=5, **VARIANTS[variant]
    )
    assert callback.num_rollbacks == 1
    (entry,) = [e for e in module.controls.journal if e["dial"] == "state"]
    assert (entry["iteration"], entry["before"], entry["after"]) == (3, 3, 1)
    assert same(after[3], after[1]), "weights, moments, schedules, normaliser"
    assert not same(after[2]["weights"], after[1]["weights"])
    assert not same(after[4]["weights"], after[1]["weights"]), "it learns on"
    assert [s.iteration for s in stats] == list(range(5))
    assert stats[4].kl_ref < 5
    kept = [s.iteration for s in callback.history]
    assert kept == [0, 1, 4], "running levels are of healthy iterations"


@pytest.mark.parametrize(
    "tiny_model_dir",
    ["llama", pytest.param("gpt2", marks=pytest.mark.slow)],  # the cuts know nothing of models
    indirect=True,
)
def test_the_run_ends_better_than_without_and_its_cuts_stay(tiny_model_dir, tmp_path):
    fault, callback = SpoiledWeights(2), rollback()
    _, stats, after = run(tmp_path / "with", tiny_model_dir, fault, rollback=callback)
    _, without, _ = run(tmp_path / "without", tiny_model_dir, fault)
    assert same(after[3], after[1])
    assert late(without, "kl_ref") > 10 > late(stats, "kl_ref")
    assert late(stats) > late(without)
    assert stats[4].lr_actor == pytest.approx(0.1 * stats[0].lr_actor)
    assert stats[5].lr_critic == pytest.approx(0.5 * stats[0].lr_critic)
    assert stats[5].kl_coef == pytest.approx(2 * stats[0].kl_coef)


def test_an_update_that_went_too_far_is_undone_in_its_own_iteration(tiny_llama_dir, tmp_path):
    callback = rollback()
    _, stats, after = run(tmp_path, tiny_llama_dir, RateSpike(2), rollback=callback)
    assert callback.num_rollbacks == 1
    assert stats[2].kl_old > 0.2
    assert same(after[2], after[1])
    assert stats[3].kl_ref < 5


def test_an_illness_of_the_first_iteration_goes_back_to_the_start(tiny_llama_dir, tmp_path):
    callback = rollback()
    _, stats, after = run(tmp_path, tiny_llama_dir, RateSpike(0), rollback=callback, epochs=2)
    assert same(after[0], after[-1])
    assert stats[1].kl_ref == pytest.approx(0, abs=1e-4)
    report = (tmp_path / "rollbacks/1/report.md").read_text(encoding="utf-8")
    assert "update_too_large in iteration 0: back to the start of the run" in report


@pytest.mark.filterwarnings("ignore:An iteration took no optimiser step")
def test_steps_that_are_never_finite_are_an_illness_that_is_treated(tiny_llama_dir, tmp_path):
    """All four updates of iteration 2: the state after 1, from which none was, is suspected."""
    callback = rollback()
    _, stats, after = run(tmp_path, tiny_llama_dir, rollback=callback, spoil=range(9, 13), epochs=5)
    assert callback.num_rollbacks == 1
    assert same(after[2], after[0])
    assert [s.steps_taken for s in stats][3:] == [4, 4]


def test_steps_of_which_half_are_not_finite_leave_the_policy_they_began_with(
    tiny_llama_dir, tmp_path
):
    callback = rollback()
    _, stats, after = run(tmp_path, tiny_llama_dir, rollback=callback, spoil=(9, 11), epochs=4)
    assert (stats[2].steps_taken, callback.num_rollbacks) == (2, 1)
    assert same(after[2], after[1])


class NeverANumber(Reward):
    """A reward model that is broken from an iteration on."""

    def __init__(self, first):
        self.first, self.calls = first, 0

    def __call__(self, completions):
        self.calls += 1
        value = 1.0 if self.calls <= self.first else math.nan
        return torch.full((len(completions.responses),), value)


@pytest.mark.filterwarnings("ignore:An iteration took no optimiser step")
def test_a_reward_that_is_no_number_any_more_ends_the_run(tiny_llama_dir, tmp_path):
    broken = NeverANumber(first=2)
    callback = rollback(max_rollbacks=1)
    _, stats, after = run(
        tmp_path,
        tiny_llama_dir,
        rollback=callback,
        rewards=[RewardTerm(name="r", component=broken)],
        reward_processing=RewardProcessing(on_nonfinite="drop"),
    )
    assert [s.dropped_responses for s in stats] == [0, 0, 24, 24]
    assert same(after[2], after[0])
    report = (tmp_path / "rollbacks/2/report.md").read_text(encoding="utf-8")
    assert "reward_nonfinite" in report
    assert "24 of 24 responses were dropped, 0 of these" in report


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.filterwarnings("ignore:An iteration took no optimiser step")
def test_the_last_checkpoint_of_a_stopped_run_is_the_state_gone_back_to(
    tiny_llama_dir, tmp_path, every
):
    """No step in iteration 3, so Lightning sees nothing to write; or none is due there."""
    kept = ModelCheckpoint(
        filename="{epoch}", every_n_epochs=every, save_last=True, save_on_train_epoch_end=True
    )
    run(
        tmp_path,
        tiny_llama_dir,
        kept,
        rollback=rollback(max_rollbacks=0),
        spoil=range(13, 17),
        states=(states := States()),
    )
    assert max(states.after) == 3
    assert same(states.after[3], states.after[1])
    last = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    weights = states.after[1]["weights"]
    assert all(same(last["state_dict"][name], value) for name, value in weights.items())
    assert last["ppo_lightning"]["complete"]
    assert last["ppo_lightning"]["controls"]["iteration"] == 3
    of_itself = "epoch=3" if every == 1 else "epoch=2"
    assert {file.stem for file in (tmp_path / "checkpoints").iterdir()} == {"last", of_itself}


class WrittenDown(Reward):
    """A gold score by number of the iteration, whatever the answers."""

    def __init__(self, scores):
        self.scores, self.module = scores, None

    def __call__(self, completions):
        return [self.scores[self.module.iteration]] * len(completions.responses)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_fall_of_the_gold_score_goes_back_to_the_last_state_it_found_well(
    tiny_llama_dir, tmp_path, keep
):
    """Validated every third iteration: well after 2, fallen after 5 and after 8."""
    callback = rollback(keep=keep, thresholds=replace(CALM, min_gold_drop=0.5))
    gold = WrittenDown({2: 1.0, 5: 0.2, 8: 0.1})
    _, _, after = run(
        tmp_path,
        tiny_llama_dir,
        rollback=callback,
        epochs=9,
        gold=gold,
        val_prompts=["the cat", "no"],
        check_val_every_n_epoch=3,
    )
    assert callback.num_rollbacks == 1
    assert same(after[8], after[2])


class BrokenWeight(SpoiledWeights):
    def on_update_end(self, trainer, module, stats):
        if stats.iteration in self.iterations:
            next(iter(module.networks.critic_parameters())).data.view(-1)[0] = torch.nan


def test_a_weight_that_is_not_finite_is_seen_before_it_samples(tiny_llama_dir, tmp_path):
    callback = rollback()
    module, _, after = run(tmp_path, tiny_llama_dir, BrokenWeight(2), rollback=callback, epochs=4)
    assert same(after[2], after[1])
    assert all(p.isfinite().all() for p in module.parameters())


def test_what_another_callback_reports_counts_too(tiny_llama_dir, tmp_path):
    callback = rollback()
    said = Says("reward_hacking", 2)
    _, _, after = run(tmp_path / "a", tiny_llama_dir, said, rollback=callback, epochs=4)
    assert same(after[2], after[0]), "the state after 1 was still on trial"
    assert callback.num_rollbacks == 1
    deaf = rollback(illnesses=["kl_runaway"])
    _, _, after = run(tmp_path / "b", tiny_llama_dir, said, rollback=deaf, epochs=4)
    assert deaf.num_rollbacks == 0
    assert not same(after[2]["weights"], after[0]["weights"])


def test_the_stretch_that_was_undone_is_kept(tiny_llama_dir, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        run(tmp_path, tiny_llama_dir, SpoiledWeights(2), rollback=rollback(), epochs=5)
    folder = tmp_path / "rollbacks/1"
    rows = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["run/iteration"] for row in rows] == [2, 3]
    texts = [json.loads(t) for t in (folder / "texts.jsonl").read_text("utf-8").splitlines()]
    assert {row["iteration"] for row in texts} == {2, 3}
    assert 0 < len(texts) <= 12
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert "kl_runaway" in report
    assert "back to the state after iteration 1; rollback 1." in caplog.text
    metrics = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(metrics) == 1 + 5, "the run's own file holds every iteration, the sick ones too"


def test_an_earlier_runs_reports_are_set_aside(tiny_llama_dir, tmp_path):
    for _ in range(2):
        run(tmp_path, tiny_llama_dir, Says("x", 1), rollback=rollback(storage="disk"), epochs=2)
    assert (tmp_path / "rollbacks/1/report.md").exists()
    assert (tmp_path / "rollbacks.1/1/report.md").exists()


def test_after_too_many_the_run_stops_at_its_last_healthy_state(tiny_llama_dir, tmp_path, caplog):
    callback = rollback(max_rollbacks=1)
    fault = SpoiledWeights(2, 5, 6, 7)
    with caplog.at_level(logging.INFO):
        module, stats, after = run(tmp_path, tiny_llama_dir, fault, rollback=callback, epochs=20)
    assert [s.iteration for s in stats] == list(range(7)), "seen in 6, and the run ended"
    last = after[6]
    assert same(last, after[4])
    weights = last["weights"]
    assert all(same(value, weights[name]) for name, value in parameters(module).items())
    assert "it fell ill more often than `max_rollbacks`" in caplog.text
    assert "stopped" in (tmp_path / "rollbacks/2/report.md").read_text(encoding="utf-8")


def test_a_restored_state_that_falls_ill_at_once_gives_way_to_an_older_one(
    tiny_llama_dir, tmp_path
):
    callback = rollback(keep=3)
    _, _, after = run(tmp_path, tiny_llama_dir, Says("x", 4, 5), rollback=callback)
    assert same(after[4], after[2])
    assert same(after[5], after[1])
    assert callback.num_rollbacks == 2


def test_snapshots_can_be_taken_less_often(tiny_llama_dir, tmp_path):
    callback = rollback(every_n_iterations=2)
    _, _, after = run(tmp_path, tiny_llama_dir, Says("x", 5), rollback=callback)
    assert same(after[5], after[3]), "well in iteration 4, so no longer on trial"


def test_an_unreadable_snapshot_is_passed_over_and_said(tiny_llama_dir, tmp_path, caplog):
    class Damage(SpoiledWeights):
        def on_rollout_end(self, trainer, module, collected):
            if module.iteration == 4:
                path = tmp_path / "snapshots/after_000003_iterations.rank_0.pt"
                path.write_bytes(path.read_bytes()[:1000])

    callback = rollback(storage="disk")
    with caplog.at_level(logging.INFO):
        _, _, after = run(tmp_path, tiny_llama_dir, Damage(), Says("x", 4), rollback=callback)
    assert same(after[4], after[1])
    assert "after_000003_iterations.rank_0.pt` is passed over" in caplog.text
    report = (tmp_path / "rollbacks/1/report.md").read_text(encoding="utf-8")
    assert "passed over" in report


def test_what_a_killed_run_left_of_a_snapshot_goes(tiny_llama_dir, tmp_path):
    left = tmp_path / "snapshots/.after_000003_iterations.rank_0.pt.1a.tmp"
    left.parent.mkdir()
    left.write_bytes(b"half")
    run(tmp_path, tiny_llama_dir, rollback=rollback(storage="disk"), epochs=1)
    assert not left.exists()


@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # it is resumed in its own folder
@pytest.mark.parametrize(
    "storage",
    # A checkpoint holds no snapshots of either; those in memory are the simpler ones.
    ["disk", pytest.param("memory", marks=pytest.mark.slow)],
)
def test_a_run_resumed_after_a_rollback_is_the_same_run(tiny_llama_dir, tmp_path, storage):
    """A second fault comes after the resumption; its state must be found and factors be kept."""

    def go(folder, ckpt=None):
        callback = rollback(storage=storage)
        every = ModelCheckpoint(filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        made = run(
            folder,
            tiny_llama_dir,
            *(SpoiledWeights(2, 5), every),
            rollback=callback,
            epochs=8,
            ckpt=ckpt,
        )
        return callback, *made

    whole, module, stats, after = go(tmp_path)
    assert whole.num_rollbacks == 2
    assert same(after[6], after[4])
    checkpoint = tmp_path / "checkpoints/epoch=3.ckpt"
    resumed, again, rest, _ = go(tmp_path, ckpt=checkpoint)
    assert [s.iteration for s in rest] == [4, 5, 6, 7]
    assert same(parameters(again), parameters(module))
    assert resumed.cuts.factors == whole.cuts.factors
    assert resumed.num_rollbacks == 2
    assert again.controls.state_dict() == module.controls.state_dict()
    assert rest[-1].lr_actor == stats[-1].lr_actor == pytest.approx(0.01 * stats[0].lr_actor)


def test_a_healthy_run_is_left_alone_to_the_last_bit(tiny_llama_dir, tmp_path):
    callback = rollback()
    module, _, _ = run(tmp_path / "with", tiny_llama_dir, rollback=callback, epochs=3)
    other, _, _ = run(tmp_path / "without", tiny_llama_dir, epochs=3)
    assert callback.num_rollbacks == 0
    assert same(parameters(module), parameters(other))
    assert not (tmp_path / "with/rollbacks").exists()
