"""Rewards per token: what is an answer, and where it ends up."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import Constraint, RewardProcessing
from ppo_lightning.errors import RewardError
from ppo_lightning.functional import spread_over, token_rewards
from ppo_lightning.rewards import (
    FunctionReward,
    RewardPipeline,
    RewardTerm,
    TokenRepetitionPenalty,
    TokenRewards,
    judged,
    scores_of,
)
from tests.helpers.completions import Says, make_completions

# Three tokens and one token.
TWO = make_completions(["ab", ""], response_ids=[[5, 6, 0], [0]])
ROWS = [[1.0, 0.0, -0.5], [0.25]]


def pipeline(*terms, **processing):
    return RewardPipeline(terms, RewardProcessing(**processing))


def term(name, answer, **settings):
    return RewardTerm(name=name, component=Says(answer), **settings)


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        tuple(map(tuple, ROWS)),
        [torch.tensor(row) for row in ROWS],
        [np.array(row) for row in ROWS],
    ],
)
def test_rows_of_any_kind_are_an_answer(rows):
    said = judged(Says(TokenRewards(rows)), "t", TWO)
    assert said.tokens.tolist() == [[1.0, 0.0, -0.5], [0.25, 0.0, 0.0]]
    assert said.scores.tolist() == [0.5, 0.25]
    assert scores_of(Says(TokenRewards(rows)), "t", TWO).tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.0, 0.0], [0.25]], r"reward `t`, sample 0: expected 3 rewards, .*received 2\. Prompt"),
        ([[1.0, 0.0, -0.5], [0.25, 0.0, 0.0]], r"sample 1: expected 1 rewards, .*received 3\."),
        (torch.zeros(2, 3), r"sample 1: expected 1 rewards, .*received 3\."),
        ([[1.0, 0.0, -0.5]], r"reward `t`: expected rewards per token for 2 responses, received 1"),
        ([1.0, 2.0], r"sample 0: expected 3 rewards, .*received 1.0 \(float\)"),
        (None, "for 2 responses, received None"),
        ({0: [], 1: []}, "for 2 responses, received a dict"),
        ([[1.0, 0.0, [2]], [0.25]], r"sample 0: expected a number, received \[2\] \(list\)"),
    ],
)
def test_rows_of_another_shape_are_named(rows, message):
    with pytest.raises(RewardError, match=message):
        judged(Says(TokenRewards(rows)), "t", TWO)


def test_a_list_of_lists_is_no_rewards_per_token():
    with pytest.raises(RewardError, match="expected a number"):
        judged(Says(ROWS), "t", TWO)


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "nan"])
def test_a_token_that_is_no_number_drops_its_response_or_stops_the_run(bad):
    answer = TokenRewards([[1.0, bad, 2.0], [0.25]])
    with pytest.raises(RewardError, match=r"reward `t`, sample 0: expected a finite number"):
        judged(Says(answer), "t", TWO)
    said = judged(Says(answer), "t", TWO, on_nonfinite="drop")
    assert said.scores.isnan().tolist() == [True, False]
    assert said.tokens.tolist() == [[0.0, 0.0, 0.0], [0.25, 0.0, 0.0]]
    result = pipeline(term("t", answer), on_nonfinite="drop")(TWO)
    assert result.dropped.tolist() == [True, False]
    assert result.token_rewards.tolist() == [[0.0, 0.0, 0.0], [0.25, 0.0, 0.0]]
    assert result.totals.tolist() == [0.0, 0.25]


def test_weighted_at_their_tokens_beside_the_score_by_hand():
    # raw: 2 · 4 + 0.5 · (1 + 0 - 0.5) = 8.25 and 2 · -3 + 0.5 · 0.25 = -5.875
    judge = pipeline(
        term("s", [4.0, -3.0], weight=2.0),
        term("t", TokenRewards(ROWS), weight=0.5),
        clip=5.0,
        missing_eos_penalty=1.0,
    )
    result = judge(TWO)
    assert result.raw.tolist() == [8.25, -5.875]
    assert result.scores.tolist() == [5.0, -5.0]  # clipped without the tokens' part
    assert result.token_rewards.tolist() == [[0.5, 0.0, -0.25], [0.125, 0.0, 0.0]]
    assert result.totals.tolist() == [5.25, -4.875]
    assert result.components["t"].tolist() == [0.5, 0.25]

    mask = torch.tensor([[True, True, True], [True, False, False]])
    kl = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]])
    found = token_rewards(
        result.scores, kl, mask, kl_coef=0.25, token_scores=spread_over(result.token_rewards, mask)
    )
    # -0.25 · KL, the token's own, and the score at the end.
    assert found.tolist() == [[0.25, -0.5, 4.0], [-5.875, 0.0, 0.0]]


@pytest.mark.parametrize("normalize", ["batch", "running", "ema", "reference"])
def test_normalisation_leaves_them_alone(normalize):
    # Scores 1 and 5: mean 3, deviation 2. The tokens' sums would make it 1.25 and 5.125.
    judge = pipeline(
        term("s", [1.0, 5.0]), term("t", TokenRewards(ROWS), weight=0.5), normalize=normalize
    )
    result = judge(TWO)
    assert_close(result.scores, torch.tensor([-1.0, 1.0]))
    assert result.spread == 2.0
    assert result.token_rewards.tolist() == [[0.5, 0.0, -0.25], [0.125, 0.0, 0.0]]


def test_tokens_alone_leave_the_score_at_nothing():
    result = pipeline(term("t", TokenRewards(ROWS)), normalize="batch")(TWO)
    assert result.scores.tolist() == [0.0, 0.0]
    assert result.totals.tolist() == [0.5, 0.25]


def test_parts_that_are_too_large_do_not_hide_behind_each_other():
    terms = [
        term("s", [3e38, 1.0], weight=2.0),
        term("t", TokenRewards([[-3e38, 0.0, 0.0], [0.25]]), weight=2.0),
    ]
    result = pipeline(*terms, on_nonfinite="drop")(TWO)
    assert result.dropped.tolist() == [True, False]
    assert result.totals.tolist() == [0.0, 2.5]
    with pytest.raises(RewardError, match="too large for float32"):
        pipeline(*terms)(TWO)


def test_watched_ones_reach_nothing():
    answer = TokenRewards([[1.0, math.nan, 2.0], [0.25]])
    result = pipeline(term("s", [1.0, 2.0]), term("t", answer, weight=0.0))(TWO)
    assert result.totals.tolist() == [1.0, 2.0]
    assert not result.dropped.any()


def test_a_constraint_is_about_their_sum_at_the_last_token():
    held = Constraint(bound=0.25, initial=2.0)
    result = pipeline(term("t", TokenRewards(ROWS), constraint=held))(TWO)
    assert result.token_rewards is None
    assert result.scores.tolist() == [-0.5, 0.0]


def test_held_out_answers_are_scored_by_their_sum():
    judge = pipeline(term("s", [1.0, 2.0]), term("t", TokenRewards(ROWS), weight=2.0))
    assert judge.weighted_sum(judge.components(TWO)).tolist() == [2.0, 2.5]


def test_no_responses():
    result = pipeline(term("t", TokenRewards([])))(make_completions([]))
    assert result.totals.shape == (0,)


def test_holes_in_a_response_get_nothing():
    mask = torch.tensor([[True, False, True], [False, True, False]])
    found = spread_over(torch.tensor([[1.0, 2.0], [3.0, 9.0]]), mask)
    assert found.tolist() == [[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]


def test_repetition_is_paid_where_it_happens():
    ids = [[7, 8, 7, 8, 7, 0], [7, 7, 7], [7], []]
    said = judged(TokenRepetitionPenalty(n=2), "t", make_completions([""] * 4, response_ids=ids))
    assert said.tokens.tolist() == [[0, 0, 0, -1, -1, 0], [0, 0, -1, 0, 0, 0], [0] * 6, [0] * 6]
    one = judged(TokenRepetitionPenalty(n=1), "t", make_completions(["", ""], response_ids=ids[:2]))
    assert one.scores.tolist() == [-3.0, -2.0]
    with pytest.raises(ValueError, match="`n` must be at least 1"):
        TokenRepetitionPenalty(n=0)


def test_a_function_may_return_them(tmp_path):
    file = tmp_path / "per_token.py"
    file.write_text(
        "from ppo_lightning.rewards import TokenRewards\n"
        "def odd(response_ids):\n"
        "    return TokenRewards([[float(i % 2) for i in ids] for ids in response_ids])\n",
        encoding="utf-8",
    )
    said = judged(FunctionReward(f"{file}:odd"), "t", TWO)
    assert said.tokens.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
