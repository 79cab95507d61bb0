"""Whether a reward tells good answers from bad ones: shares, gaps, and what to worry about."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ppo_lightning.functional.preferences import wilson_interval

__all__ = ["JudgedPair", "Separation", "separation", "worries"]

LONGER = "repeated"
"""Kind whose bad answers are the good ones, padded."""

_NEEDED = {"off-topic": "answers to another prompt are", "echo": "prompts are"}


@dataclass(frozen=True)
class JudgedPair:
    """A good and a bad answer, and what a reward says of them.

    Args:
        prompt: What is asked.
        good: The better answer.
        bad: The worse one.
        good_score: NaN where the reward gave no number.
        bad_score: The same.
    """

    prompt: str
    good: str
    bad: str
    good_score: float
    bad_score: float

    @property
    def gap(self) -> float:
        """By how much the good one scores higher."""
        return self.good_score - self.bad_score


@dataclass(frozen=True, kw_only=True)
class Separation:
    """How well a reward tells one kind of bad answers from good ones.

    Args:
        kind: Of the bad answers.
        pairs: How many were compared.
        skipped: Good answers that could not be made bad in this way.
        share: Of the pairs, those whose good answer scores strictly higher; NaN without pairs.
        low: Lower end of its 95 % interval (Wilson).
        high: Upper end.
        ties: Pairs of equal scores, which count as not told apart.
        unscored: Pairs with a score that is no number, which count so too.
        gap: Mean difference of the scores, in their pooled spread (Cohen's d); None where the
            scores do not vary.
    """

    kind: str
    pairs: int
    skipped: int
    share: float
    low: float
    high: float
    ties: int
    unscored: int
    gap: float | None


def separation(kind: str, pairs: Sequence[JudgedPair], *, skipped: int = 0) -> Separation:
    """Compare the scores of one kind.

    Args:
        kind: Of the bad answers.
        pairs: Maybe none.
        skipped: See ``Separation``.
    """
    usable = [pair for pair in pairs if math.isfinite(pair.gap)]
    wins = sum(pair.gap > 0 for pair in usable)
    low, high = wilson_interval(wins, len(pairs)) if pairs else (0.0, 1.0)
    return Separation(
        kind=kind,
        pairs=len(pairs),
        skipped=skipped,
        share=wins / len(pairs) if pairs else math.nan,
        low=low,
        high=high,
        ties=sum(pair.gap == 0 for pair in usable),
        unscored=len(pairs) - len(usable),
        gap=_cohens_d(usable),
    )


def worries(
    found: Sequence[Separation],
    pairs: Mapping[str, Sequence[JudgedPair]],
    *,
    min_separation: float,
) -> list[str]:
    """Say in words what a user of the reward should know.

    Args:
        found: Of each kind.
        pairs: Those that were compared, by kind.
        min_separation: Share that each kind should have.
    """
    everything = [pair for kind in pairs.values() for pair in kind]
    return [
        *_about_all(everything),
        *(line for one in found for line in _about(one, min_separation)),
        *_about_length(found, pairs),
    ]


def too_low(one: Separation, min_separation: float) -> bool:
    """Whether a kind is not told apart; also where nothing could be compared."""
    return not one.share >= min_separation


def _about_all(pairs: Sequence[JudgedPair]) -> Iterator[str]:
    scores = [score for pair in pairs for score in (pair.good_score, pair.bad_score)]
    missing = sum(not math.isfinite(score) for score in scores)
    if missing:
        yield (
            f"{missing} of {len(scores)} scores are NaN or infinite: a run would stop there, or "
            "drop such responses (`reward_processing.on_nonfinite`)."
        )
    numbers = {score for score in scores if math.isfinite(score)}
    if len(numbers) == 1 and len(scores) > 1:
        yield f"Every text has the same score, {numbers.pop():g}: there is nothing to learn from."


def _about(one: Separation, min_separation: float) -> Iterator[str]:
    if not one.pairs:
        what = _NEEDED.get(one.kind, "longer texts are")
        yield f"No answer could be made bad in the way `{one.kind}`: {what} needed."
    elif too_low(one, min_separation):
        verb = "prefers" if one.high < 0.5 else "cannot tell"
        rest = "to good ones" if verb == "prefers" else "from good ones"
        yield (
            f"The reward {verb} `{one.kind}` answers {rest}: the good one scores higher in "
            f"{one.share:.0%} of {one.pairs} pairs, {min_separation:.0%} are asked for."
        )
    elif one.low < min_separation:
        yield (
            f"{one.pairs} pairs are few for `{one.kind}`: the share may be as low as "
            f"{one.low:.0%}. Give more texts."
        )


def _about_length(
    found: Sequence[Separation], pairs: Mapping[str, Sequence[JudgedPair]]
) -> Iterator[str]:
    padded = next((one for one in found if one.kind == LONGER and one.pairs), None)
    if padded is not None and padded.share < 0.5 and padded.ties < padded.pairs:
        yield (
            "The reward prefers longer texts: the same answer, padded with its last sentence, "
            f"scores as high or higher in {1 - padded.share:.0%} of the pairs. PPO will find that."
        )
    own = pairs.get("pairs", ())
    longer = [pair.gap > 0 for pair in own if len(pair.good) > len(pair.bad)]
    shorter = [pair.gap > 0 for pair in own if len(pair.good) < len(pair.bad)]
    if not longer or not shorter:
        return
    of_longer, of_shorter = sum(longer) / len(longer), sum(shorter) / len(shorter)
    surely = wilson_interval(sum(shorter), len(shorter))[1] < of_longer
    if surely and of_longer - of_shorter > 0.2:
        yield (
            f"In your pairs the better answer wins in {of_longer:.0%} where it is the longer one "
            f"and in {of_shorter:.0%} where it is the shorter one: length passes for quality."
        )


def _cohens_d(pairs: Sequence[JudgedPair]) -> float | None:
    if len(pairs) < 2:
        return None
    good, bad = [p.good_score for p in pairs], [p.bad_score for p in pairs]
    spread = math.sqrt((_variance(good) + _variance(bad)) / 2)
    return (sum(good) - sum(bad)) / len(pairs) / spread if spread > 0 else None


def _variance(values: Sequence[float]) -> float:
    """Of a sample, two values at least."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)
