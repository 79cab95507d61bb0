"""Totals over tokens, responses, steps and ranks: added up first, divided once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from ppo_lightning.distributed import replica_group
from ppo_lightning.errors import unknown_key_message

Number = Tensor | float


class Sums(Metric):
    """Named sums and extremes in two vectors, whatever their number.

    Means are never kept: a mean is one sum divided by another (see ``quotient``) after all ranks
    are added, so that it weighs every token or response alike. ``compute`` brings the ranks
    together and takes one transfer from the device; ``add`` takes none.

    Args:
        sums: Names that are added up: values, squares, counts.
        maxima: Names of which the largest is kept.
        minima: Names of which the smallest is kept.
    """

    full_state_update = False

    total: Tensor
    largest: Tensor

    def __init__(
        self, sums: Sequence[str], *, maxima: Sequence[str] = (), minima: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self._sums = tuple(sums)
        self._maxima = tuple(maxima)
        self._minima = tuple(minima)
        self._names = frozenset((*sums, *maxima, *minima))
        if len(self._names) < len(sums) + len(maxima) + len(minima):
            raise ValueError("a name stands twice among `sums`, `maxima` and `minima`.")
        extremes = len(maxima) + len(minima)
        self.add_state("total", torch.zeros(len(sums), dtype=torch.float64), "sum")
        self.add_state("largest", torch.full((extremes,), -math.inf, dtype=torch.float64), "max")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Module:
        """Follow the module to its device, but not to its dtype.

        A network that is cast to bfloat16 must not take its totals along.
        """
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), exclude_state)

    @property
    def update_called(self) -> bool:
        """Always: a rank without rows has nothing to add, and that is no mistake to warn about."""
        return True

    def add(self, **values: Number) -> None:
        """Add values by name; names that are left out stay as they are.

        Args:
            values: Numbers or tensors with one element, of any numeric or bool dtype. A NaN stays
                visible, in sums and extremes alike.

        Raises:
            ValueError: A name was not declared, or a tensor has several elements.
        """
        self.update(**values)

    def update(self, **values: Number) -> None:
        """Do what ``add`` does; torchmetrics wants it under this name."""
        for name, value in values.items():
            if name not in self._names:
                raise ValueError(unknown_key_message(name, sorted(self._names), "these totals"))
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"`{name}` must be one number, got shape {tuple(value.shape)}.")
        sums = [values.get(name, 0.0) for name in self._sums]
        extremes = [values.get(name, -math.inf) for name in self._maxima]
        extremes += [-values.get(name, math.inf) for name in self._minima]
        if any(name in values for name in self._sums):
            self.total = self.total + _vector(sums, self.total)
        if any(name in values for name in (*self._maxima, *self._minima)):
            self.largest = torch.maximum(self.largest, _vector(extremes, self.largest))

    def _sync_dist(self, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
        """Add up over replicas: ranks that hold a model between them have seen the same."""
        super()._sync_dist(dist_sync_fn, process_group or replica_group())

    def compute(self) -> dict[str, float]:
        """Return the totals over all ranks; extremes that nothing was added to are left out."""
        numbers = torch.cat([self.total, self.largest]).tolist()
        split = len(self._sums) + len(self._maxima)
        extremes = dict(zip(self._maxima, numbers[len(self._sums) : split], strict=True))
        extremes |= zip(self._minima, (-number for number in numbers[split:]), strict=True)
        met = {
            name: number for name, number in extremes.items() if not self._is_start(name, number)
        }
        return dict(zip(self._sums, numbers[: len(self._sums)], strict=True)) | met

    def _is_start(self, name: str, number: float) -> bool:
        return number == (math.inf if name in self._minima else -math.inf)


def quotient(totals: Mapping[str, float], total: str, count: str) -> float | None:
    """Return a total divided by a total; None where nothing was counted."""
    return totals[total] / totals[count] if totals[count] else None


def deviation(totals: Mapping[str, float], total: str, squares: str, count: str) -> float | None:
    """Return the pooled population deviation; None where nothing was counted.

    Args:
        totals: From ``Sums.compute``.
        total: Name of the sum of the values.
        squares: Name of the sum of their squares.
        count: Name of their number.
    """
    if not totals[count]:
        return None
    mean = totals[total] / totals[count]
    variance = totals[squares] / totals[count] - mean * mean
    # Rounding may leave a constant a little below 0; NaN is let through.
    return math.sqrt(0.0 if variance < 0 else variance)


def _vector(values: Sequence[Number], like: Tensor) -> Tensor:
    """Put numbers and tensors side by side; the work grows little with their number."""
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, Tensor)}
    plain = [math.nan if isinstance(value, Tensor) else value for value in values]
    vector = torch.tensor(plain, dtype=like.dtype, device=like.device)
    if tensors:
        places = torch.tensor(list(tensors), device=like.device)
        vector[places] = torch.stack([_scalar(value, like) for value in tensors.values()]).to(
            like.dtype
        )
    return vector


def _scalar(value: Tensor, like: Tensor) -> Tensor:
    # Whole numbers are converted one by one: stacked with float32 they would be rounded to it.
    if value.device != like.device or not value.is_floating_point():
        value = value.to(like.device, like.dtype)
    return value if value.dim() == 0 else value.reshape(())
