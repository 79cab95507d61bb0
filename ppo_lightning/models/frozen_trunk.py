"""Blocks that nothing trains: what they make of a buffer is computed once and kept.

Adapters on the last blocks leave those below as they are, and so whatever comes out of them. A pass
over tokens whose states are known begins behind them. Which blocks these are, and whether a family
can begin there, is found out by trying when the model is loaded; one that was never tried runs all
of its blocks each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ppo_lightning.functional import row_multiple
from ppo_lightning.models.adapters import adapter_layers, block_names
from ppo_lightning.models.checks import can_be_tried, embedding_rows
from ppo_lightning.models.fused.classes import CANNOT
from ppo_lightning.models.inputs import ModelInputs, call_model, replaced_forward
from ppo_lightning.models.layout import TokenLayout, read_whole
from ppo_lightning.models.reading import alike, reading_of
from ppo_lightning.types import Sequences, TrunkStates

_ATTRIBUTE = "_frozen_trunk"


@dataclass(frozen=True, kw_only=True)
class FrozenTrunk:
    """The frozen blocks of a model, from the first.

    Args:
        names: Of these blocks and of those behind them, in their order.
        depth: How many of them are frozen, at least one.
        beside: How many things a block returns behind the states, which nobody asks for; None where
            it returns the states by themselves.
        trained: Names of the weights that were trained when it was found out.
    """

    names: tuple[str, ...]
    depth: int
    beside: int | None
    trained: frozenset[str]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """All blocks of a model, or of a copy of it."""
        return [model.get_submodule(name) for name in self.names]

    def output(self, states: Tensor) -> Any:
        """Return what a block returns that ends with these states."""
        return states if self.beside is None else (states, *[None] * self.beside)


def frozen_trunk_of(model: nn.Module) -> FrozenTrunk | None:
    """Return the frozen blocks that a model was found to have."""
    return getattr(model, _ATTRIBUTE, None)


def keep_frozen_trunk(model: nn.Module, trunk: FrozenTrunk | None) -> None:
    """Remember it."""
    setattr(model, _ATTRIBUTE, trunk)


def is_still_frozen(model: nn.Module) -> bool:
    """Whether the frozen blocks do what they did when they were tried, and nothing watches them.

    Somebody may have thawed weights, switched dropout on, or set hooks that wait for each pass
    (sharding, offloading, profiling).
    """
    trunk = frozen_trunk_of(model)
    if trunk is None or trained_names(model) != trunk.trained:
        return False
    frozen = trunk.blocks(model)[: trunk.depth]
    return not any(_is_watched(part) or _is_noisy(part) for b in frozen for part in b.modules())


@torch.no_grad()
def with_frozen_states(model: Any, sequences: Sequences, groups: Sequence[Tensor]) -> Sequences:
    """Add what the frozen blocks make of every token, from one pass through these blocks alone.

    Args:
        model: Causal language model of transformers that has some.
        sequences: Prompts and responses; those that any later pass reads, or more.
        groups: Rows that are read together, each row in one group. ``[N_i]`` long each.

    Returns:
        The sequences; as they are where there is no group.
    """
    packed = reading_of(model).takes_packed(sequences.width)
    multiple = row_multiple(model.get_input_embeddings().weight)
    places = torch.full_like(sequences.input_ids, -1)  # padding that no group reads: a row of 0
    inputs, sizes = list[ModelInputs](), list[int]()
    for rows in groups:
        part = sequences.select(rows).trimmed()
        read, numbers = read_whole(part, packed=packed, multiple=multiple)
        first = sequences.prompt_ids.shape[1] - part.prompt_ids.shape[1]
        places[rows.to(places.device), first : first + part.width] = numbers + sum(sizes)
        inputs.append(read)
        sizes.append(read.input_ids.numel())
    if not inputs:
        return sequences
    states = _joined((_frozen_states(model, read) for read in inputs), sizes)
    return replace(sequences, trunk=TrunkStates(states=states, places=places))


def _joined(parts: Iterator[Tensor], sizes: Sequence[int]) -> Tensor:
    """Put states one after the other as they are made, so that none exist twice, and a row of 0."""
    first = next(parts).flatten(0, 1)
    states = first.new_empty(sum(sizes) + 1, first.shape[-1])
    states[-1] = 0
    rooms = torch.split(states[:-1], list(sizes))
    rooms[0].copy_(first)
    for room, part in zip(rooms[1:], parts, strict=True):
        room.copy_(part.flatten(0, 1))
    return states


def _frozen_states(model: Any, inputs: ModelInputs) -> Tensor:
    """Run the frozen blocks; those behind them hand on what they are given. ``[B, S, H]``."""
    trunk = frozen_trunk_of(model)
    assert trunk is not None
    blocks, found = trunk.blocks(model), list[Any]()

    def kept(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        found.append(plain(*args, **options))
        return found[0]

    with (
        replaced_forward(blocks[trunk.depth - 1], kept),
        _instead(blocks[trunk.depth :], lambda *_, **__: found[0]),
    ):
        call_model(model.base_model, inputs)
    states: Tensor = found[0] if trunk.beside is None else found[0][0]
    return states


@contextmanager
def begun_with(model: nn.Module, states: Tensor) -> Iterator[None]:
    """Let a model begin behind its frozen blocks.

    Args:
        model: Causal language model of transformers that has some.
        states: What they make of the tokens that it is called with. Shaped like its hidden states.
    """
    trunk = frozen_trunk_of(model)
    assert trunk is not None
    output = trunk.output(states)
    with _instead(trunk.blocks(model)[: trunk.depth], lambda *_, **__: output):
        yield


@contextmanager
def _instead(blocks: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of the ``forward`` of some blocks."""
    with ExitStack() as places:
        for block in blocks:
            places.enter_context(replaced_forward(block, forward))
        yield


# ---------------------------------------------------------------------- finding out


def trained_names(model: nn.Module) -> frozenset[str]:
    """Name the weights that are trained."""
    return frozenset(name for name, weight in model.named_parameters() if weight.requires_grad)


def learn_frozen_trunk(model: Any) -> FrozenTrunk | None:
    """Find out which blocks of a model are frozen, and whether it can begin behind them.

    Args:
        model: Causal language model of transformers with what is trained of it, on the CPU; others
            run all their blocks.
    """
    keep_frozen_trunk(model, None)
    names, depth = frozen_blocks(model)
    if not depth or not can_be_tried(model):
        return None
    training = model.training
    model.train()  # as it is in the run: dropout, if there is any, shows
    try:
        trunk = _tried(model, names, depth)
    except CANNOT:
        trunk = None  # blocks that hand on more than states
    finally:
        model.train(training)
    keep_frozen_trunk(model, trunk)
    return trunk


def frozen_blocks(model: Any) -> tuple[tuple[str, ...], int]:
    """Name the blocks of a model, and count those before the first with a weight that is trained.

    Blocks with an adapter are none of them: it may be switched off.

    Args:
        model: Causal language model of transformers.

    Returns:
        Names and number; none, and 0, where the blocks are not one list.
    """
    try:
        names = tuple(block_names(model))
    except ValueError:
        return (), 0
    changing = {*trained_names(model), *(f"{name}." for name, _ in adapter_layers(model))}
    for number, name in enumerate(names):
        if any(changed.startswith(f"{name}.") for changed in changing):
            return names, number
    return names, len(names)


def _tried(model: Any, names: tuple[str, ...], depth: int) -> FrozenTrunk | None:
    """Begin behind some blocks with states of another batch, and compare with the whole pass."""
    whole, rows = _sequences(model), torch.tensor([2, 0])
    packed = reading_of(model).takes_packed(whole.width)
    layout = TokenLayout.of(whole.select(rows).trimmed(), packed=packed)
    output, logits = _watched_pass(model, names[depth - 1], layout.inputs)
    if _is_trained(output[0] if isinstance(output, tuple) else output, model):
        return None
    beside = len(output) - 1 if isinstance(output, tuple) else None
    trunk = FrozenTrunk(names=names, depth=depth, beside=beside, trained=trained_names(model))
    keep_frozen_trunk(model, trunk)
    part = with_frozen_states(model, whole, [torch.arange(len(whole))]).select(rows).trimmed()
    begun = TokenLayout.of(part, packed=packed, trunk=part.trunk)
    assert begun.trunk is not None
    with torch.no_grad(), begun_with(model, begun.trunk):
        found = call_model(model, begun.inputs).logits
    asked = (each.flatten(0, 1)[layout.places] for each in (found, logits))
    return trunk if alike(*asked) else None


def _watched_pass(model: Any, block: str, inputs: ModelInputs) -> tuple[Any, Tensor]:
    """Return what a block returns in a pass with gradient, and the logits."""
    outputs: list[Any] = []
    watch = model.get_submodule(block).register_forward_hook(lambda *of: outputs.append(of[-1]))
    try:
        with torch.enable_grad():
            logits = call_model(model, inputs).logits
    finally:
        watch.remove()
    return outputs[0], logits


def _is_trained(states: Tensor, model: nn.Module) -> bool:
    """Whether anything that is trained has a part in some states: a soft prompt, embeddings.

    That they carry a gradient would not say so: with checkpointing their input may ask for one.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if not (trained and states.requires_grad):
        return False
    found = torch.autograd.grad(states.sum(), trained, allow_unused=True)
    return any(gradient is not None for gradient in found)


def _sequences(model: nn.Module) -> Sequences:
    """Three prompts and responses, two of the same prompt."""
    prompts = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]])
    responses = torch.arange(8, 26).view(3, 6)
    mask = torch.arange(6) < torch.tensor([[5], [6], [4]])
    rows = embedding_rows(model)
    return Sequences(
        prompt_ids=prompts % rows,
        prompt_mask=prompts % 4 >= torch.tensor([[1], [0], [1]]),
        response_ids=responses % rows,
        response_mask=mask,
    )


def _is_watched(part: nn.Module) -> bool:
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
    return any(hooks) or bool(part._backward_pre_hooks)


def _is_noisy(part: nn.Module) -> bool:
    return isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0
