import json
import math
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import RewardProcessing
from ppo_lightning.errors import ConfigError, RewardError
from ppo_lightning.rewards import Reward, RewardPipeline, RewardTerm
from tests.helpers.completions import Says, make_completions, numbers_in
from tests.helpers.virtual_ranks import on_ranks

GOLDEN = Path(__file__).parents[2] / "parity" / "golden"


def pipeline(*answers, weights=None, **processing):
    weights = weights or [1.0] * len(answers)
    terms = [
        RewardTerm(name=f"r{i}", component=Says(answer), weight=weight)
        for i, (answer, weight) in enumerate(zip(answers, weights, strict=True))
    ]
    return RewardPipeline(terms, RewardProcessing(**processing))


def score(scores, *, truncated=None, **processing):
    completions = make_completions([""] * len(scores), truncated=truncated)
    return pipeline(scores, **processing)(completions)


def test_weighted_sum_and_each_component_on_its_own():
    result = pipeline([1.0, 2.0], [4.0, -8.0], weights=[0.5, -0.25])(make_completions(["a", "b"]))
    assert result.components["r0"].tolist() == [1.0, 2.0]
    assert result.components["r1"].tolist() == [4.0, -8.0]
    assert result.raw.tolist() == [-0.5, 3.0]
    assert result.scores.tolist() == [-0.5, 3.0]
    assert result.weights == {"r0": 0.5, "r1": -0.25}
    assert not result.dropped.any()
    assert not result.clipped.any()
    assert {t.dtype for t in [result.scores, result.raw, result.components["r0"]]} == {
        torch.float32
    }


def test_the_sum_does_not_round_in_between():
    # In float32, 1e8 + 1 is 1e8.
    assert pipeline([1e8], [1.0], [-1e8])(make_completions(["a"])).raw.tolist() == [1.0]


def test_the_order_is_penalty_then_clip():
    # The golden case's scores with a symmetric bound. Clipping first would give 3 and -5.
    result = score(
        [4.5, 4.5, -4.75], truncated=[True, False, True], missing_eos_penalty=1.0, clip=4.0
    )
    assert result.scores.tolist() == [3.5, 4.0, -4.0]
    assert result.raw.tolist() == [4.5, 4.5, -4.75]
    assert result.clipped.tolist() == [False, True, True]


@pytest.mark.parametrize("case", ["missing_eos_penalty", "score_clip"])
def test_golden_scores(case):
    cases = json.loads((GOLDEN / "token_rewards.json").read_text(encoding="utf-8"))["cases"]
    golden = next(c for c in cases if c["case"] == case)
    inputs = golden["inputs"]
    ended = inputs.get("ended_with_eos", [True] * len(inputs["scores"]))
    result = score(
        inputs["scores"],
        truncated=[not end for end in ended],
        missing_eos_penalty=inputs.get("missing_eos_penalty", 0.0),
        clip=inputs["score_clip"][1] if "score_clip" in inputs else None,
    )
    assert result.scores.tolist() == golden["expected"]["score_used"]


def test_the_order_is_penalty_then_normalise_then_clip():
    # 2, 2, 6 less 4 where truncated: 2, 2, 2 would all be 0. Penalised: 2, -2, 6, mean 2,
    # population std sqrt(32 / 3); z = 0, -1.2247, 1.2247, of which the bound takes the outer two.
    result = score(
        [2.0, 2.0, 6.0],
        truncated=[False, True, False],
        missing_eos_penalty=4.0,
        normalize="batch",
        clip=1.0,
    )
    assert result.scores.tolist() == [0.0, -1.0, 1.0]
    assert result.clipped.tolist() == [False, True, True]
    free = score(
        [2.0, 2.0, 6.0],
        truncated=[False, True, False],
        missing_eos_penalty=4.0,
        normalize="batch",
        clip=None,
    )
    assert_close(free.scores, torch.tensor([0.0, -math.sqrt(1.5), math.sqrt(1.5)]))


@pytest.mark.parametrize(
    ("normalize", "spread"),
    [("none", None), ("group", None), ("batch", 3.0), ("running", 3.0), ("reference", 3.0)],
)
def test_the_result_says_what_scores_were_divided_by(normalize, spread):
    # After penalties, before the clip: -1 and 5 without the one, or ±0.5 with the other.
    judge = pipeline([1.0, 5.0], missing_eos_penalty=2.0, normalize=normalize, clip=0.5)
    responses = make_completions(["a", "b"], truncated=[True, False])
    assert judge(responses, groups=torch.tensor([0, 0])).spread == spread


# T29
@pytest.mark.parametrize("value", [0.7, -3.0, 1e6, 0.1 + 0.2])
def test_constant_scores_normalise_to_exactly_zero(value):
    assert score([value] * 4, normalize="batch").scores.tolist() == [0.0] * 4


def test_a_single_score_normalises_to_zero():
    assert score([5.0], normalize="batch").scores.tolist() == [0.0]


@pytest.mark.parametrize("clip", [10.0, None])
def test_default_is_no_normalisation_and_a_bound_of_ten(clip):
    scores = [12.0, -11.0, 3.0]
    given = {} if clip else {"clip": None}
    expected = [10.0, -10.0, 3.0] if clip else scores
    assert score(scores, **given).scores.tolist() == expected


def test_nonfinite_is_an_error_that_names_component_and_sample():
    with pytest.raises(RewardError, match="reward `r1`, sample 1: expected a finite number"):
        pipeline([1.0, 2.0], [0.0, math.nan])(make_completions(["a", "b"]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "nan"])
@pytest.mark.parametrize("normalize", ["none", "batch", "running", "ema", "reference"])
def test_dropped_responses_touch_nothing(bad, normalize):
    responses = make_completions(["a", "b", "c"])
    both = pipeline(
        [1.0, 2.0, 3.0], [0.0, bad, 0.0], on_nonfinite="drop", normalize=normalize, clip=None
    )(responses)
    without = score([1.0, 3.0], normalize=normalize, clip=None)
    assert both.dropped.tolist() == [False, True, False]
    assert both.scores[[0, 2]].tolist() == without.scores.tolist()
    assert both.scores[1] == 0
    assert both.raw[1].isnan()
    assert both.components["r1"][1].isnan()
    assert both.components["r0"].tolist() == [1.0, 2.0, 3.0]
    assert not both.clipped[1]
    assert both.spread == without.spread


def test_dropped_responses_count_in_no_group():
    judge = pipeline([1.0, math.nan, 3.0, 9.0], on_nonfinite="drop", normalize="group")
    result = judge(make_completions(["a"] * 4), groups=torch.tensor([0, 0, 0, 1]))
    assert result.scores.tolist() == [-1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("on_nonfinite", ["error", "drop"])
def test_a_watched_component_of_weight_zero_drops_and_stops_nothing(on_nonfinite):
    # 0 · nan is nan: it must be left out of the sum.
    judge = pipeline([1.0, 2.0], [None, 5.0], weights=[1.0, 0.0], on_nonfinite=on_nonfinite)
    result = judge(make_completions(["a", "b"]))
    assert not result.dropped.any()
    assert result.scores.tolist() == result.raw.tolist() == [1.0, 2.0]
    assert result.components["r1"].isnan().tolist() == [True, False]


def test_components_that_are_all_watched_add_up_to_zero():
    result = pipeline([1.0, math.inf], weights=[0.0])(make_completions(["a", "b"]))
    assert result.scores.tolist() == [0.0, 0.0]


def test_a_watched_component_must_still_answer_every_response():
    with pytest.raises(RewardError, match="reward `r1`: expected 2 scores"):
        pipeline([1.0, 2.0], [1.0], weights=[1.0, 0.0])(make_completions(["a", "b"]))


def test_a_sum_too_large_for_float32():
    responses = make_completions(["a", "b"])
    with pytest.raises(RewardError, match=r"sample 1: the weighted sum .* too large"):
        pipeline([1.0, 3e38], [1.0, 3e38])(responses)
    result = pipeline([1.0, 3e38], [1.0, 3e38], on_nonfinite="drop")(responses)
    assert result.dropped.tolist() == [False, True]
    assert result.raw[1].isnan()


def test_responses_without_tokens_count_in_no_statistic():
    # T18: with the empty one among them the mean would be 3 and not 2.
    completions = make_completions(["", "1", "3"], response_ids=[[], [7], [7]])
    result = pipeline([5.0, 1.0, 3.0], normalize="batch", clip=None)(completions)
    assert_close(result.scores, torch.tensor([3.0, -1.0, 1.0]))


def test_empty_and_foreign_texts_reach_components_as_they_are():
    texts = ["", "很好 👍", "👩‍👩‍👧", "‏שלום", "a\x00b"]
    judge = Says(lambda completions: [float(len(text)) for text in completions.responses])
    terms = [RewardTerm(name="length", component=judge)]
    result = RewardPipeline(terms)(make_completions(texts))
    assert result.scores.tolist() == [min(10.0, len(text)) for text in texts]
    assert judge.calls[0].responses == texts


# T33, R4.1: one mean over all ranks
@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_shards_normalise_over_all_ranks(cut):
    numbers = ["1", "2", "4", "8", "-3"]
    truncated = [False, True, False, False, True]
    judge = pipeline(numbers_in, normalize="batch", missing_eos_penalty=0.5, clip=1.0)
    whole = judge(make_completions(numbers, truncated=truncated))

    shards = [slice(0, cut), slice(cut, None)]
    batches = [make_completions(numbers[s], truncated=truncated[s]) for s in shards]
    parts = on_ranks(lambda reduce, rank: judge(batches[rank], reduce=reduce), 2)
    assert [len(part.scores) for part in parts] == [cut, 5 - cut]
    assert_close(torch.cat([part.scores for part in parts]), whole.scores)
    assert_close(torch.cat([part.clipped for part in parts]), whole.clipped)


def test_shards_on_their_own_would_differ():
    # The two ranks of T32: one mean, 4, over both, not ±1 on each.
    judge = pipeline(numbers_in, normalize="batch")
    batches = [make_completions(["1", "3"]), make_completions(["5", "7"])]
    parts = on_ranks(lambda reduce, rank: judge(batches[rank], reduce=reduce), 2)
    expected = torch.tensor([-3.0, -1.0, 1.0, 3.0]) / math.sqrt(5)
    assert_close(torch.cat([part.scores for part in parts]), expected)


def test_a_rank_whose_responses_are_all_dropped_still_takes_part():
    def answer(completions):
        return [None if text == "x" else float(text) for text in completions.responses]

    judge = pipeline(answer, normalize="batch", on_nonfinite="drop")
    batches = [make_completions(["x", "x"]), make_completions(["1", "3"])]
    parts = on_ranks(lambda reduce, rank: judge(batches[rank], reduce=reduce), 2)
    assert parts[0].scores.tolist() == [0.0, 0.0]
    assert parts[0].dropped.tolist() == [True, True]
    assert_close(parts[1].scores, torch.tensor([-1.0, 1.0]))


def test_setup_and_close_reach_every_component():
    class Loads(Reward):
        def __init__(self):
            self.device, self.closed = None, False

        def __call__(self, completions):
            return [0.0] * len(completions)

        def setup(self, device):
            self.device = device

        def close(self):
            self.closed = True

    components = [Loads(), Loads()]
    terms = [RewardTerm(name=f"r{i}", component=c) for i, c in enumerate(components)]
    judge = RewardPipeline(terms)
    judge.setup(torch.device("meta"))
    assert [c.device for c in components] == [torch.device("meta")] * 2
    judge.close()
    assert all(c.closed for c in components)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RewardError("no weights."), "no weights."),
        (ConfigError("`function`: no module `x`."), "`function`: no module `x`."),
        (SystemExit(3), "raised SystemExit: 3"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_setup_errors_are_named(error, said):
    class Broken(Says):
        def setup(self, device):
            raise error

    judge = RewardPipeline([RewardTerm(name="learned", component=Broken(None))])
    with pytest.raises(RewardError, match=f"reward `learned`: {said}"):
        judge.setup(torch.device("cpu"))


def test_lists_of_terms_that_cannot_be():
    one = RewardTerm(name="same", component=Says([1.0]))
    with pytest.raises(ValueError, match="at least, got none"):
        RewardPipeline([])
    with pytest.raises(ValueError, match=r"names of their own, got \['same'\]"):
        RewardPipeline([one, one])


@pytest.mark.parametrize("name", ["", "a/b", "with space", "ä"])
def test_names_become_parts_of_metric_names(name):
    with pytest.raises(ValueError, match="letters, digits"):
        RewardTerm(name=name, component=Says([1.0]))


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weights_are_finite(weight):
    with pytest.raises(ValueError, match="`weight` of reward `judge`"):
        RewardTerm(name="judge", component=Says([1.0]), weight=weight)


@pytest.mark.parametrize("field", ["name", "weight", "component"])
def test_none_is_no_part_of_a_term(field):
    fields = {"name": "judge", "weight": 1.0, "component": Says([1.0])}
    with pytest.raises(ValueError, match=f"`{field}` must not be None"):
        RewardTerm(**(fields | {field: None}))
