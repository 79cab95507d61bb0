"""Learning from pairs of answers, and what there is to say of scores that rank them.

A pair has a chosen and a rejected answer to one prompt. Scores mean something by their differences
alone: σ(difference) is the model's probability that the chosen answer is the better one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from ppo_lightning.functional.masking import upcast
from ppo_lightning.functional.stats import correlation


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | float = 0.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute -log σ(r_c - r_r - m) of each pair, exact for differences of any size.

    Args:
        chosen: Scores of the better answers. ``[N]`` float.
        rejected: Scores of the worse ones. ``[N]`` float.
        margin: By how much the better one should win, 0 or more. ``[N]`` or one number.
        label_smoothing: Probability that a label is the wrong way round, in [0, 0.5): so much of
            the loss is that of the reversed pair.

    Returns:
        ``[N]`` float32 or float64, nats. Sum, add over microbatches and ranks, then divide once.

    Raises:
        ValueError: The scores differ in shape, or ``label_smoothing`` is out of range.

    Source:
        Bradley & Terry 1952, Biometrika 39; as a loss, Ouyang et al. 2022, arXiv:2203.02155, eq. 1.
        Margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2. Smoothing: Wang et al. 2024,
        arXiv:2401.06080.
    """
    _require_pairs(chosen, rejected)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"`label_smoothing` must lie in [0, 0.5), got {label_smoothing}.")
    lead = upcast(chosen) - upcast(rejected) - margin
    loss = -F.logsigmoid(lead)
    if label_smoothing:
        # -log σ(-x) = x - log σ(x)
        loss = loss + label_smoothing * lead
    return loss


def centering_penalty(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute (r_c + r_r)² of each pair: scores are free up to a constant, this pins it near 0.

    Args:
        chosen: ``[N]`` float.
        rejected: ``[N]`` float.

    Returns:
        ``[N]`` float32 or float64, without a coefficient.

    Source:
        Eisenstein et al. 2023, arXiv:2312.09244.
    """
    _require_pairs(chosen, rejected)
    return (upcast(chosen) + upcast(rejected)).square()


def pair_credit(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Give each pair 1 where the chosen answer scores higher, ½ for a tie, 0 otherwise.

    The mean is the accuracy: a model that scores everything alike gets 0.5, as a coin would. A nan
    on either side gives nan.

    Args:
        chosen: ``[N]`` float.
        rejected: ``[N]`` float.

    Returns:
        ``[N]`` float64.
    """
    _require_pairs(chosen, rejected)
    lead = chosen.double() - rejected.double()
    return ((lead.sign() + 1) / 2).where(~lead.isnan(), lead)  # the sign of nan is 0


def wilson_interval(
    successes: float, count: int, *, confidence: float = 0.95
) -> tuple[float, float]:
    """Bound the probability behind a share of successes (score interval, no continuity correction).

    Unlike mean ± z·s it stays in [0, 1] and has a width at 0 and 1 too.

    Args:
        successes: Out of ``count``; halves for ties are fine.
        count: Independent trials, at least 1.
        confidence: In (0, 1).

    Returns:
        ``(low, high)``.

    Raises:
        ValueError: There is no trial, or numbers out of range.

    Source:
        Wilson 1927, J. Am. Stat. Assoc. 22, 209-212.
    """
    if count < 1 or not 0 <= successes <= count:
        raise ValueError(f"`successes` must lie in [0, `count`], got {successes} of {count}.")
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must lie in (0, 1), got {confidence}.")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, shrink = successes / count, 1 + z * z / count
    middle = (share + z * z / (2 * count)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, kw_only=True)
class ReliabilityBin:
    """Pairs of like confidence.

    Args:
        low: Lower end of the confidence.
        high: Upper end.
        count: Pairs in it.
        confidence: Their mean confidence; None without pairs.
        accuracy: Their accuracy; None without pairs.
    """

    low: float
    high: float
    count: int
    confidence: float | None
    accuracy: float | None


def reliability(
    chosen: Tensor, rejected: Tensor, *, num_bins: int = 10
) -> tuple[ReliabilityBin, ...]:
    """Sort pairs by how sure the scores are, and say how often they are right.

    A pair's confidence is σ(|r_c - r_r|), the probability that the scores give to their own
    verdict; bins of equal width split [0.5, 1], each with its lower end (the last with both).

    Args:
        chosen: ``[N]`` finite float.
        rejected: ``[N]`` finite float.
        num_bins: At least 1.

    Returns:
        ``num_bins`` bins, least sure first.

    Source:
        Guo et al. 2017, arXiv:1706.04599, sec. 2.
    """
    if num_bins < 1:
        raise ValueError(f"`num_bins` must be at least 1, got {num_bins}.")
    confidence = (chosen.double() - rejected.double()).abs().sigmoid()
    credit = pair_credit(chosen, rejected)
    number = ((confidence - 0.5) * 2 * num_bins).long().clamp(0, num_bins - 1)
    width = 0.5 / num_bins
    return tuple(
        _bin(0.5 + i * width, 0.5 + (i + 1) * width, confidence[number == i], credit[number == i])
        for i in range(num_bins)
    )


def _bin(low: float, high: float, confidence: Tensor, credit: Tensor) -> ReliabilityBin:
    return ReliabilityBin(
        low=low,
        high=high,
        count=len(credit),
        confidence=float(confidence.mean()) if len(credit) else None,
        accuracy=float(credit.mean()) if len(credit) else None,
    )


def calibration_error(bins: tuple[ReliabilityBin, ...]) -> float:
    """Compute the expected calibration error: mean |accuracy - confidence|, by pairs.

    Args:
        bins: Of ``reliability``.

    Returns:
        In [0, 1]; nan without pairs.

    Source:
        Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    total = sum(b.count for b in bins)
    gaps = [
        b.count * abs(b.accuracy - b.confidence)
        for b in bins
        if b.accuracy is not None and b.confidence is not None
    ]
    return sum(gaps) / total if total else math.nan


@dataclass(frozen=True, kw_only=True)
class LengthBias:
    """How far scores follow the length of answers; None where there is nothing to measure.

    Args:
        accuracy_chosen_longer: Accuracy where the chosen answer is the longer one.
        accuracy_chosen_shorter: Accuracy where it is the shorter one. Far below the other one, it
            says that length is taken for quality.
        share_chosen_longer: Pairs whose chosen answer is the longer one.
        longer_wins_accuracy: Accuracy of a rule that always prefers the longer answer; ties half.
        correlation: Of score and length, over all answers.
        partial_correlation: The same with "was chosen" held fixed: what length adds to a score
            beyond that better answers may be longer.
    """

    accuracy_chosen_longer: float | None
    accuracy_chosen_shorter: float | None
    share_chosen_longer: float
    longer_wins_accuracy: float
    correlation: float | None
    partial_correlation: float | None


def length_bias(
    chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor
) -> LengthBias:
    """Measure how far scores follow the length of answers.

    Args:
        chosen: Scores. ``[N]`` finite float.
        rejected: Scores. ``[N]`` finite float.
        chosen_lengths: Of the answers alone, in tokens or any other unit. ``[N]``.
        rejected_lengths: ``[N]``.

    Raises:
        ValueError: There is no pair, or the four differ in shape.
    """
    _require_pairs(chosen, chosen_lengths)
    _require_pairs(rejected, rejected_lengths)
    if chosen.numel() == 0:
        raise ValueError("`chosen` must hold at least one pair, got none.")
    credit = pair_credit(chosen, rejected)
    longer, shorter = chosen_lengths > rejected_lengths, chosen_lengths < rejected_lengths
    scores = torch.cat([chosen, rejected]).double().tolist()
    lengths = torch.cat([chosen_lengths, rejected_lengths]).double().tolist()
    is_chosen = [1.0] * len(credit) + [0.0] * len(credit)
    plain = correlation(scores, lengths)
    return LengthBias(
        accuracy_chosen_longer=float(credit[longer].mean()) if longer.any() else None,
        accuracy_chosen_shorter=float(credit[shorter].mean()) if shorter.any() else None,
        share_chosen_longer=float(longer.double().mean()),
        longer_wins_accuracy=float(pair_credit(chosen_lengths, rejected_lengths).mean()),
        correlation=None if math.isnan(plain) else plain,
        partial_correlation=partial_correlation(scores, lengths, is_chosen),
    )


def partial_correlation(
    x: Sequence[float], y: Sequence[float], given: Sequence[float]
) -> float | None:
    """Compute the correlation of ``x`` and ``y`` that is left when ``given`` is held fixed.

    Args:
        x: Numbers.
        y: As many.
        given: As many. Where they do not vary, the plain correlation is returned.

    Returns:
        In [-1, 1]; None where it is not defined: ``x`` or ``y`` does not vary, or ``given`` alone
        determines one of them.
    """
    xy, xg, yg = correlation(x, y), correlation(x, given), correlation(y, given)
    if math.isnan(xy):
        return None
    if math.isnan(xg) or math.isnan(yg):
        return xy
    rest = (1 - xg * xg) * (1 - yg * yg)
    if rest < 1e-12:
        return None
    return max(-1.0, min(1.0, (xy - xg * yg) / math.sqrt(rest)))


def _require_pairs(left: Tensor, right: Tensor) -> None:
    if left.shape != right.shape:
        raise ValueError(
            "chosen and rejected answers must come in equal numbers, got shapes "
            f"{tuple(left.shape)} and {tuple(right.shape)}."
        )
