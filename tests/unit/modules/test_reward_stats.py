"""Metrics of scores: their distribution, and what each component added."""

import json
import math
import statistics

import pytest
import torch

from ppo_lightning.configs import Constraint, RewardProcessing, WeightSchedule
from ppo_lightning.functional import repeated_ngram_fraction
from ppo_lightning.modules import reward_stats
from ppo_lightning.modules.score_report import ScoreReport, report_of, reports_in
from ppo_lightning.modules.slices import ResponseRow
from ppo_lightning.rewards import RewardTerm, TokenRewards
from tests.helpers.completions import Says
from tests.helpers.runs import IdReward, data_module, fit, ppo_module

NAN = math.nan


def say(*numbers):
    """Say these over and over, one a response."""
    return Says(lambda batch: [numbers[i % len(numbers)] for i in range(len(batch))])


def run(folder, tmp_path, *terms, iterations=1, max_new_tokens=6, **settings):
    module = ppo_module(
        folder,
        rewards=list(terms),
        reward_processing=RewardProcessing(on_nonfinite="drop", **settings),
        sampling={"max_new_tokens": max_new_tokens},
    )
    return fit(tmp_path, module, data_module(), max_epochs=iterations)


def test_scores_are_described_over_those_in_the_buffer(tiny_llama_dir, tmp_path):
    terms = [RewardTerm(name="s", component=say(1.0, 2.0, NAN, 9.0), weight=2.0)]
    found = run(tiny_llama_dir, tmp_path, *terms).stats[0]
    scores = [2.0, 4.0, 18.0] * 2  # of eight responses two are dropped
    assert found.raw_score_mean == pytest.approx(8.0)
    assert (found.raw_score_min, found.raw_score_median, found.raw_score_max) == (2.0, 4.0, 18.0)
    assert found.raw_score_q25 == statistics.quantiles(scores, n=4, method="inclusive")[0]
    deviation = statistics.pstdev(scores)
    skew = statistics.fmean(((s - 8) / deviation) ** 3 for s in scores)
    assert found.raw_score_skew == pytest.approx(skew)
    assert found.raw_score_outliers == 0
    component = found.components["s"]
    assert (component.raw, component.weighted, component.weight) == (4.0, 8.0, 2.0)
    assert component.std == pytest.approx(deviation / 2)
    assert component.dropped == 2
    assert component.multiplier is component.violation is None


def test_all_dropped_measures_nothing(tiny_llama_dir, tmp_path):
    with pytest.warns(UserWarning, match=r"."):
        found = run(tiny_llama_dir, tmp_path, RewardTerm(name="s", component=say(NAN))).stats[0]
    logged = found.to_log()
    assert not [name for name in logged if name.startswith("rollout/raw_score")]
    assert "rollout/score_length_correlation" not in logged
    assert found.components["s"].dropped == 8
    assert found.components["s"].raw is None


def test_a_constant_has_neither_skew_nor_correlation(tiny_llama_dir, tmp_path):
    found = run(tiny_llama_dir, tmp_path, RewardTerm(name="s", component=say(0.7))).stats[0]
    assert found.raw_score_skew is found.raw_score_outliers is None
    assert found.score_length_correlation is None
    assert found.raw_score_min == found.raw_score_max == pytest.approx(0.7)


def test_length_and_score_are_compared(tiny_llama_dir, tmp_path):
    longer = Says(lambda batch: [-2.0 * len(ids) for ids in batch.response_ids])
    term = RewardTerm(name="s", component=longer)
    found = run(tiny_llama_dir, tmp_path, term, max_new_tokens=40).stats[0]
    assert found.score_length_correlation == pytest.approx(-1)


def test_weights_and_multipliers_in_force_are_logged(tiny_llama_dir, tmp_path):
    terms = [
        RewardTerm(name="s", component=say(1.0, 3.0)),
        RewardTerm(
            name="w", component=say(4.0), weight=WeightSchedule(start=1.0, end=0.0, iterations=2)
        ),
        RewardTerm(
            name="up",
            component=say(1.0),
            constraint=Constraint(bound=2.0, direction="at_least", lr=0.5, initial=1.0),
        ),
        RewardTerm(name="down", component=say(1.0), constraint=Constraint(bound=2.0)),
    ]
    first, second, third = run(tiny_llama_dir, tmp_path, *terms, iterations=3).stats
    assert [s.components["w"].weight for s in (first, second, third)] == [1.0, 0.5, 0.0]
    assert [s.components["w"].weighted for s in (first, second)] == [4.0, 2.0]
    assert [s.components["up"].multiplier for s in (first, second, third)] == [1.0, 1.5, 2.0]
    assert [s.components["up"].weighted for s in (first, second)] == [-1.0, -1.5]
    assert first.components["up"].violation == 1.0
    down = third.components["down"]
    assert (down.weight, down.multiplier, down.violation) == (0.0, 0.0, -1.0)
    # What stands in the weighted sum adds up to the raw score.
    for stats in (first, second, third):
        parts = [part.weighted for part in stats.components.values()]
        assert stats.raw_score_mean == pytest.approx(sum(parts))


def test_rewards_per_token_are_in_the_means(tiny_llama_dir, tmp_path):
    tokens = Says(lambda batch: TokenRewards([[0.25] * len(ids) for ids in batch.response_ids]))
    terms = [
        RewardTerm(name="s", component=say(1.0, 3.0)),
        RewardTerm(name="t", component=tokens, weight=2.0),
    ]
    recorder = run(tiny_llama_dir, tmp_path, *terms)
    found, collected = recorder.stats[0], recorder.collected[0]
    length = found.response_length_mean
    assert found.components["t"].raw == pytest.approx(0.25 * length)
    assert found.components["t"].weighted == pytest.approx(0.5 * length)
    assert found.score_mean == pytest.approx(2 + 0.5 * length)
    assert found.reward_mean == pytest.approx(2 + 0.5 * length)  # the KL is 0 at the start
    mask = collected.rollout.response_mask
    last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
    expected = mask * 0.5 + last * collected.result.scores[:, None]
    torch.testing.assert_close(collected.shaped.rewards, expected)


@pytest.mark.parametrize("advantage", ["rloo", "group"])
def test_comparisons_of_responses_count_rewards_per_token(tiny_llama_dir, tmp_path, advantage):
    """The score alone is the same for all: without the tokens' rewards nothing is learned."""
    alike = Says(lambda batch: [1.0] * len(batch))
    tokens = Says(
        lambda batch: TokenRewards([[float(i % 2) for i in ids] for ids in batch.response_ids])
    )
    module = ppo_module(
        tiny_llama_dir,
        rewards=[
            RewardTerm(name="s", component=alike),
            RewardTerm(name="t", component=tokens),
        ],
        ppo={"advantage": advantage, "drop_flat_prompts": True},
    )
    data = data_module(buffer={"num_prompts": 2, "responses_per_prompt": 4})
    collected = fit(tmp_path, module, data, max_epochs=1).collected[0]
    odd = (collected.rollout.response_ids % 2 * collected.rollout.response_mask).sum(1).double()
    raw = collected.shaped.raw_advantages[:, 0].double()
    groups = collected.rollout.prompts.groups
    for group in groups.unique():
        own, others = raw[groups == group], odd[groups == group]
        assert len(others.unique()) > 1
        centred = others - others.mean()
        torch.testing.assert_close(own / own.norm(), centred / centred.norm(), rtol=0, atol=1e-6)


def test_repetition_and_score_are_compared():
    # Deviations -1, 0, 1 of the scores and -2/3, 1/3, 1/3 of 3 shares: 1 / sqrt(2 · 2/3).
    rows = [response(score, 5, share) for score, share in [(1.0, 0.0), (2.0, 0.3), (3.0, 0.3)]]
    found = reward_stats.score_distribution(rows)
    assert found["score_repetition_correlation"] == pytest.approx(math.sqrt(3) / 2)
    assert "score_length_correlation" not in found  # all are of one length
    alike = [response(score, 5, 0.25) for score in (1.0, 2.0)]
    assert "score_repetition_correlation" not in reward_stats.score_distribution(alike)


def test_paying_for_repetition_shows(tiny_llama_dir, tmp_path):
    repeated = Says(
        lambda batch: [10 * repeated_ngram_fraction(ids, 2) for ids in batch.response_ids]
    )
    term = RewardTerm(name="s", component=repeated)
    sampling = {"max_new_tokens": 40, "top_k": 3}
    module = ppo_module(tiny_llama_dir, rewards=[term], sampling=sampling)
    found = fit(tmp_path, module, data_module(), max_epochs=1).stats[0]
    assert found.repeated_bigrams > 0
    assert found.score_repetition_correlation == pytest.approx(1)


def response(score, length, repeated):
    return ResponseRow(score, length, repeated, "", 0.0, 1)


def test_the_same_whoever_holds_which():
    """Two ranks of one list are described bit for bit as one rank of it."""
    draw = torch.Generator().manual_seed(0)
    scores = (torch.randn(20, generator=draw) * 7).tolist()
    lengths = torch.randint(1, 9, (20,), generator=draw).tolist()
    shares = torch.rand(20, generator=draw).tolist()
    rows = [response(*columns) for columns in zip(scores, lengths, shares, strict=True)]
    whole = reward_stats.score_distribution(rows)
    assert len(whole) == 12
    assert reward_stats.score_distribution([*rows[1::2], *rows[::2]]) == whole


# -------------------------------------------------------------------------------------- the file


def read(tmp_path, iteration, folder="rewards"):
    file = tmp_path / folder / f"iteration_{iteration:04d}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def test_best_and_worst_texts_are_kept(tiny_llama_dir, tmp_path):
    terms = [
        RewardTerm(name="s", component=say(5.0, 1.0, NAN, 4.0, 2.0, 8.0, 3.0, 7.0)),
        RewardTerm(name="watched", component=say(NAN), weight=0.0),
    ]
    recorder = run(tiny_llama_dir, tmp_path, *terms, normalize="batch")
    found = read(tmp_path, 0)
    assert found["iteration"] == 0
    assert [text["raw_score"] for text in found["best"]] == [8.0, 7.0, 5.0, 4.0, 3.0]
    assert [text["raw_score"] for text in found["worst"]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    best, collected = found["best"][0], recorder.collected[0]
    assert best["response"] == collected.completions.responses[5]
    assert best["prompt"] == collected.completions.prompts[5]
    assert best["number"] == 5
    assert best["score"] == pytest.approx(float(collected.result.scores[5]))
    assert best["components"] == {"s": 8.0, "watched": None}
    assert best["num_tokens"] == len(collected.completions.response_ids[5])
    assert found["raw_score"]["count"] == 7
    assert sum(found["raw_score"]["histogram"]["counts"]) == 7
    assert found["components"]["s"]["median"] == 4.0
    assert found["components"]["watched"] == {"count": 0}


def test_ranks_are_put_together():
    def part(scores, first):
        texts = [{"raw_score": s, "number": first + i} for i, s in enumerate(scores)]
        return {"scores": scores, "components": {"a": scores}, "texts": texts}

    parts = [part([1.0, 5.0], 0), part([], 0), part([3.0, 5.0], 2)]
    found = report_of(parts, iteration=7, num_texts=3)
    assert [text["number"] for text in found["best"]] == [1, 3, 2]
    assert [text["number"] for text in found["worst"]] == [0, 2, 1]
    assert found["raw_score"]["median"] == 4.0
    assert found == report_of(parts[::-1], iteration=7, num_texts=3)


def test_files_come_every_so_often_and_no_more_than_so_many(tiny_llama_dir, tmp_path):
    def go(report):
        module = ppo_module(tiny_llama_dir, rewards=[RewardTerm(name="s", component=IdReward())])
        options = {"max_epochs": 7, "enable_checkpointing": False}
        fit(tmp_path, module, data_module(), callbacks=[report], **options)
        return sorted(file.name for file in (tmp_path / "rewards").glob("*"))

    expected = ["iteration_0002.json", "iteration_0004.json", "iteration_0006.json"]
    assert go(ScoreReport(every_n_iterations=2, num_texts=0, keep=3)) == expected
    assert read(tmp_path, 6)["best"] == []
    # A new run leaves those of the one before under another name.
    assert go(ScoreReport(every_n_iterations=5)) == ["iteration_0000.json", "iteration_0005.json"]
    assert sorted(file.name for file in (tmp_path / "rewards.1").glob("*")) == expected


def test_the_latest_iteration_is_last_beyond_four_digits(tmp_path):
    for iteration in (10_000, 9_999, 12, 123):
        (tmp_path / f"iteration_{iteration:04d}.json").touch()
    names = ["iteration_0012", "iteration_0123", "iteration_9999", "iteration_10000"]
    assert [file.stem for file in reports_in(tmp_path)] == names


def test_none_if_not_wanted_or_on_trial(tiny_llama_dir, tmp_path):
    for options in ({"callbacks": [ScoreReport(every_n_iterations=0)]}, {"fast_dev_run": True}):
        options |= {"max_epochs": 1, "enable_checkpointing": False}
        fit(tmp_path, ppo_module(tiny_llama_dir), data_module(), **options)
        assert not (tmp_path / "rewards").exists()


@pytest.mark.parametrize("field", ["every_n_iterations", "num_texts", "keep"])
def test_a_report_checks_itself(field):
    with pytest.raises(ValueError, match=f"`{field}`"):
        ScoreReport(**{field: -1})
