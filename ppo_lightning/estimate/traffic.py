"""Bytes that a rank sends in an iteration; it receives as many.

Collectives are taken to go around a ring, which moves the fewest bytes that there can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppo_lightning.estimate.run import Run
from ppo_lightning.estimate.sizes import NetworkSize, Sizes
from ppo_lightning.estimate.work import Work

STATES_BYTES = {"bfloat16": 2, "float16": 2}
"""Bytes of a number between layers, where products are computed in another dtype than float32."""


def all_gather_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends so that all have all parts.

    Args:
        size: Bytes of the whole.
        ranks: Each has one of so many parts.

    Source:
        Thakur et al. 2005, doi:10.1177/1094342005051521, section 4.1 (ring).
    """
    return size * (ranks - 1) / ranks


def reduce_scatter_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends so that each has one part of the sum.

    Args:
        size: Bytes of what is added up.
        ranks: Each has a summand.

    Source:
        Thakur et al. 2005, section 4.2 (ring).
    """
    return size * (ranks - 1) / ranks


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends so that all have the sum: a reduce-scatter and an all-gather.

    Args:
        size: Bytes of what is added up.
        ranks: Each has a summand.

    Source:
        Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
    """
    return reduce_scatter_bytes(size, ranks) + all_gather_bytes(size, ranks)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one rank sends in an iteration, in bytes.

    Args:
        rollout: The actor put together for sampling.
        scoring: Networks put together block by block.
        update: The same, forward and backward; gradients; weights after a step.
        tensor_rollout: Sums of hidden states within a layer (tensor parallel), while sampling.
        tensor_scoring: The same while scoring.
        tensor_update: The same while training.
        push: Weights to a generator of its own (asynchronous mode), from one rank.
    """

    rollout: float = 0.0
    scoring: float = 0.0
    update: float = 0.0
    tensor_rollout: float = 0.0
    tensor_scoring: float = 0.0
    tensor_update: float = 0.0
    push: float = 0.0

    @property
    def parts(self) -> Mapping[str, float]:
        """What there is, by name."""
        names = {
            "weights for the rollout": self.rollout,
            "weights for scoring": self.scoring,
            "weights and gradients of the update": self.update,
            "tensor parallel": self.tensor_rollout + self.tensor_scoring + self.tensor_update,
            "weights to a generator": self.push,
        }
        return {name: size for name, size in names.items() if size}

    @property
    def total(self) -> float:
        """Bytes of an iteration."""
        return sum(self.parts.values())


def traffic(run: Run, sizes: Sizes, work: Work, *, asynchronous: bool = False) -> Traffic:
    """Predict what a rank sends.

    Args:
        run: With its strategy.
        sizes: Of the networks.
        work: Of a rank.
        asynchronous: A generator of its own gets the weights of every version: of a policy with
            adapters, these alone.
    """
    strategy, ranks = run.strategy, run.data_ranks
    gathers = strategy.cuts_weights
    scored = sum(size.weights for size in sizes.scoring)
    update = update_bytes(run, sizes.trained, work, work.epochs)
    if work.critic_epochs:
        critic = (sizes.critic,) if sizes.critic is not None else (sizes.actor,)
        update += update_bytes(run, critic, work, work.critic_epochs)
    actor = sizes.actor
    return Traffic(
        rollout=all_gather_bytes(actor.weights, ranks) if gathers else 0.0,
        scoring=work.scoring_passes * all_gather_bytes(scored, ranks) if gathers else 0.0,
        update=update,
        tensor_rollout=_sums(run, actor, work.tokens),
        tensor_scoring=sum(_sums(run, size, work.tokens) for size in sizes.scoring),
        tensor_update=_passes(run) * sum(
            _sums(run, size, work.tokens * work.epochs) for size in sizes.trained
        ),
        push=pushed_bytes(run, actor) if asynchronous else 0.0,
    )  # fmt: skip


def update_bytes(run: Run, trained: tuple[NetworkSize, ...], work: Work, epochs: int) -> float:
    """Predict what passes over the buffer send that train some networks.

    DDP adds gradients up once for each minibatch, after its last backward pass. FSDP2 and ZeRO 3
    gather every weight forward and once more backward; each backward pass ends in a
    reduce-scatter. ZeRO 1 and 2 gather the new weights after a step.

    Args:
        run: With its strategy.
        trained: Networks that take part.
        work: Of a rank.
        epochs: Passes over the buffer.

    Source:
        Rajbhandari et al. 2020, arXiv:1910.02054, section 7 (2Ψ for ZeRO 1 and 2, 3Ψ for 3).
    """
    strategy, ranks = run.strategy, run.data_ranks
    steps = epochs * work.steps
    passes = steps * work.microbatches
    gradients = sum(size.trained for size in trained)
    if strategy.kind == "ddp":
        return steps * all_reduce_bytes(gradients, ranks)
    if strategy.cuts_weights:
        whole = sum(2 * size.weights for size in trained)
        return passes * (all_gather_bytes(whole, ranks) + reduce_scatter_bytes(gradients, ranks))
    if strategy.cuts_states:
        return passes * reduce_scatter_bytes(gradients, ranks) + steps * all_gather_bytes(
            gradients, ranks
        )
    return 0.0


def tensor_bytes(tokens: float, *, hidden: int, blocks: int, size: int, tensor: int) -> float:
    """Bytes that each rank sends in one pass: two sums of hidden states in every block.

    Args:
        tokens: That pass through.
        hidden: Width of the states.
        blocks: Of the model.
        size: Bytes of a number.
        tensor: Ranks that share a layer.

    Source:
        Shoeybi et al. 2019, arXiv:1909.08053, section 3: two all-reduces forward, two backward.
    """
    return 2 * blocks * all_reduce_bytes(tokens * hidden * size, tensor)


def pushed_bytes(run: Run, actor: NetworkSize) -> float:
    """Bytes of the weights that a generator gets: adapters alone where there are some.

    Args:
        run: Says whether there are.
        actor: As a rank computes it; tensor-parallel parts are put together first.
    """
    return float(actor.trained if run.policy.lora is not None else actor.weights)


def number_bytes(run: Run) -> int:
    """Bytes of a number between layers."""
    if run.mixed_dtype is not None:
        return STATES_BYTES[run.mixed_dtype]
    return 8 if run.policy.dtype == "float64" else 4 if run.policy.dtype == "float32" else 2


def _sums(run: Run, network: NetworkSize, tokens: float) -> float:
    return tensor_bytes(
        tokens,
        hidden=network.hidden,
        blocks=network.blocks,
        size=number_bytes(run),
        tensor=run.strategy.tensor,
    )


def _passes(run: Run) -> int:
    """Passes of a training step that sum states: forward, backward, and forward again."""
    return 3 if run.policy.gradient_checkpointing is True else 2
