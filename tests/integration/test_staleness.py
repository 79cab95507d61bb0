"""Responses of older weights, and of other samplers, in whole runs; an engine here is late."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from ppo_lightning.configs import StalenessConfig
from ppo_lightning.errors import ConfigError, RolloutError
from ppo_lightning.rollout import Freshness, NativeEngine
from ppo_lightning.rollout.engines.background import BackgroundEngine
from tests.helpers.lagged import LaggedEngine
from tests.helpers.runs import data_module, fit, parameters, ppo_module


def run(folder, model_dir, *, epochs=3, **settings):
    """Fit; returns parameters and statistics."""
    module = ppo_module(model_dir, **settings)
    recorder = fit(folder, module, data_module(), max_epochs=epochs, enable_checkpointing=False)
    return parameters(module), recorder.stats


def late(rule, *, lag=1, share=1.0, **rules):
    return {
        "engine": LaggedEngine(lag, share),
        "staleness": StalenessConfig(on_stale=rule, **rules),
    }


def same(a, b):
    return all(value.equal(b[name]) for name, value in a.items())


def test_weights_of_exactly_one_change_no_bit_of_a_run(tiny_model_dir, tmp_path, monkeypatch):
    plain, stats = run(tmp_path, tiny_model_dir)
    assert [s.lag_max for s in stats] == [0, 0, 0]
    assert stats[0].importance_mean is None
    weighed = Freshness.weighed

    def by_the_trainers(self, logprobs, rollout, *, cap):
        return weighed(self, logprobs, replace(rollout, sampler_logprobs=logprobs), cap=cap)

    monkeypatch.setattr(Freshness, "weighed", by_the_trainers)
    rules = StalenessConfig(correct_all=True, importance_cap=1.0)
    found, stats = run(tmp_path, tiny_model_dir, staleness=rules)
    assert stats[2].importance_mean == stats[2].importance_max == 1.0
    assert stats[2].importance_capped_share == 0.0
    assert same(plain, found)


def test_a_sampler_in_low_precision_is_corrected_by_one_knob(tiny_llama_dir, tmp_path):
    engine, found = NativeEngine(dtype="bfloat16"), []
    for on in (False, True):
        rules = StalenessConfig(correct_all=on, importance_cap=1.01)
        found.append(run(tmp_path, tiny_llama_dir, engine=engine, staleness=rules))
    (plain, _), (corrected, stats) = found
    assert not same(plain, corrected)
    assert 0.9 < stats[0].importance_mean < 1.01
    assert stats[0].importance_max <= 1.01 + 1e-6
    assert 0 < stats[0].importance_capped_share < 1
    assert stats[0].lag_max == 0


def test_stale_responses_are_used_corrected_or_dropped(tiny_llama_dir, tmp_path):
    rules = ("use", "correct", "drop")
    found = {}
    for rule in rules:
        with pytest.warns(UserWarning, match="on_stale: use") if rule == "use" else nullcontext():
            found[rule] = run(tmp_path, tiny_llama_dir, **late(rule, share=0.5))
    weights = {rule: parameters_ for rule, (parameters_, _) in found.items()}
    assert not any(same(weights[a], weights[b]) for a in rules for b in rules if a < b)
    last = {rule: stats[-1] for rule, (_, stats) in found.items()}
    number = 8 * last["use"].lag_mean
    assert 0 < number < 8
    assert last["use"].lag_max == last["correct"].lag_max == 1
    assert last["use"].importance_mean is None
    assert 0 < last["correct"].importance_max <= 2
    assert (last["drop"].stale_dropped, last["drop"].lag_max) == (number, 0)
    assert last["drop"].dropped_responses == number
    assert found["use"][1][0].lag_max == 0  # the first buffer is of the current weights


class Sometimes(LaggedEngine):
    """Is late where it is asked for a whole buffer, and takes the current weights for a few."""

    def generate(self, model, prompts, **settings):
        self.share = 0.5 if len(prompts) == 8 else 0.0
        return super().generate(model, prompts, **settings)


def test_a_run_that_samples_stale_responses_again_is_the_run_of_current_weights(
    tiny_model_dir, tmp_path
):
    plain, _ = run(tmp_path, tiny_model_dir)
    rules = StalenessConfig(on_stale="resample")
    found, stats = run(tmp_path, tiny_model_dir, engine=Sometimes(2), staleness=rules)
    assert sum(s.stale_resampled for s in stats) > 0
    assert [s.lag_max for s in stats] == [0, 0, 0]
    assert same(plain, found)


def test_what_is_within_the_limit_is_used_as_it_is(tiny_llama_dir, tmp_path):
    used = run(tmp_path, tiny_llama_dir, **late("drop", lag=2, max_lag=2))
    assert [s.lag_max for s in used[1]] == [0, 1, 2]
    assert not used[1][2].stale_dropped


def test_strict_ends_the_run(tiny_llama_dir, tmp_path):
    with pytest.raises(RolloutError, match=r"`staleness\.strict`: 8 of 8 responses"):
        run(tmp_path, tiny_llama_dir, **late("correct", strict=True))


def test_a_buffer_that_is_dropped_whole_is_said(tiny_llama_dir, tmp_path):
    with pytest.warns(UserWarning, match=r"older than `staleness\.max_lag`"):
        run(tmp_path, tiny_llama_dir, epochs=2, **late("drop"))


class Ahead(BackgroundEngine):
    """Says that it samples ahead, and never does."""

    def generate(self, *args, **settings): ...

    def begin(self, *args, **settings): ...

    def finish(self): ...


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"strict": True}, r"`Ahead` samples 1 update ahead: set its `ahead: 0`"),
        ({"on_stale": "drop"}, r"on_stale: drop` would be done with every response"),
        ({"on_stale": "resample"}, r"set `staleness\.max_lag` to 1 or more"),
    ],
    ids=str,
)
def test_rules_that_leave_nothing_of_what_is_sampled_ahead_are_refused(
    tiny_llama_dir, tmp_path, rules, said
):
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, tiny_llama_dir, engine=Ahead(), staleness=StalenessConfig(**rules))


def test_a_mismatch_that_age_explains_is_no_fault(tiny_llama_dir, tmp_path):
    """`guards.self_check: error` is what these runs have."""
    _, stats = run(tmp_path, tiny_llama_dir, **late("correct"))
    assert stats[1].sampler_mismatch > 0.005
    assert stats[1].first_ratio_error < 1e-3
    assert torch.isfinite(torch.tensor(stats[1].policy_loss))
