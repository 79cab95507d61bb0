"""How large the networks of a run are, and in which pieces they are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from ppo_lightning.estimate.networks import Networks


@dataclass(frozen=True, kw_only=True)
class NetworkSize:
    """One network, as a rank computes it.

    Args:
        parameters: Weights that are multiplied with, by number: without tables that are only
            looked up.
        weights: All weights, in bytes.
        block: Bytes of its largest block, which is put together as one.
        rest: Bytes of what is in no block (embedding, output layer), put together for a whole pass.
        trained: Bytes of what is trained.
        trained_block: The same of the largest block.
        trained_rest: The same of what is in no block.
        blocks: Their number.
        hidden: Width of its hidden states.
    """

    parameters: int
    weights: int
    block: int
    rest: int
    trained: int
    trained_block: int
    trained_rest: int
    blocks: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The networks of a run.

    Args:
        actor: The policy; with a shared critic its head is in ``rest``.
        critic: Of its own; None where it shares the actor's trunk.
        reference: A second copy on the same device; None where there is none.
        rewards: Learned rewards.
    """

    actor: NetworkSize
    critic: NetworkSize | None
    reference: NetworkSize | None
    rewards: tuple[NetworkSize, ...] = ()

    @property
    def trained(self) -> tuple[NetworkSize, ...]:
        """Networks that gradients are of."""
        return tuple(size for size in (self.actor, self.critic) if size is not None)

    @property
    def scoring(self) -> tuple[NetworkSize, ...]:
        """Networks that are asked about every response."""
        return (*self.trained, *((self.reference,) if self.reference is not None else ()))


def sizes_of(networks: Networks) -> Sizes:
    """Measure networks.

    Args:
        networks: Without contents or with them.
    """
    trained = networks.trained
    heads = () if trained.value_head is None else (trained.value_head,)
    reference = None
    if not (networks.reference.adapter_off or networks.reference_away):
        with networks.reference.causal_lm() as model:
            reference = _measure(model)
    return Sizes(
        actor=_measure(trained.actor, *heads),
        critic=None if trained.critic is None else _measure(trained.critic),
        reference=reference,
        rewards=tuple(_measure(network) for _, network in networks.scorers),
    )


def _measure(network: nn.Module, *heads: nn.Module) -> NetworkSize:
    parts = (network, *heads)
    config: Any = next(part.config for part in network.modules() if hasattr(part, "config"))
    blocks = _blocks(network, config.get_text_config().num_hidden_layers)
    weights, trained = _bytes_of(parts), _bytes_of(parts, trained=True)
    in_blocks, trained_in_blocks = _bytes_of(blocks), _bytes_of(blocks, trained=True)
    return NetworkSize(
        parameters=_multiplied(parts),
        weights=weights,
        block=max((_bytes_of([block]) for block in blocks), default=0),
        rest=weights - in_blocks,
        trained=trained,
        trained_block=max((_bytes_of([block], trained=True) for block in blocks), default=0),
        trained_rest=trained - trained_in_blocks,
        blocks=len(blocks),
        hidden=config.get_text_config().hidden_size,
    )


def _multiplied(parts: Iterable[nn.Module]) -> int:
    """Count weights, but for embeddings that are not the output layer as well."""
    modules = [module for part in parts for module in part.modules()]
    looked_up = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
    looked_up -= {id(m.weight) for m in modules if isinstance(m, nn.Linear)}
    found = {id(p): p for m in modules for p in m.parameters(recurse=False)}
    return sum(p.numel() for key, p in found.items() if key not in looked_up)


def _blocks(network: nn.Module, count: int) -> list[nn.Module]:
    """The blocks; none where they are not one list: the whole is then one piece."""
    lists = (part for part in network.modules() if isinstance(part, nn.ModuleList))
    return next((list(part) for part in lists if len(part) == count), [])


def _bytes_of(parts: Iterable[nn.Module], *, trained: bool = False) -> int:
    found: dict[int, Tensor] = {id(p): p for part in parts for p in part.parameters()}
    kept = (p for p in found.values() if p.requires_grad or not trained)
    return sum(p.numel() * p.element_size() for p in kept)


def combined(change: Callable[..., int], *records: Any) -> Any:
    """Combine whole numbers of records of one kind, field by field.

    Args:
        change: Of the numbers of all records.
        records: With fields that are numbers, such records, tuples of them, or None.
    """
    first = records[0]
    if isinstance(first, Sizes | NetworkSize):
        values = {
            f.name: combined(change, *(getattr(record, f.name) for record in records))
            for f in fields(first)
        }
        return type(first)(**values)
    if isinstance(first, tuple):
        return tuple(combined(change, *part) for part in zip(*records, strict=True))
    return first if first is None else change(*records)
