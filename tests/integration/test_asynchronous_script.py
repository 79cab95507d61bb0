"""The experiment on old responses: its engine is as late as it says, and its table adds up."""

import logging

import pytest
import torch

from experiments.scaling import asynchronous as script
from ppo_lightning.configs import PolicyConfig, SamplingConfig
from ppo_lightning.models import build_policy
from ppo_lightning.rollout import NativeEngine, StopRules
from tests.helpers.lagged import LaggedEngine
from tests.helpers.scripted import prompt_batch

PROMPTS = prompt_batch([[5 + i, 9] for i in range(12)])
SETTINGS = {
    "sampling": SamplingConfig(max_new_tokens=4),
    "stops": StopRules(end_ids=(2,), pad_id=0),
}


@pytest.fixture(autouse=True)
def _loggers_as_they_were():
    """The script silences them for its whole process."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_late_responses_are_those_of_the_weights_so_many_updates_ago(tiny_llama_dir):
    model = build_policy(PolicyConfig(path=str(tiny_llama_dir)))
    engine, plain = LaggedEngine(2, 0.5), []
    for version in (0, 4, 8, 12):
        plain.append(NativeEngine().generate(model, PROMPTS, policy_version=version, **SETTINGS))
        found = engine.generate(model, PROMPTS, policy_version=version, **SETTINGS)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
    late = found.versions == 4
    assert found.versions[~late].tolist() == [12] * int((~late).sum())
    assert 0 < int(late.sum()) < 12
    width = found.response_ids.shape[1]
    for rows, source in ((late, plain[1]), (~late, plain[3])):
        mask = source.response_mask[rows]
        assert found.response_mask[rows][:, : mask.shape[1]].equal(mask[:, :width])
        written = found.sampler_logprobs[rows][:, : mask.shape[1]]
        assert written.equal(source.sampler_logprobs[rows])


def result(variant, seed, score):
    return script.Result(
        variant=variant,
        problem=0,
        beta=0.3,
        seed=seed,
        score=score,
        seconds=1.0,
        lag=0.0,
        importance=None,
        capped=None,
    )


def test_differences_are_taken_seed_by_seed_with_students_interval():
    base = [result("synchronous", seed, score) for seed, score in enumerate((0.9, 0.8, 0.7))]
    late = [result("late", seed, score) for seed, score in enumerate((0.9, 0.7, 0.7))]
    off, half, count = script.difference(base + late, "late", "synchronous")
    # Differences 0, -0.1, 0: mean -1/30, deviation 0.0577, standard error 1/30; t(2) = 4.303.
    assert (off, half, count) == (pytest.approx(-1 / 30), pytest.approx(4.303 / 30, rel=1e-3), 3)
    assert "| late | 0.767 | 0.900 0.700 0.700 | -0.033 ± 0.143 (3) |" in script.table(base + late)


def test_a_run_is_made_once_and_kept(tmp_path, capsys):
    asked = ["--group", "lag", "--only", "any lag", "--seeds", "0", "--out", str(tmp_path)]
    small = ["--iterations", "2", "--rollouts", "16"]
    script.main([*asked, *small])
    (kept,) = script.read(tmp_path / "results.jsonl")
    assert kept.variant == "any lag, 50% late, drop"
    assert kept.lag == 0
    script.main([*asked, *small])
    assert len(script.read(tmp_path / "results.jsonl")) == 1
    assert "any lag, 50% late, drop" in capsys.readouterr().out
