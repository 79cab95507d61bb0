"""Bytes of all tensors that are alive while something runs on tensors without contents."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OTHER = "activations"


class ByteTally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is allocated and freed in its context, and remembers the most there was.

    Args:
        logits_width: Tensors with so many columns are counted as logits.
        left_out: Kinds that are claimed and count nothing.

    Attributes:
        peak: Most bytes at once since ``restart``.
        at_peak: What they were, by kind.
    """

    def __init__(self, *, logits_width: int | None = None, left_out: Collection[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left_out = left_out
        self._kinds: dict[int, str] = {}
        self._now: Counter[str] = Counter()
        self._logits_width = logits_width
        self._total = 0
        self.restart()

    @property
    def total(self) -> int:
        """Bytes that are alive."""
        return self._total

    @property
    def now(self) -> Mapping[str, int]:
        """The same by kind."""
        return +self._now

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak, self.at_peak = self._total, +self._now

    def claim(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what some tensors are; those that were not seen yet count from now on."""
        for tensor in tensors:
            self._see(tensor, kind)
            key = id(tensor.untyped_storage())
            size = tensor.untyped_storage().nbytes()
            self._add(self._kinds[key], -size)
            self._add(kind, size)
            self._kinds[key] = kind

    def rename(self, old: str, new: str) -> None:
        """Say that everything of one kind is of another."""
        self._kinds = {key: new if kind == old else kind for key, kind in self._kinds.items()}
        self._now[new] += self._now.pop(old, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it returns."""
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                wide = tensor.dim() > 1 and tensor.shape[-1] == self._logits_width
                self._see(tensor, "logits" if wide else OTHER)
        return found

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._kinds:
            return
        size = storage.nbytes()
        self._kinds[key] = kind
        weakref.finalize(storage, self._forget, key, size)
        self._add(kind, size)
        if self._total > self.peak:
            self.peak, self.at_peak = self._total, +self._now

    def _forget(self, key: int, size: int) -> None:
        self._add(self._kinds.pop(key), -size)

    def _add(self, kind: str, size: int) -> None:
        if kind not in self._left_out:
            self._now[kind] += size
            self._total += size


class Blank:
    """Makes tensors that have a shape and a dtype and no contents; they pass for a CPU's.

    What is computed with one of them is another. Tensors of the ordinary kind stay what they are,
    so that lengths and masks can still be looked at.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fill(self, module: nn.Module) -> None:
        """Put blank tensors in the place of all parameters and buffers; tied ones stay tied."""
        made: dict[int, Tensor] = {}
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    if tensor is not None and not self.is_blank(tensor):
                        key = id(tensor)
                        made[key] = made[key] if key in made else self._like(tensor)
                        table[name] = made[key]  # type: ignore[assignment]

    def is_blank(self, tensor: Tensor) -> bool:
        """Whether it has no contents."""
        return getattr(tensor, "fake_mode", None) is self._mode

    def _like(self, tensor: Tensor) -> Tensor:
        with self._mode:
            blank = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(blank, requires_grad=tensor.requires_grad)
        return blank


@contextmanager
def claiming_gradients(tally: ByteTally, module: nn.Module) -> Iterator[None]:
    """Count the gradients of a module's parameters as such, once they are there."""
    hooks = [
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda p: tally.claim([p.grad], "gradients") if p.grad is not None else None
        )
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
