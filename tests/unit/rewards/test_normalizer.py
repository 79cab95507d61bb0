"""Each way of normalising, what it remembers, and what it refuses."""

import io
import math

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import RewardProcessing
from ppo_lightning.rewards import RewardPipeline, RewardTerm, ScoreNormalizer
from tests.helpers.completions import Says, make_completions, numbers_in
from tests.helpers.virtual_ranks import on_ranks

MEASURED = ["batch", "running", "ema", "reference"]
WITH_MEMORY = ["running", "ema", "reference"]
ALL = [*MEASURED, "group"]


def normalizer(how, **knobs):
    return ScoreNormalizer(RewardProcessing(normalize=how, **knobs))


def feed(judge, scores, *, counted=None, groups=None, **given):
    scores = torch.tensor(scores, dtype=torch.float32)
    counted = torch.ones(len(scores), dtype=torch.bool) if counted is None else counted
    groups = torch.zeros(len(scores), dtype=torch.long) if groups is None else groups
    return judge(scores, counted, groups, **given)


def pipeline(how, **processing):
    terms = [RewardTerm(name="number", component=Says(numbers_in))]
    return RewardPipeline(terms, RewardProcessing(normalize=how, clip=None, **processing))


# ------------------------------------------------------------------------------ what comes out


def test_none_hands_scores_on():
    judge = normalizer("none")
    assert feed(judge, [3.0, 5.0]).tolist() == [3.0, 5.0]
    assert judge.spread is None


@pytest.mark.parametrize("how", MEASURED)
def test_the_first_batch_is_normalised_by_itself(how):
    judge = normalizer(how)
    assert judge.spread is None
    # Mean 4, population variance 5.
    expected = torch.tensor([-3.0, -1.0, 1.0, 3.0]) / math.sqrt(5)
    assert_close(feed(judge, [1.0, 3.0, 5.0, 7.0]), expected)
    assert judge.spread == pytest.approx(math.sqrt(5))


@pytest.mark.parametrize(
    ("how", "knobs", "mean", "var"),
    [
        # Batches (0, 2) and (5, 7): means 1 and 6, variances 1 and 1.
        ("batch", {}, 6.0, 1.0),
        # Of 0, 2, 5, 7: 3.5; deviations 3.5, 1.5, 1.5, 3.5.
        ("running", {}, 3.5, 7.25),
        # Decay 0.5 weighs them 1/3 and 2/3; drift between them adds 1/3 · 2/3 · 5².
        ("ema", {"ema_decay": 0.5}, 13 / 3, 1 + 50 / 9),
        ("reference", {}, 1.0, 1.0),
        ("reference", {"reference_mean": -1.0, "reference_std": 4.0}, -1.0, 16.0),
    ],
)
def test_the_second_batch_by_hand(how, knobs, mean, var):
    judge = normalizer(how, **knobs)
    feed(judge, [0.0, 2.0])
    expected = (torch.tensor([5.0, 7.0]) - mean) / math.sqrt(var)
    assert_close(feed(judge, [5.0, 7.0]), expected)
    assert judge.spread == pytest.approx(math.sqrt(var))


def test_the_default_decay_remembers_ten_batches():
    # Weights 0.9 and 1 of 1.9, whatever the order of magnitude of the past.
    judge = normalizer("ema")
    feed(judge, [0.0, 2.0])
    feed(judge, [5.0, 7.0])
    assert judge.state_dict()["mean"] == pytest.approx((0.9 * 1 + 6) / 1.9)


def test_a_given_reference_is_in_force_from_the_start():
    judge = normalizer("reference", reference_mean=2.0, reference_std=4.0)
    assert judge.spread == 4.0
    assert feed(judge, [2.0, 10.0]).tolist() == [0.0, 2.0]


def test_a_reference_is_measured_on_the_first_buffer_that_has_a_spread():
    judge = normalizer("reference")
    assert feed(judge, [5.0, 5.0]).tolist() == [0.0, 0.0]
    assert judge.spread == 0
    assert feed(judge, [1.0, 3.0]).tolist() == [-1.0, 1.0]
    assert feed(judge, [5.0, 5.0]).tolist() == [3.0, 3.0]
    assert judge.spread == 1


def test_groups_are_normalised_apart():
    judge = normalizer("group")
    groups = torch.tensor([0, 1, 0, 1, 2])
    found = feed(judge, [1.0, 10.0, 3.0, 30.0, 5.0], groups=groups)
    assert_close(found, torch.tensor([-1.0, -1.0, 1.0, 1.0, 0.0]))
    assert judge.spread is None


# ------------------------------------------------------------------------------------- traps


@pytest.mark.parametrize("value", [0.7, -3.0, 1e6, 0.1 + 0.2])
@pytest.mark.parametrize("how", ALL)
def test_t29_constant_scores_are_exactly_zero_from_the_first_batch_on(how, value):
    judge = normalizer(how)
    for size in (4, 3, 1):
        assert feed(judge, [value] * size).tolist() == [0.0] * size


@pytest.mark.parametrize("how", ALL)
def test_t29_constant_scores_over_ranks_of_unlike_size(how):
    def run(reduce, rank):
        judge = normalizer(how)
        return [feed(judge, [0.7] * [3, 2, 0][rank], reduce=reduce).tolist() for _ in range(3)]

    assert on_ranks(run, 3) == [[[0.0] * size] * 3 for size in (3, 2, 0)]


@pytest.mark.parametrize("how", ALL)
def test_t29_a_score_that_does_not_count_is_not_divided_by_nothing(how):
    counted = torch.tensor([True, True, False])
    assert feed(normalizer(how), [0.7, 0.7, 5.0], counted=counted).tolist() == [0.0] * 3


@pytest.mark.parametrize("how", ALL)
def test_t33_a_single_score_and_none_at_all(how):
    judge = normalizer(how)
    assert feed(judge, []).tolist() == []
    nobody = torch.tensor([False, False])
    assert feed(judge, [1.0, math.nan], counted=nobody)[0] == 0
    assert judge.spread is None
    assert feed(judge, [5.0]).tolist() == [0.0]


@pytest.mark.parametrize("how", WITH_MEMORY)
def test_t33_a_batch_of_nobody_leaves_the_state_alone(how):
    judge = normalizer(how)
    feed(judge, [1.0, 3.0])
    before = judge.state_dict()
    feed(judge, [9.0, 9.5], counted=torch.tensor([False, False]))
    assert judge.state_dict() == before


@pytest.mark.parametrize("how", ALL)
def test_t45_scores_beyond_the_range_of_float16_are_summed_in_full(how):
    # Eight times 1e4 is 8e4, above 65504; their squares are far above.
    judge = normalizer(how)
    scores = torch.tensor([9984.0, 10000.0] * 4, dtype=torch.float16)
    found = judge(scores, torch.ones(8, dtype=torch.bool), torch.zeros(8, dtype=torch.long))
    assert found.dtype == torch.float32
    assert_close(found, torch.tensor([-1.0, 1.0] * 4))


def test_t45_rewards_of_ten_thousand_reach_the_loss_within_the_clip():
    term = RewardTerm(name="huge", component=Says(torch.tensor([1e4, -1e4]).half()))
    responses = make_completions(["a", "b"])
    for how, bound in (("none", 10.0), ("running", 1.0)):
        judge = RewardPipeline([term], RewardProcessing(normalize=how))
        assert_close(judge(responses).scores, torch.tensor([bound, -bound]))


@pytest.mark.parametrize("how", WITH_MEMORY)
def test_t53_a_resumed_run_scores_like_one_that_never_stopped(how):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(5, generator=generator) * 3 + k for k in range(6)]
    batches = [make_completions([str(score) for score in batch.tolist()]) for batch in batches]
    whole, stopped = pipeline(how), pipeline(how)
    expected = [whole(batch) for batch in batches][3:]
    for batch in batches[:3]:
        stopped(batch)
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    resumed = pipeline(how)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.normalizer.spread == stopped.normalizer.spread
    found = [resumed(batch) for batch in batches[3:]]
    assert [r.scores.tolist() for r in found] == [r.scores.tolist() for r in expected]
    assert [r.spread for r in found] == [r.spread for r in expected]
    assert found[0].scores.tolist() != pipeline(how)(batches[3]).scores.tolist()


# 0.7 plus 0, 1 and 2 tenths, over 256, 256 and 10 scores: Σx = 276 and Σx² = 296 in tenths.
POOLED = {"mean": 0.7 + 27.6 / 522, "std": math.sqrt(296 / 522 - (276 / 522) ** 2) / 10}


def test_t59_unlike_batches_are_pooled_and_not_averaged():
    judge = normalizer("running")
    for score, size in ((0.7, 256), (0.8, 256), (0.9, 10)):
        feed(judge, [score] * size)
    state = judge.state_dict()
    assert state["count"] == 522
    assert state["mean"] == pytest.approx(POOLED["mean"])
    assert judge.spread == pytest.approx(POOLED["std"])  # each batch's own is 0


@pytest.mark.parametrize("how", MEASURED)
def test_t59_unlike_ranks_are_pooled_and_not_averaged(how):
    def run(reduce, rank):
        judge = normalizer(how)
        feed(judge, [[0.7], [0.8], [0.9]][rank] * [256, 256, 10][rank], reduce=reduce)
        return judge.state_dict()["mean"], judge.spread

    for mean, spread in on_ranks(run, 3):
        assert mean == pytest.approx(POOLED["mean"])
        assert spread == pytest.approx(POOLED["std"])


# --------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("cut", [0, 1, 4])
def test_any_cut_into_ranks_gives_the_same_scores_and_states(how, cut):
    batches = [[1.0, 2.0, 4.0, 8.0], [-3.0, 0.5, 0.0, 9.0]]
    groups = torch.tensor([0, 5, 0, 5])  # of both, members on either side of a cut of 1

    def run(reduce, rank):
        own = slice(0, cut) if rank == 0 else slice(cut, None)
        judge = pipeline(how)
        results = [
            judge(
                make_completions([str(score) for score in batch[own]]),
                groups=groups[own],
                reduce=reduce,
            )
            for batch in batches
        ]
        return [r.scores for r in results], [r.spread for r in results], judge.state_dict()

    parts = on_ranks(run, 2)
    assert parts[0][1:] == parts[1][1:]
    judge = pipeline(how)
    for number, batch in enumerate(batches):
        whole = judge(make_completions([str(score) for score in batch]), groups=groups)
        assert_close(torch.cat([part[0][number] for part in parts]), whole.scores)
        if how != "group":
            assert parts[0][1][number] == pytest.approx(whole.spread)


# --------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("how", ["none", *ALL])
def test_state_is_plain_text_and_numbers(how):
    judge = normalizer(how)
    feed(judge, [1.0, 3.0])
    assert {type(value) for value in judge.state_dict().values()} <= {str, int, float}


@pytest.mark.parametrize("how", WITH_MEMORY)
def test_scoring_without_the_call_never_moves_the_state(how):
    # Held-out answers are scored so, and dumped buffers.
    judge = pipeline(how)
    judge(make_completions(["1", "3"]))
    before = judge.state_dict()
    held_out = make_completions(["100", "-100"])
    assert judge.weighted_sum(judge.components(held_out)).tolist() == [100.0, -100.0]
    assert judge.state_dict() == before


@pytest.mark.parametrize("state", [{}, {"normalizer": {}}, {"normalizer": {"normalize": "ema"}}])
def test_an_older_state_begins_anew(state):
    judge = pipeline("ema")
    judge(make_completions(["1", "3"]))
    judge.load_state_dict(state)
    assert judge.state_dict() == pipeline("ema").state_dict()


def test_a_state_of_another_kind_is_not_taken_for_ones_own():
    theirs = normalizer("running")
    feed(theirs, [1.0, 3.0])
    for how in ("none", "batch", "ema", "reference", "group"):
        judge = normalizer(how)
        judge.load_state_dict(theirs.state_dict())
        assert judge.spread is None


def test_a_given_reference_outlives_a_measured_one():
    measured = normalizer("reference")
    feed(measured, [1.0, 3.0])
    given = normalizer("reference", reference_mean=0.0, reference_std=4.0)
    given.load_state_dict(measured.state_dict())
    assert given.spread == 4.0


# ------------------------------------------------------------------------------------- refused


def test_group_needs_groups():
    with pytest.raises(ValueError, match="`normalize: group` needs `groups`"):
        pipeline("group")(make_completions(["1", "2"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"normalize": "ema", "ema_decay": 1.0}, r"`ema_decay` must lie in \[0, 1\), got 1.0"),
        ({"normalize": "ema", "ema_decay": -0.1}, r"`ema_decay` must lie in \[0, 1\), got -0.1"),
        ({"normalize": "ema", "ema_decay": math.nan}, r"`ema_decay` must lie in \[0, 1\)"),
        ({"normalize": "running", "ema_decay": 0.5}, "is for `normalize: ema`"),
        ({"normalize": "reference", "reference_mean": 1.0}, "belong together"),
        ({"normalize": "reference", "reference_std": 1.0}, "belong together"),
        (
            {"normalize": "reference", "reference_mean": 1.0, "reference_std": 0.0},
            "`reference_std` must be a finite number above 0",
        ),
        (
            {"normalize": "reference", "reference_mean": math.inf, "reference_std": 1.0},
            "`reference_mean` must be a finite number",
        ),
        (
            {"normalize": "batch", "reference_mean": 1.0, "reference_std": 1.0},
            "are for `normalize: reference`, and `normalize` is batch",
        ),
        ({"normalize": "welford"}, "must be one of none, batch, running, ema, reference, group"),
    ],
)
def test_settings_that_contradict_one_another(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardProcessing(**settings)
