"""What must hold for any scores and texts that a reward may meet."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from ppo_lightning.configs import RewardProcessing
from ppo_lightning.functional import Reduce, identity
from ppo_lightning.rewards import (
    ExactAnswerReward,
    LexiconReward,
    RepetitionPenalty,
    RewardPipeline,
    RewardResult,
    RewardTerm,
    scores_of,
)
from ppo_lightning.types import Completions
from tests.helpers.completions import Says, make_completions
from tests.helpers.virtual_ranks import on_ranks

QUICK = settings(max_examples=50)
SCORES = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8)
PENALTIES = st.floats(0, 100)
CLIPS = st.none() | st.floats(0.01, 1e4)
NORMALIZERS = st.sampled_from(["none", "batch", "running", "ema", "reference", "group"])
TEXTS = st.lists(st.text(max_size=60), max_size=6)


def rows(scores: list[float], seed: int = 0) -> Completions:
    """Responses that carry their score as metadata, some of them truncated."""
    generator = torch.Generator().manual_seed(seed)
    truncated = (torch.rand(len(scores), generator=generator) < 0.5).tolist()
    metadata = [{"score": score} for score in scores]
    return make_completions(["x"] * len(scores), metadata=metadata, truncated=truncated)


def some_groups(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(seed))


def read(completions: Completions) -> list[float]:
    return [record["score"] for record in completions.metadata]


def judge(**processing: object) -> RewardPipeline:
    term = RewardTerm(name="read", component=Says(read))
    return RewardPipeline([term], RewardProcessing(**processing))


@cache
def lexicon(per_sentence: bool, include_prompt: bool) -> LexiconReward:
    return LexiconReward(per_sentence=per_sentence, include_prompt=include_prompt)


def part(completions: Completions, rows: slice) -> Completions:
    return make_completions(
        completions.responses[rows],
        metadata=completions.metadata[rows],
        truncated=completions.truncated[rows],
    )


@QUICK
@given(SCORES, PENALTIES, CLIPS, NORMALIZERS, st.integers(0, 99))
def test_scores_are_finite_and_within_the_clip(scores, penalty, clip, normalize, seed):
    groups = some_groups(len(scores), seed)
    bounded = judge(missing_eos_penalty=penalty, clip=clip, normalize=normalize)
    result = bounded(rows(scores, seed), groups=groups)
    assert result.scores.isfinite().all()
    if clip is not None:
        assert (result.scores.abs() <= torch.tensor(clip).float()).all()
        # What is not marked as clipped is what it would have been without a bound.
        free = judge(missing_eos_penalty=penalty, clip=None, normalize=normalize)
        expected = free(rows(scores, seed), groups=groups).scores
        assert torch.equal(result.scores[~result.clipped], expected[~result.clipped])


@QUICK
@given(SCORES, st.integers(0, 99), st.integers(0, 99), NORMALIZERS)
def test_the_order_of_responses_does_not_matter(scores, seed, shuffle, normalize):
    completions, groups = rows(scores, seed), some_groups(len(scores), seed)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(shuffle)).tolist()
    shuffled = make_completions(
        [completions.responses[i] for i in order],
        metadata=[completions.metadata[i] for i in order],
        truncated=[completions.truncated[i] for i in order],
    )
    one, other = (judge(normalize=normalize, missing_eos_penalty=0.5) for _ in range(2))
    found = one(shuffled, groups=groups[order]).scores
    assert_close(found, other(completions, groups=groups).scores[order])


@QUICK
@given(SCORES, SCORES, st.integers(0, 8), st.integers(0, 99), NORMALIZERS)
def test_any_cut_into_ranks_gives_the_same_scores(first, second, cut, seed, normalize):
    batches = [(rows(scores, seed), some_groups(len(scores), seed)) for scores in (first, second)]

    def run(reduce: Reduce, rank: int | None) -> list[RewardResult]:
        pipeline = judge(normalize=normalize, missing_eos_penalty=0.5)
        own = {None: slice(None), 0: slice(0, cut), 1: slice(cut, None)}[rank]
        return [pipeline(part(c, own), groups=g[own], reduce=reduce) for c, g in batches]

    parts = on_ranks(run, 2)
    for number, whole in enumerate(run(identity, None)):
        sharded = torch.cat([results[number].scores for results in parts])
        assert_close(sharded, whole.scores)


@QUICK
@given(st.floats(-1e4, 1e4, width=32), st.lists(st.integers(1, 9), min_size=1), NORMALIZERS)
def test_t29_constant_scores_are_exactly_zero(score, sizes, normalize):
    assume(normalize != "none")
    pipeline = judge(normalize=normalize)
    for size in sizes:
        result = pipeline(
            make_completions(["x"] * size, metadata=[{"score": score}] * size),
            groups=some_groups(size, size),
        )
        assert result.scores.tolist() == [0.0] * size


@QUICK
@given(SCORES, st.sets(st.integers(0, 7), min_size=1), NORMALIZERS)
def test_dropping_is_leaving_out(scores, bad, normalize):
    keep = [i for i in range(len(scores)) if i not in bad]
    assume(keep)
    spoiled = [score if i in keep else float("nan") for i, score in enumerate(scores)]
    groups = some_groups(len(scores), len(scores))
    with_bad = judge(normalize=normalize, on_nonfinite="drop")(rows(spoiled), groups=groups)
    completions = rows(scores)
    without = judge(normalize=normalize)(
        make_completions(
            ["x"] * len(keep),
            metadata=[completions.metadata[i] for i in keep],
            truncated=[completions.truncated[i] for i in keep],
        ),
        groups=groups[keep],
    )
    assert with_bad.dropped.tolist() == [i not in keep for i in range(len(scores))]
    assert_close(with_bad.scores[keep], without.scores)
    assert (with_bad.scores[with_bad.dropped] == 0).all()


@QUICK
@given(TEXTS, st.booleans(), st.booleans())
def test_lexicon_scores_any_text_within_bounds(texts, per_sentence, include_prompt):
    scores = scores_of(lexicon(per_sentence, include_prompt), "lexicon", make_completions(texts))
    assert len(scores) == len(texts)
    assert (scores.abs() <= 1).all()


@QUICK
@given(TEXTS)
def test_a_text_is_its_own_exact_answer(texts):
    completions = make_completions(texts, metadata=[{"answer": text} for text in texts])
    assert scores_of(ExactAnswerReward(), "exact", completions).tolist() == [1.0] * len(texts)


@QUICK
@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4))
def test_repetition_is_a_share(ids, n):
    completions = make_completions([""], response_ids=[ids])
    assert -1 < RepetitionPenalty(n)(completions)[0] <= 0
