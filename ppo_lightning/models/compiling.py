"""Compiling the blocks of a model, part by part, with ``torch.compile``.

What is compiled are the parts of each block (norms, attention, perceptron), in place: names of
weights, adapters, sharding and copies stay as they are, all blocks share the code of one, and
recomputed activations, which begin and end with a block, come from the same code. Attention to
packed rows itself is left out: how many tokens each row has changes with every batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.models.adapters import block_names
from ppo_lightning.models.attention import ATTENTION, attend
from ppo_lightning.models.skeleton import is_weightless

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKEND = "inductor"
"""What ``torch.compile`` makes code with."""

_ATTRIBUTE = "_compiled_blocks"


def compile_blocks(model: PreTrainedModel, *, setting: str) -> None:
    """Compile the parts of each block, when they are first called.

    The number of tokens is left open, so that batches of other sizes need no other code.

    Args:
        model: Of transformers, or the trunk of one; changed in place.
        setting: That asks for it, for messages.

    Raises:
        ConfigError: There is no compiler that works.
        ValueError: The blocks are not one list.
    """
    if is_weightless():
        return
    if BACKEND == "inductor":
        _require_compiler(setting)
    _leave_attention_out()
    for name in block_names(model, setting=setting):
        for part in model.get_submodule(name).children():
            part.compile(backend=BACKEND, dynamic=True)
    setattr(model, _ATTRIBUTE, setting)


def compile_like(model: nn.Module, original: nn.Module) -> None:
    """Compile a copy where the original is compiled: copies are not by themselves."""
    if (setting := getattr(original, _ATTRIBUTE, None)) is not None:
        compile_blocks(model, setting=setting)  # type: ignore[arg-type]


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run the plain code meanwhile: a cache that grows would be compiled again and again.

    Args:
        model: Of transformers; nothing happens where it is not compiled.
    """
    if not hasattr(model, _ATTRIBUTE):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@cache
def _leave_attention_out() -> None:
    opaque = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION, opaque)


def _require_compiler(setting: str) -> None:
    try:
        _try_compiler()
    except Exception as error:
        raise ConfigError(
            f"`{setting}: true` needs a C++ compiler, on a GPU Triton as well, and they failed on "
            f"two lines of code ({first_line(error)}): install them (`apt install g++`; the "
            "variable CXX names another compiler), or leave the setting out."
        ) from error


@cache
def _try_compiler() -> None:
    """Compile something that no cache has yet."""
    number = time.time_ns() % 1_000_003

    def tried(x: Tensor) -> Tensor:
        return (x * number).sin() + x.cos()

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        torch.compile(tried, dynamic=True)(torch.ones(4, device=device))
