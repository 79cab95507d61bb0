"""Shares, gaps and worries of a reward that is tested on good against bad answers."""

import math

import pytest

from ppo_lightning.rewards.separation import JudgedPair, separation, too_low, worries


def pairs(*scores, good="good text", bad="bad"):
    return [JudgedPair("q", good, bad, float(g), float(b)) for g, b in scores]


def told(kind_pairs, *, min_separation=0.7):
    found = [separation(kind, own) for kind, own in kind_pairs.items()]
    return worries(found, kind_pairs, min_separation=min_separation)


def test_share_interval_and_gap_by_hand():
    one = separation("shuffled", pairs((1, 0), (3, 0), (2, 2), (0, 2)), skipped=3)
    assert (one.pairs, one.skipped, one.ties, one.unscored) == (4, 3, 1, 0)
    assert one.share == 0.5  # a tie is not told apart
    # Wilson, 2 of 4, z = 1.95996.
    assert one.low == pytest.approx(0.15003, abs=1e-5)
    assert one.high == pytest.approx(0.84997, abs=1e-5)
    # Means 1.5 and 1; variances 5/3 and 4/3; pooled spread sqrt(1.5).
    assert one.gap == pytest.approx(0.5 / math.sqrt(1.5))


def test_a_score_that_is_no_number_tells_nothing_apart():
    one = separation("empty", pairs((1, 0), (math.nan, 0), (1, math.nan), (2, 1)))
    assert (one.share, one.unscored) == (0.5, 2)
    assert one.gap is not None


def test_constant_scores_have_no_gap():
    one = separation("empty", pairs((1, 1), (1, 1)))
    assert one.gap is None
    assert one.share == 0


def test_a_kind_without_pairs_is_not_told_apart():
    one = separation("shuffled", [], skipped=5)
    assert too_low(one, 0.1)
    assert "longer texts" in " ".join(told({"shuffled": []}))


@pytest.mark.parametrize(("share", "low"), [(0.7, False), (0.69, True)])
def test_the_bound_itself_is_enough(share, low):
    wins = round(share * 100)
    one = separation("x", pairs(*[(1, 0)] * wins, *[(0, 1)] * (100 - wins)))
    assert too_low(one, 0.7) is low


def test_a_good_reward_causes_no_worry():
    assert told({"shuffled": pairs(*[(1 + i / 100, 0) for i in range(60)])}) == []


def test_few_pairs_are_said_to_be_few():
    (line,) = told({"shuffled": pairs((1, 0), (2, 0), (3, 0))})
    assert "3 pairs are few for `shuffled`" in line


def test_not_telling_apart_and_preferring_are_two_things():
    (line,) = told({"echo": pairs(*[(1, 0), (0, 1.5)] * 30)})
    assert "cannot tell `echo` answers from good ones" in line
    (line,) = told({"echo": pairs(*[(i, i + 1) for i in range(60)])})
    assert "prefers `echo` answers to good ones" in line


def test_padding_that_pays_is_said():
    lines = told({"repeated": pairs(*[(i, i + 1) for i in range(60)])})
    assert any("prefers longer texts" in line for line in lines)


def test_length_that_passes_for_quality_is_said():
    long = pairs(*[(2, 1)] * 40, good="a long answer", bad="short")
    short = pairs(*[(1, 2)] * 40, good="short", bad="a long answer")
    lines = told({"pairs": [*long, *short]}, min_separation=0.4)
    assert any("length passes for quality" in line for line in lines)
    fair = pairs(*[(2, 1)] * 40, good="short", bad="a long answer")
    assert told({"pairs": [*long, *fair]}) == []


def test_constant_and_missing_scores_are_said():
    lines = told({"echo": pairs(*[(1, 1)] * 30)})
    assert any("Every text has the same score, 1" in line for line in lines)
    lines = told({"echo": pairs(*[(1, 0)] * 30, (math.nan, 0))})
    assert any("1 of 62 scores are NaN or infinite" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "needed"),
    [("shuffled", "longer texts"), ("off-topic", "another prompt"), ("echo", "prompts are")],
)
def test_what_could_not_be_made_says_what_it_takes(kind, needed):
    (line,) = worries([separation(kind, [], skipped=3)], {kind: []}, min_separation=0.7)
    assert needed in line
