"""Statistics of groups, such as the responses to one prompt, whose members may be on any rank."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_lightning.functional.masking import accumulation_dtype
from ppo_lightning.functional.normalize import Reduce, identity


@torch.no_grad()
def group_moments(
    scores: Tensor, groups: Tensor, mask: Tensor | None = None, *, reduce: Reduce = identity
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute count, mean and population variance of each group, over all ranks.

    In two passes and in float64, as ``masked_moments``: members that are all equal give a variance
    of exactly 0.

    Args:
        scores: This rank's share. ``[B]`` float.
        groups: Number of each score's group, from 0; the same numbers on all ranks. Space is
            taken for all numbers below the largest. ``[B]`` long.
        mask: Scores that count; None when all do. ``[B]`` bool.
        reduce: Adds a vector over ranks; called three times.

    Returns:
        ``(count, mean, var)``, each ``[G]`` float64, 0 where a group has no member; G is at least
        the largest number plus one.

    Raises:
        ValueError: There is not one group a score, or a number is negative.
    """
    if groups.shape != scores.shape:
        raise ValueError(f"{list(scores.shape)} scores have {list(groups.shape)} `groups`.")
    num_slots = _slots(groups, reduce)
    invalid = torch.zeros_like(scores, dtype=torch.bool) if mask is None else ~mask
    x = scores.double().masked_fill(invalid, 0)

    def sums(*quantities: Tensor) -> Tensor:
        table = x.new_zeros(len(quantities), num_slots)
        return reduce(table.index_add(1, groups, torch.stack(quantities)).flatten())

    count, total = sums((~invalid).double(), x).chunk(2)
    divisor = count.clamp_min(1)
    mean = total / divisor
    centred = (x - mean[groups]).masked_fill(invalid, 0)
    slip, square = (part / divisor for part in sums(centred, centred.square()).chunk(2))
    return count, mean + slip, (square - slip.square()).clamp_min(0)


def _slots(groups: Tensor, reduce: Reduce) -> int:
    """Agree on a length that holds all group numbers of all ranks: a power of 2.

    Sums can find it: each rank votes for the bit length of its largest number.
    """
    votes = torch.zeros(64, dtype=torch.float64, device=groups.device)
    if len(groups) > 0:
        if int(groups.min()) < 0:
            raise ValueError(f"`groups` must count from 0, got {int(groups.min())}.")
        votes[int(groups.max()).bit_length()] = 1
    found = reduce(votes).nonzero().flatten().tolist()
    return int(2 ** max(found, default=0))


@torch.no_grad()
def group_zscore(
    scores: Tensor,
    groups: Tensor,
    mask: Tensor | None = None,
    *,
    eps: float = 1e-8,
    reduce: Reduce = identity,
) -> Tensor:
    """Normalise each score by the moments of its own group.

    Args:
        scores: This rank's share. ``[B]`` float.
        groups: See ``group_moments``. ``[B]`` long.
        mask: Scores that count towards the moments; None when all do. ``[B]`` bool.
        eps: Added to the standard deviation, outside the root; above 0.
        reduce: Adds a vector over ranks; called three times.

    Returns:
        ``[B]`` float32 or float64, without gradient; exactly 0 in a group of one and in a group
        without spread.

    Raises:
        ValueError: There is not one group a score, or a number is negative.

    Source:
        Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    _, mean, var = group_moments(scores, groups, mask, reduce=reduce)
    scaled = (scores.double() - mean[groups]) / (var[groups].sqrt() + eps)
    return scaled.masked_fill(var[groups] == 0, 0).to(accumulation_dtype(scores))


@torch.no_grad()
def leave_one_out(
    scores: Tensor, groups: Tensor, mask: Tensor | None = None, *, reduce: Reduce = identity
) -> Tensor:
    """Take from each score the mean of the others of its group (RLOO).

    Args:
        scores: This rank's share. ``[B]`` float.
        groups: See ``group_moments``. ``[B]`` long.
        mask: Scores that count; None when all do. ``[B]`` bool.
        reduce: Adds a vector over ranks; called three times.

    Returns:
        ``[B]`` float32 or float64, without gradient; 0 where there is no other, and outside the
        mask.

    Raises:
        ValueError: There is not one group a score, or a number is negative.

    Source:
        Ahmadian et al. 2024, arXiv:2402.14740, eq. 8.
    """
    count, mean, _ = group_moments(scores, groups, mask, reduce=reduce)
    members = count[groups]
    # x − (n·m − x) / (n − 1) = (x − m) · n / (n − 1)
    found = (scores.double() - mean[groups]) * members / (members - 1).clamp_min(1)
    alone = members < 2 if mask is None else (members < 2) | ~mask
    return found.masked_fill(alone, 0).to(accumulation_dtype(scores))


@torch.no_grad()
def in_flat_group(
    scores: Tensor, groups: Tensor, mask: Tensor | None = None, *, reduce: Reduce = identity
) -> Tensor:
    """Tell which scores are in a group of two or more that are all equal. ``[B]`` bool.

    Arguments and errors are those of ``group_moments``.
    """
    count, _, var = group_moments(scores, groups, mask, reduce=reduce)
    return ((count > 1) & (var == 0))[groups]


@torch.no_grad()
def group_spread(
    scores: Tensor, groups: Tensor, mask: Tensor | None = None, *, reduce: Reduce = identity
) -> tuple[int, int, float]:
    """Say how much scores differ within groups. Arguments and errors as of ``group_moments``.

    Returns:
        ``(compared, flat, spread)``: groups of two or more, those of them that are all equal, and
        the mean standard deviation (nan where none is compared). Over all ranks.
    """
    count, _, var = group_moments(scores, groups, mask, reduce=reduce)
    var = var[count > 1]
    return len(var), int((var == 0).sum()), float(var.sqrt().mean())


def first_alike(ids: Tensor, mask: Tensor) -> Tensor:
    """Find for each row the first one that holds the same valid ids.

    Args:
        ids: What stands outside the mask does not matter. ``[B, P]`` long, none negative.
        mask: ``[B, P]`` bool.

    Returns:
        Row numbers, each its own where no earlier row is alike. ``[B]`` long.
    """
    kinds, kind = torch.unique(ids.masked_fill(~mask, -1), dim=0, return_inverse=True)
    return first_members(kind, len(kinds))[kind]


def first_members(groups: Tensor, count: int) -> Tensor:
    """Find the place of the first member of each group.

    Args:
        groups: Number of each member's group; each group has one. ``[B]`` long in [0, count).
        count: Groups.

    Returns:
        ``[count]`` long.
    """
    places = torch.arange(len(groups), device=groups.device)
    return places.new_full((count,), len(groups)).scatter_reduce(0, groups, places, "amin")
