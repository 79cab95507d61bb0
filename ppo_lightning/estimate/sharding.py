"""The memory of one rank, where ranks share weights, gradients and optimiser states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ppo_lightning.estimate.run import Run
from ppo_lightning.estimate.sizes import NetworkSize, Sizes
from ppo_lightning.estimate.stages import StagePeak
from ppo_lightning.estimate.strategy import Strategy

BLOCKS_AT_ONCE = 2
"""Blocks that are whole at one time: one computes, the next is on its way.

FSDP2 lets two gathered blocks be alive at once (pytorch/pytorch#128884); on a CPU it is one.
"""

GATHERED = "gathered"
BUCKETS = "buckets"

DEEPSPEED_BUCKET = 200_000_000
"""Numbers in a bucket of DeepSpeed, by default of Lightning's ``DeepSpeedStrategy``; there are two:
of gradients to add up, and of weights to gather."""

_WEIGHTS = ("actor", "critic", "reference")


def on_one_rank(stages: Iterable[StagePeak], sizes: Sizes, run: Run) -> Iterator[StagePeak]:
    """Cut what is shared, and add what the strategy needs besides.

    Learned rewards stay whole on every rank; so do activations, which are of a rank's own rows.

    Args:
        stages: Of a rank with whole networks, without gradients.
        sizes: Of the networks.
        run: With its strategy.

    Yields:
        The stages with ``gradients``, ``gathered`` (what is put together for a while, and its
        gradients before they are cut), ``buckets`` and ``master weights`` (DeepSpeed's own float32
        copy of what is trained).
    """
    strategy, ranks = run.strategy, run.data_ranks
    trained = sum(size.trained for size in sizes.trained)
    for stage in stages:
        parts = {
            name: _cut(size, ranks, _is_cut(name, strategy)) for name, size in stage.parts.items()
        }
        if strategy.kind == "deepspeed":
            parts["master weights"] = _cut(trained, ranks, True)
        if stage.name == "update":
            parts["gradients"] = _cut(trained, ranks, strategy.cuts_gradients)
        parts[BUCKETS] = bucket_bytes(strategy, trained)
        if strategy.cuts_weights:
            parts[GATHERED] = gathered_bytes(stage.name, sizes, ranks)
        yield StagePeak(name=stage.name, parts={name: n for name, n in parts.items() if n})


def _cut(size: int, ranks: int, cut: bool) -> int:
    return -(-size // ranks) if cut else size


def _is_cut(part: str, strategy: Strategy) -> bool:
    if part in _WEIGHTS:
        return strategy.cuts_weights
    return part == "optimiser states" and strategy.cuts_states


def bucket_bytes(strategy: Strategy, trained: int) -> int:
    """Predict what gradients are copied to, to be added up.

    Args:
        strategy: DDP copies all of them, into buckets that last; DeepSpeed has two of a fixed size.
        trained: Bytes of what is trained.

    Source:
        Li et al. 2020, arXiv:2006.15704, section 4.2 (DDP).
    """
    if strategy.kind == "ddp":
        return trained
    return min(trained, 2 * 4 * DEEPSPEED_BUCKET) if strategy.kind == "deepspeed" else 0


def gathered_bytes(stage: str, sizes: Sizes, ranks: int) -> int:
    """Predict what is put together at the peak of a stage, where weights are cut.

    Args:
        stage: ``rollout`` has the whole actor; ``scoring`` and ``update`` two blocks at a time, and
            all that is in no block, which is whole during a pass; with gradients as large.
        sizes: Of the networks.
        ranks: They are cut over; one rank has all as it is.
    """
    if ranks == 1:
        return 0
    if stage == "rollout":
        return sizes.actor.weights
    if stage == "scoring":
        return _pieces(sizes.scoring)
    if stage == "update":
        gradients = BLOCKS_AT_ONCE * max(size.trained_block for size in sizes.trained)
        gradients += sum(size.trained_rest for size in sizes.trained)
        return _pieces(sizes.trained) + gradients
    return 0


def _pieces(networks: Sequence[NetworkSize]) -> int:
    blocks = BLOCKS_AT_ONCE * max(size.block for size in networks)
    return blocks + sum(size.rest for size in networks)
