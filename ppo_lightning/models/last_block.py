"""The last block of a model works for the tokens that are asked about, not for all of them.

Behind its attention nothing but a token itself reads what a last block makes of it, and of most
tokens of a prompt nobody asks. So layers that work token by token leave these out: of a Llama the
perceptron, the queries, and the layer behind the attention. Which they are in a family is found out
by trying when the model is loaded; one that was never tried computes all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ppo_lightning.distributed import is_sharded
from ppo_lightning.models.adapters import block_names
from ppo_lightning.models.attention import gathered_rows, scattered_rows
from ppo_lightning.models.checks import can_be_tried, embedding_rows
from ppo_lightning.models.fused.classes import CANNOT
from ppo_lightning.models.inputs import Forward, ModelInputs, call_model, replaced_forward
from ppo_lightning.models.reading import alike

_ATTRIBUTE = "_narrow_layers"
_in_force: ContextVar[tuple[nn.Module, Tensor | None] | None] = ContextVar("narrow", default=None)
_TOKENS, _ASKED = 12, (3, 6, 7, 11)  # of a trial: some of the asked have a neighbour, some not


def narrow_layers_of(model: nn.Module) -> tuple[str, ...]:
    """Name the layers, within the last block, that may leave tokens out."""
    found: tuple[str, ...] = getattr(model, _ATTRIBUTE, ())
    return found


def keep_narrow_layers(model: Any, names: tuple[str, ...]) -> None:
    """Remember them, also for the trunk alone."""
    for part in {id(part): part for part in (model, model.base_model)}.values():
        setattr(part, _ATTRIBUTE, names)


@contextmanager
def narrowed(model: nn.Module, rows: Tensor | None) -> Iterator[None]:
    """Let the last block leave out the tokens that nobody asks about.

    What it then says of them has no meaning, and no gradient.

    Args:
        model: Of transformers, or the trunk of one. In shards or compiled it computes all tokens.
        rows: The tokens to compute, counted over all rows of the input, each once. ``[N]`` long;
            None is all.
    """
    names = () if rows is None else narrow_layers_of(model)
    if not names or _is_treated(model):
        yield
        return
    block, token = _last_block(model), _in_force.set((model, rows))
    try:
        with ExitStack() as places:
            for name in names:
                layer = block.get_submodule(name)
                places.enter_context(replaced_forward(layer, _Narrow(rows)))
            yield
    finally:
        _in_force.reset(token)


def recomputed_alike() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Let a block that is run again in the backward pass leave out what it left out before.

    Returns:
        What ``context_fn`` of torch's checkpoints asks for: contexts of both runs.
    """
    now = _in_force.get()
    return nullcontext(), nullcontext() if now is None else narrowed(*now)


class _Narrow:
    """Calls a layer on some tokens."""

    def __init__(self, rows: Tensor | None, fill: float = 0.0) -> None:
        self._rows, self._fill = rows, fill

    def __call__(self, plain: Forward, x: Tensor) -> Tensor:
        tokens, rows = x.flatten(0, -2), self._rows
        assert rows is not None
        found = plain(gathered_rows(tokens, rows)[None])[0]
        whole = scattered_rows(found, rows, len(tokens), fill=self._fill)
        return whole.view(*x.shape[:-1], found.shape[-1])


def _is_treated(model: Any) -> bool:
    """Whether its blocks are put together or compiled by somebody else."""
    return is_sharded(model) or any(
        part._compiled_call_impl is not None for part in model.modules()
    )


def _last_block(model: Any) -> nn.Module:
    block: nn.Module = model.get_submodule(block_names(model)[-1])
    return block


# ---------------------------------------------------------------------- finding out


@torch.no_grad()
def learn_narrow_layers(model: Any) -> tuple[str, ...]:
    """Find out which layers of the last block work token by token, for nobody but the token.

    Args:
        model: Decoder of transformers, just loaded, on the CPU; others compute all tokens.
    """
    names: tuple[str, ...] = ()
    if can_be_tried(model):
        try:
            names = _tried(model)
        except CANNOT:
            names = ()  # its blocks are not one list, or not like others
    keep_narrow_layers(model, names)
    return names


def _tried(model: Any) -> tuple[str, ...]:
    block, calls = _last_block(model), list[tuple[Any, Any]]()

    def watched(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return plain(*args, **options)

    inputs = _inputs(model)
    with replaced_forward(block, watched):
        expected = call_model(model.base_model, inputs).last_hidden_state
    ((args, options),) = calls
    names = tuple(_found(block, lambda: block(*args, **options)))
    with ExitStack() as places:
        for name in names:
            places.enter_context(replaced_forward(block.get_submodule(name), _poisoned()))
        found = call_model(model.base_model, inputs).last_hidden_state
    return names if _same(found, expected) else ()


def _found(block: nn.Module, call: Callable[[], Any]) -> Iterator[str]:
    """Yield the layers that pass, the largest first: parts of a layer only if it does not."""
    passed: list[str] = []
    for name, layer in block.named_modules():
        inside = any(name.startswith(f"{whole}.") for whole in passed)
        if name and not inside and _has_matrix(layer) and _passes(layer, call):
            passed.append(name)
            yield name


def _passes(layer: nn.Module, call: Callable[[], Any]) -> bool:
    """Whether a layer says the same of some tokens without the others, whom nobody then misses."""
    made: list[Tensor] = []

    def kept(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        made.append(plain(*args, **options))
        return made[-1]

    try:
        with replaced_forward(layer, kept):
            whole = call()
        with replaced_forward(layer, kept), replaced_forward(layer, _poisoned()):
            part = call()
        ours, theirs = (x[0] if isinstance(x, tuple) else x for x in (part, whole))
        return len(made) == 2 and _of_rows(made) and _same(ours, theirs)
    except CANNOT:
        return False  # more inputs or outputs than one


def _of_rows(made: list[Tensor]) -> bool:
    """Whether a layer made the same of the asked tokens as of all."""
    whole, part = made
    return part.shape[1] == len(_ASKED) and alike(part, whole[:, list(_ASKED)])


def _poisoned() -> _Narrow:
    """Leave nan where tokens are left out, so that it shows who reads them."""
    return _Narrow(torch.tensor(_ASKED), fill=torch.nan)


def _same(found: Tensor, expected: Tensor) -> bool:
    asked = list(_ASKED)
    return alike(found[:, asked], expected[:, asked])


def _has_matrix(layer: nn.Module) -> bool:
    return any(weight.dim() > 1 for weight in layer.parameters())


def _inputs(model: Any) -> ModelInputs:
    places = torch.arange(_TOKENS)[None]
    return ModelInputs((places + 1) % embedding_rows(model), torch.ones_like(places), places)
