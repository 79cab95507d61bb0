"""The sampling temperature is turned while a run goes on: a buffer keeps the one it was sampled at.

T11: sampler, old and reference log-probabilities, entropy, and the update are of one distribution.
"""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close

from ppo_lightning.callbacks import CheckpointRollback, DumpBuffers, TreatmentConfig
from ppo_lightning.callbacks.treatment import Treatment
from ppo_lightning.configs import GroupConfig, KLConfig
from ppo_lightning.diagnostics import Diagnosis, Evidence
from ppo_lightning.models import policy_logprobs
from ppo_lightning.modules import Request
from ppo_lightning.rollout import AsyncEngine, GenerateEngine, ReplayDataModule, VLLMEngine
from tests.helpers import vllm_double
from tests.helpers.faults import Says
from tests.helpers.runs import data_module, fit, parameters, ppo_module, sampled_ids
from tests.helpers.sampling_process import fork_samplers
from tests.helpers.turns import Turns

ROUNDING = 1e-5
STILL = {"actor": GroupConfig(lr=1e-12), "critic": GroupConfig(lr=1e-12)}
"""Rates at which the policy stays what it was."""


def run(folder, model_dir, *callbacks, ckpt=None, epochs=3, data=None, buffer=None, **settings):
    module = ppo_module(model_dir, **settings)
    keep = ModelCheckpoint(filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    recorder = fit(
        folder,
        module,
        data or data_module(buffer=buffer or {}),
        ckpt=ckpt,
        max_epochs=epochs,
        callbacks=[*callbacks, keep],
    )
    return module, recorder


def at(recorder):
    return [stats.temperature for stats in recorder.stats]


def same(a, b):
    ours, theirs = parameters(a), parameters(b)
    return ours.keys() == theirs.keys() and all(v.equal(theirs[n]) for n, v in ours.items())


def comparable(stats):
    return {k: v for k, v in stats.to_log().items() if k[:5] != "time/" and k != "run/memory_gib"}


class Oracle(pl.Callback):
    """Scores each buffer on its own, at the temperature that its iteration should have."""

    def __init__(self, *temperatures):
        self.temperatures = temperatures

    def on_rollout_end(self, trainer, module, collected):
        settings = {"temperature": self.temperatures[module.iteration], "entropy": True}
        buffer, mask = collected.experience, collected.rollout.response_mask
        with torch.no_grad():
            own = policy_logprobs(module.networks.actor, buffer.sequences, **settings)
            with module.reference.causal_lm() as model:
                theirs = policy_logprobs(model, buffer.sequences, **settings)
        pairs = [
            (own.logprobs, buffer.old_logprobs),
            (own.logprobs, collected.rollout.sampler_logprobs),
            (own.entropy, collected.networks.entropy),
            (theirs.logprobs, buffer.ref_logprobs),
        ]
        for expected, found in pairs:
            assert_close(found[mask], expected[mask], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("engine", [None, GenerateEngine()], ids=["native", "generate"])
def test_a_request_changes_samples_scores_and_update_alike(tiny_model_dir, tmp_path, engine):
    """With one minibatch both passes have one shape, so that the ratio is exactly 1."""
    one = {"buffer": {"num_minibatches": 1}, "engine": engine}
    _, plain = run(tmp_path / "a", tiny_model_dir, **one)
    asked = Turns("temperature", {0: 0.7, 1: 1.6}), Oracle(1.0, 0.7, 1.6)
    module, turned = run(tmp_path / "b", tiny_model_dir, *asked, **one)
    assert at(plain) == [1.0] * 3
    assert at(turned) == [1.0, 0.7, 1.6]
    assert [row["rollout/temperature"] for row in map(comparable, turned.stats)] == at(turned)
    assert [stats.first_ratio_error for stats in turned.stats] == [0.0] * 3
    ids, before = sampled_ids(turned), sampled_ids(plain)
    assert ids[0] == before[0]
    assert ids[1] != before[1]
    # The same weights up to here: colder, and then hotter.
    assert turned.stats[1].entropy < plain.stats[1].entropy < turned.stats[2].entropy
    # The update's own first pass is of the same distribution, over the same tokens.
    assert turned.stats[1].update_entropy == pytest.approx(turned.stats[1].entropy, abs=0.02)
    assert [(e["dial"], e["before"], e["after"]) for e in module.controls.journal] == [
        ("temperature", 1.0, 0.7),
        ("temperature", 0.7, 1.6),
    ]


@pytest.mark.parametrize("kl", [KLConfig(estimator="full", placement="loss"), KLConfig()], ids=str)
def test_a_buffer_sampled_before_a_change_is_updated_at_its_own(tiny_model_dir, tmp_path, kl):
    plain, _ = run(tmp_path / "a", tiny_model_dir, epochs=2, kl=kl)
    asked = Turns("temperature", after_rollout={1: 0.7})
    turned, recorder = run(tmp_path / "b", tiny_model_dir, asked, epochs=2, kl=kl)
    assert at(recorder) == [1.0, 1.0]
    assert turned.sampling_in_force.temperature == 0.7
    assert same(plain, turned)


def test_held_out_prompts_keep_the_configured_one(tiny_llama_dir, tmp_path):
    """Or its numbers would move with the dial: the weights stay what they were here."""
    data = data_module(val_prompts=["the cat", "hello you"])
    asked = Turns("temperature", {0: 0.5})
    module, recorder = run(tmp_path, tiny_llama_dir, asked, data=data, epochs=2, **STILL)
    assert at(recorder) == [1.0, 0.5]
    (before, after) = (stats.val_sampled for stats in recorder.stats)
    assert after.entropy == pytest.approx(before.entropy, abs=ROUNDING)
    assert after.score == pytest.approx(before.score)
    assert module.held_out().sampling == module.sampling


def test_what_is_sampled_ahead_keeps_the_one_that_went_with_the_weights(
    tiny_model_dir, tmp_path, monkeypatch
):
    """The policy stays what it is, so that its log-probabilities are the sampler's all along."""
    fork_samplers(monkeypatch)
    asked = Turns("temperature", {0: 0.7, 1: 1.6}, after_rollout={2: 0.9})
    settings = {"engine": AsyncEngine(timeout=60), "epochs": 5, **STILL}
    oracle = Oracle(1.0, 1.0, 0.7, 1.6, 0.9)
    _, recorder = run(tmp_path, tiny_model_dir, asked, oracle, **settings)
    assert at(recorder) == [1.0, 1.0, 0.7, 1.6, 0.9]
    assert [stats.lag_max for stats in recorder.stats] == [0, 1, 1, 1, 1]
    assert max(stats.first_ratio_error for stats in recorder.stats) < ROUNDING
    assert max(stats.sampler_mismatch for stats in recorder.stats) < ROUNDING


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("ahead", [False, True], ids=["now", "ahead"])
def test_t53_a_run_that_was_turned_resumes_bitwise(tiny_model_dir, tmp_path, monkeypatch, ahead):
    """From files whose buffer under way was sampled at another temperature than the dial's."""
    fork_samplers(monkeypatch)
    found = [1.0, 1.0, 0.7, 1.6] if ahead else [1.0, 0.7, 1.6, 1.6]

    def once(folder, ckpt=None):
        engine = AsyncEngine(timeout=60) if ahead else None
        asked = Turns("temperature", {0: 0.7, 1: 1.6})
        settings = {"ckpt": ckpt, "epochs": 4, "engine": engine}
        return run(tmp_path / folder, tiny_model_dir, asked, **settings)

    whole, recorded = once("whole")
    assert at(recorded) == found
    for after in (1, 2):
        pl.seed_everything(99, verbose=False)
        file = tmp_path / f"whole/checkpoints/epoch={after - 1}.ckpt"
        module, resumed = once(f"resumed{after}", file)
        assert at(resumed) == found[after:]
        for now, then in zip(resumed.stats, recorded.stats[after:], strict=True):
            assert comparable(now) == comparable(then)
        assert module.controls.state_dict() == whole.controls.state_dict()
        assert same(whole, module)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_buffer_that_does_not_say_its_own_is_sampled_anew(tiny_llama_dir, tmp_path, monkeypatch):
    """Of a checkpoint that was written before buffers said it."""
    fork_samplers(monkeypatch)
    engine, asked = AsyncEngine(timeout=60), Turns("temperature", {0: 0.7})
    run(tmp_path / "a", tiny_llama_dir, asked, engine=engine, epochs=1)
    file = tmp_path / "a/checkpoints/epoch=0.ckpt"
    content = torch.load(file, weights_only=True)
    assert content["ppo_lightning"]["ahead"].pop("temperature") == 1.0
    torch.save(content, file)
    settings = {"engine": AsyncEngine(timeout=60), "ckpt": file, "epochs": 2}
    _, recorder = run(tmp_path / "b", tiny_llama_dir, **settings)
    assert [(stats.temperature, stats.lag_max) for stats in recorder.stats] == [(0.7, 0)]


def test_a_rollback_leaves_it_where_it_was_turned_to(tiny_llama_dir, tmp_path):
    rollback, asked = CheckpointRollback(), Turns("temperature", {0: 0.7})
    callbacks = asked, Says("kl_runaway", 1), rollback
    module, recorder = run(tmp_path, tiny_llama_dir, *callbacks, epochs=4)
    assert rollback.num_rollbacks == 1
    assert at(recorder) == [1.0, 0.7, 0.7, 0.7]
    assert module.controls["temperature"] == 0.7
    assert max(stats.first_ratio_error for stats in recorder.stats) < ROUNDING
    assert max(stats.sampler_mismatch for stats in recorder.stats) < ROUNDING


class Elsewhere(pl.Callback):
    """Has turned the dial before the first iteration."""

    def on_train_start(self, trainer, pl_module):
        pl_module.controls.request(Request(source="test", dial="temperature", value=1.6))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_dumped_buffer_is_replayed_at_its_own(tiny_llama_dir, tmp_path):
    asked = Turns("temperature", {0: 0.7})
    module, original = run(tmp_path / "a", tiny_llama_dir, asked, DumpBuffers(), epochs=2)
    again, replayed = run(
        tmp_path / "b",
        tiny_llama_dir,
        Elsewhere(),
        data=ReplayDataModule(str(tmp_path / "a/buffers/iteration_0001.rank0.pt")),
        ckpt=tmp_path / "a/checkpoints/epoch=0.ckpt",
        epochs=2,
    )
    assert at(original) == [1.0, 0.7]
    assert replayed.stats[0].policy_loss == original.stats[1].policy_loss
    assert same(module, again)


def test_vllm_takes_it_with_each_request(tiny_llama_dir, tmp_path, monkeypatch):
    started = vllm_double.install(monkeypatch)
    asked = Turns("temperature", {0: 0.7}), Oracle(1.0, 0.7, 0.7)
    _, recorder = run(tmp_path, tiny_llama_dir, *asked, engine=VLLMEngine())
    assert at(recorder) == [1.0, 0.7, 0.7]
    assert len(started) == 1


def test_where_vllm_could_not_say_log_probabilities_the_dial_stays(
    tiny_llama_dir, tmp_path, monkeypatch
):
    vllm_double.install(monkeypatch)
    settings = {"engine": VLLMEngine(), "sampling": {"top_k": 5}}
    asked = Turns("temperature", {0: 0.7}), Oracle(1.0, 1.0)
    module, recorder = run(tmp_path, tiny_llama_dir, *asked, epochs=2, **settings)
    assert at(recorder) == [1.0, 1.0]
    assert module.controls.journal == []


def test_a_doctor_may_turn_it(tiny_llama_dir):
    module = ppo_module(tiny_llama_dir, sampling={"temperature": 0.8})
    treatment = Treatment("Doctor", TreatmentConfig(wait=1, max_temperature_factor=1.2))
    found = []
    for iteration in range(3):
        module.controls.iteration = iteration
        evidence = (Evidence(metric="entropy", now=0.1),)
        told = {"illness": "entropy_collapse", "severity": "ill", "since": 0}
        diagnosis = Diagnosis(iteration=iteration, evidence=evidence, **told)
        found += treatment.dose(module.controls, diagnosis, spread=1.0)
    doses = [dose for dose in found if dose.startswith("temperature")]
    assert doses == ["temperature 0.8 → 0.88", "temperature 0.88 → 0.96"]
    assert module.sampling_in_force.temperature == pytest.approx(0.8 * 1.2)
