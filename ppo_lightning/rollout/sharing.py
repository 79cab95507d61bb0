"""Which replica works on which rows of a minibatch: about as many tokens for each.

A replica that has more tokens than the others keeps them waiting at every step. So the rows of the
buffer, which are small beside the work on them, go to all replicas, and each minibatch is shared
out by length. Its rows and its sums are the same whoever works on them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppo_lightning.distributed import gather_objects, num_replicas
from ppo_lightning.types import Experience, Sequences

_PROMPT = ("prompt_ids", "prompt_mask")
NEAR = 0.002
"""Two shares that differ by this part of one are as good as equal."""


def rows_of_all_replicas(experience: Experience) -> Experience:
    """Return the whole buffer, in the order of the responses' numbers. To be called on all ranks.

    Padding grows to the widest replica's. States of frozen blocks are too large to travel: with
    them each replica keeps its own rows.

    Args:
        experience: This replica's rows.
    """
    if num_replicas() == 1 or experience.sequences.trunk is not None:
        return experience
    device = experience.indices.device
    parts = gather_objects([experience.to("cpu")])
    sequences = _joined([part.sequences for part in parts])
    whole: Experience = replace(_joined(parts), sequences=sequences)
    return whole.select(whole.indices.argsort()).to(device)


def balanced_shares(costs: Sequence[float], shares: int) -> list[list[int]]:
    """Share items out so that the shares cost about the same.

    The dearest item goes first, each to the share that is the cheapest by then; at the end the
    dearest and the cheapest share exchange items as long as that brings them together.

    Args:
        costs: Of each item, above 0.
        shares: Their number; each gets an item if there are enough.

    Returns:
        Numbers of the items of each share, ascending. The same for the same costs.

    Source:
        Graham 1969, Bounds on multiprocessing timing anomalies: at most 4/3 of the best possible.
    """
    cheapest = [(0.0, share) for share in range(shares)]
    found: list[list[int]] = [[] for _ in range(shares)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        spent, share = heapq.heappop(cheapest)
        found[share].append(item)
        heapq.heappush(cheapest, (spent + costs[item], share))
    near = NEAR * sum(costs) / shares
    while _brought_together(found, costs, near):
        pass
    return [sorted(items) for items in found]


def _brought_together(found: list[list[int]], costs: Sequence[float], near: float) -> bool:
    """Let the dearest share give the cheapest an item, maybe for another one, if that helps."""
    spent = [sum(costs[item] for item in items) for items in found]
    dear, cheap = spent.index(max(spent)), spent.index(min(spent))
    gap = spent[dear] - spent[cheap]
    if gap <= near:
        return False
    # Index -1 is nothing in return.
    pairs = ((given, back) for given in found[dear] for back in (-1, *found[cheap]))
    moved = {(g, b): costs[g] - (costs[b] if b >= 0 else 0.0) for g, b in pairs}
    helping = {pair: cost for pair, cost in moved.items() if 0 < cost < gap}
    if not helping:
        return False
    given, back = min(helping, key=lambda pair: (abs(gap - 2 * helping[pair]), pair))
    found[dear].remove(given)
    found[cheap].append(given)
    if back >= 0:
        found[cheap].remove(back)
        found[dear].append(back)
    return True


def share_of(
    rows: Tensor, lengths: Tensor, *, owner: int, owners: int, together: int = 1
) -> Tensor:
    """Return one replica's rows of a minibatch.

    Args:
        rows: Of the minibatch, of the whole buffer. ``[N]`` long.
        lengths: Tokens of each row of the buffer. ``[B]`` long.
        owner: Number of the replica.
        owners: Replicas.
        together: So many rows, one after the other, go to one replica: they have a prompt in
            common, which is read once.

    Returns:
        ``[M]`` long, in the order of ``rows``.
    """
    groups = torch.split(rows, together)
    costs = [float(lengths[group].sum()) + 1 for group in groups]
    mine = [groups[i] for i in balanced_shares(costs, owners)[owner]]
    return torch.cat(mine) if mine else rows[:0]


def _joined(records: Sequence[Any]) -> Any:
    """Put the rows of records of one kind under each other; records within them are the first's."""
    joined: dict[str, Any] = {}
    for field in fields(records[0]):
        columns = [getattr(record, field.name) for record in records]
        if isinstance(columns[0], Tensor):
            width = max(column.shape[-1] for column in columns)
            at_front = isinstance(records[0], Sequences) and field.name in _PROMPT
            joined[field.name] = torch.cat([_widened(c, width, at_front) for c in columns])
    return replace(records[0], **joined)


def _widened(rows: Tensor, width: int, at_front: bool) -> Tensor:
    """Fill rows up with 0 to a width; what is no row of tokens stays as it is."""
    if rows.dim() < 2:
        return rows
    missing = width - rows.shape[-1]
    return pad(rows, (missing, 0) if at_front else (0, missing))
