"""Weights that move, and constraints: what they add, how λ goes, what is remembered."""

import math

import pytest
import torch

from ppo_lightning.configs import Constraint, RewardProcessing, WeightSchedule
from ppo_lightning.errors import RewardError
from ppo_lightning.functional import Multiplier, adapted_multiplier, ramp
from ppo_lightning.rewards import RewardPipeline, RewardTerm
from tests.helpers.completions import Says, make_completions, numbers_in
from tests.helpers.virtual_ranks import on_ranks


def pipeline(*terms, **processing):
    return RewardPipeline(terms, RewardProcessing(**processing))


def term(name, answer, **settings):
    return RewardTerm(name=name, component=Says(answer), **settings)


# ----------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]),
        (
            "cosine",
            [2.0, 2.0, 1 + (2 + math.sqrt(2)) / 4, 1.5, 1 + (2 - math.sqrt(2)) / 4, 1.0, 1.0],
        ),
        ("step", [2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0]),
    ],
)
def test_a_weight_goes_from_one_number_to_another(kind, expected):
    found = [ramp(i, start=2.0, end=1.0, length=4, delay=1, kind=kind) for i in range(7)]
    assert found == pytest.approx(expected, abs=1e-12)


def test_the_ends_of_a_ramp_are_exact():
    for kind in ("linear", "cosine", "step"):
        ends = [ramp(i, start=0.1, end=0.7, length=3, kind=kind) for i in (0, 3, 99)]
        assert ends == [0.1, 0.7, 0.7]
    with pytest.raises(ValueError, match="`kind` must be one of"):
        ramp(0, start=0.0, end=1.0, length=1, kind="sudden")


def test_the_iteration_alone_says_the_weight():
    plan = WeightSchedule(start=0.0, end=1.0, iterations=4)
    judge = pipeline(term("a", [1.0, 2.0]), term("b", [4.0, 8.0], weight=plan))
    batch = make_completions(["", ""])
    results = [judge(batch, iteration=i) for i in (3, 0, 9)]
    assert [r.raw.tolist() for r in results] == [[4.0, 8.0], [1.0, 2.0], [5.0, 10.0]]
    assert [r.weights["b"] for r in results] == [0.75, 0.0, 1.0]
    # Held-out answers are scored alike in every iteration.
    assert judge.weighted_sum(judge.components(batch)).tolist() == [5.0, 10.0]


def test_a_weight_of_zero_only_watches_for_so_long():
    plan = WeightSchedule(start=0.0, end=1.0, iterations=1, kind="step")
    judge = pipeline(term("a", [1.0]), term("b", [math.nan], weight=plan))
    assert judge(make_completions([""]), iteration=0).raw.tolist() == [1.0]
    with pytest.raises(RewardError, match="reward `b`"):
        judge(make_completions([""]), iteration=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("start", math.nan), ("end", math.inf), ("iterations", 0), ("delay", -1), ("kind", "x")],
)
def test_a_schedule_checks_itself(field, value):
    fields = {"start": 0.0, "end": 1.0, "iterations": 2}
    with pytest.raises(ValueError, match=f"`{field}`"):
        WeightSchedule(**(fields | {field: value}))


# --------------------------------------------------------------------------------- constraints


def test_the_law_by_hand():
    def law(gathered, violation, damping=0.0):
        now = Multiplier(gathered, 99.0)
        return adapted_multiplier(now, violation, rate=0.5, damping=damping, largest=2.0)

    assert law(0.0, 1.5) == (0.75, 0.75)
    assert law(0.75, -0.5) == (0.5, 0.5)
    assert law(0.25, -9.0) == (0.0, 0.0)  # nothing is kept in store
    assert law(1.5, 9.0) == (2.0, 2.0)
    assert law(2.0, -0.5) == (1.75, 1.75)
    assert law(0.5, 0.5, damping=1.0) == (0.75, 1.25)  # what leads is gathered only in part
    assert law(0.5, -0.5, damping=1.0) == (0.25, 0.0)
    assert law(1.5, 1.0, damping=1.0) == (2.0, 2.0)
    assert law(1.5, math.nan) == (1.5, 99.0)
    with pytest.raises(ValueError, match="`rate`"):
        adapted_multiplier(Multiplier(0.0, 0.0), 1.0, rate=0.0, damping=0.0, largest=1.0)


@pytest.mark.parametrize(
    ("direction", "first", "second"),
    [
        # Costs 4 and 8 around the bound 5: the mean, 6, is 1 too much. λ 0.5, then 0.75.
        ("at_most", [10.5, 18.5], [10.75, 17.75]),
        # At least 5: the mean is 1 within. λ 0.5, then 0.25.
        ("at_least", [9.5, 21.5], [9.75, 20.75]),
    ],
)
def test_a_constraint_adds_lambda_times_the_distance_to_its_bound(direction, first, second):
    held = Constraint(bound=5.0, direction=direction, lr=0.25, initial=0.5)
    judge = pipeline(term("a", [10.0, 20.0]), term("c", [4.0, 8.0], constraint=held), clip=None)
    results = [judge(make_completions(["", ""])) for _ in range(2)]
    assert results[0].raw.tolist() == first
    assert results[1].raw.tolist() == second
    sign = -1 if direction == "at_most" else 1
    assert results[0].weights["c"] == sign * 0.5
    assert results[0].multipliers == {"c": 0.5}
    assert results[1].multipliers == {"c": 0.5 - sign * 0.25}
    assert results[0].components["c"].tolist() == [4.0, 8.0]


def test_a_multiplier_of_zero_costs_nothing_and_still_moves():
    held = Constraint(bound=5.0, lr=0.25)
    judge = pipeline(term("a", [1.0, 2.0]), term("c", [4.0, 8.0], constraint=held))
    assert judge(make_completions(["", ""])).raw.tolist() == [1.0, 2.0]
    assert judge.multipliers.values == {"c": 0.25}


def test_rescaling_keeps_the_size_of_scores():
    held = Constraint(bound=5.0, initial=3.0)
    terms = [term("a", [8.0, 16.0]), term("c", [4.0, 7.0], constraint=held)]
    result = pipeline(*terms, rescale_constraints=True)(make_completions(["", ""]))
    assert result.raw.tolist() == [(8 + 3) / 4, (16 - 6) / 4]
    assert result.weights == {"a": 0.25, "c": -0.75}
    assert result.multipliers == {"c": 3.0}


def test_rescaling_without_a_constraint_is_refused():
    with pytest.raises(
        ValueError, match="`rescale_constraints` is for rewards with a `constraint`"
    ):
        pipeline(term("a", [1.0]), rescale_constraints=True)


def test_penalties_normalisation_and_clip_come_after():
    held = Constraint(bound=0.0, initial=1.0)
    judge = pipeline(
        term("a", [10.0, 10.0]), term("c", [1.0, 5.0], constraint=held), normalize="batch", clip=0.5
    )
    assert judge(make_completions(["", ""])).scores.tolist() == [0.5, -0.5]


def test_held_out_answers_are_scored_without_constraints():
    held = Constraint(bound=0.0, initial=1.0)
    judge = pipeline(term("a", [1.0, 2.0]), term("c", [3.0, math.nan], constraint=held))
    batch = make_completions(["", ""])
    assert judge.weighted_sum(judge.components(batch)).tolist() == [1.0, 2.0]
    assert judge.multipliers.values == {"c": 1.0}


@pytest.mark.parametrize("initial", [0.0, 1.0])
def test_a_cost_that_is_no_number_is_an_error_or_dropped_whatever_lambda(initial):
    held = Constraint(bound=1.0, lr=0.5, initial=initial)
    terms = [term("a", [1.0, 2.0]), term("c", [3.0, math.nan], constraint=held)]
    with pytest.raises(RewardError, match="reward `c`, sample 1"):
        pipeline(*terms)(make_completions(["", ""]))
    judge = pipeline(*terms, on_nonfinite="drop")
    result = judge(make_completions(["", ""]))
    assert result.dropped.tolist() == [False, True]
    assert judge.multipliers.values == {"c": initial + 1.0}  # the mean of what counts is 3


def test_responses_without_tokens_and_empty_batches_do_not_move_it():
    held = Constraint(bound=0.0, lr=1.0, initial=1.0)
    judge = pipeline(term("c", [9.0, 2.0], constraint=held))
    judge(make_completions(["", ""], response_ids=[[], [7]]))
    assert judge.multipliers.values == {"c": 3.0}
    empty = pipeline(term("c", [], constraint=held))
    empty(make_completions([]))
    assert empty.multipliers.values == {"c": 1.0}


def test_ranks_agree_on_lambda():
    held = Constraint(bound=2.0, lr=0.1)
    numbers = [["1", "2", "6"], ["9"], []]

    def run(reduce, rank):
        judge = pipeline(term("c", numbers_in, constraint=held))
        for _ in range(3):
            judge(make_completions(numbers[rank]), reduce=reduce)
        return judge.multipliers.values["c"]

    parts = on_ranks(run, 3)
    assert parts == [pytest.approx(0.1 * (4.5 - 2) * 3)] * 3
    assert len(set(parts)) == 1


def test_it_goes_on_where_it_was():
    held = Constraint(bound=2.0, lr=0.1, damping=0.5, max=5.0)
    other = Constraint(bound=-1.0, lr=0.1, initial=0.25)
    terms = [term("c", [3.0], constraint=held), term("d", [1.0], constraint=other)]
    judge, batch = pipeline(*terms), make_completions(["x"])
    judge(batch)
    state = judge.state_dict()
    resumed = pipeline(*terms)
    resumed.load_state_dict(state)
    for _ in range(3):
        assert torch.equal(judge(batch).raw, resumed(batch).raw)
    assert judge.state_dict() == resumed.state_dict()

    judge.load_state_dict({"normalizer": {}})  # a checkpoint of an older version
    assert judge.multipliers.values == {"c": 0.0, "d": 0.25}
    old = {"gathered": 99.0, "value": 3.0}
    judge.load_state_dict({"multipliers": {"c": old, "gone": old}})
    assert judge.state_dict()["multipliers"] == {
        "c": {"gathered": 5.0, "value": 3.0},
        "d": {"gathered": 0.25, "value": 0.25},
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("bound", math.nan), ("lr", 0.0), ("max", 0.0), ("initial", -0.1), ("initial", 11.0)],
        *[("direction", "below"), ("bound", None), ("damping", -1.0)],
    ],
)
def test_a_constraint_checks_itself(field, value):
    with pytest.raises(ValueError, match=f"`{field}`"):
        Constraint(**({"bound": 1.0} | {field: value}))


@pytest.mark.parametrize("weight", [0.5, WeightSchedule(start=0.0, end=1.0, iterations=2)])
def test_a_constraint_has_no_weight_beside_it(weight):
    with pytest.raises(ValueError, match="`weight` of reward `c` must be left out"):
        term("c", [1.0], weight=weight, constraint=Constraint(bound=1.0))
