"""Where the weights of a model lie in the flat parts of DeepSpeed's ZeRO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """This rank's part of some weights, in float32.

    Args:
        flat: Its numbers, which the optimiser steps. ``[N]``
        weights: Those that it is a part of.
        offsets: Where each begins: in the parts of all ranks laid end to end, in stages 1 and 2; in
            stage 3 in this part, where every weight is cut by itself.
        stage: Of ZeRO.
    """

    flat: Tensor
    weights: list[nn.Parameter]
    offsets: list[int]
    stage: int

    def whole(self, value: Any) -> list[tuple[nn.Parameter, Any]]:
        """Put a state together; to be called on all ranks.

        Args:
            value: Of the part: for each of its numbers one, or something for all of them.

        Returns:
            For each weight its own.
        """
        if not isinstance(value, Tensor) or value.shape != self.flat.shape:
            # One each: whoever goes on with a shared count of steps counts once for every weight.
            return [
                (w, value.clone() if isinstance(value, Tensor) else value) for w in self.weights
            ]
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value.contiguous())
        if self.stage < 3:
            laid = torch.cat(parts)
            spans = [
                laid[o : o + _size(w)] for w, o in zip(self.weights, self.offsets, strict=True)
            ]
        else:
            spans = [
                torch.cat([part[o : o + _share(w)] for part in parts])[: _size(w)]
                for w, o in zip(self.weights, self.offsets, strict=True)
            ]
        return [(w, s.view(_shape(w)).clone()) for w, s in zip(self.weights, spans, strict=True)]

    def own(self, values: list[Any]) -> Any:
        """Cut this rank's part out of a state.

        Args:
            values: For each weight its own; None is 0.
        """
        given = next(value for value in values if value is not None)
        if not isinstance(given, Tensor):
            return given
        if given.dim() == 0:
            return given.clone()
        made, rank = torch.zeros_like(self.flat), dist.get_rank()
        laid = made if self.stage == 3 else made.new_zeros(len(made) * dist.get_world_size())
        for weight, offset, value in zip(self.weights, self.offsets, values, strict=True):
            if value is None:
                continue
            numbers = value.flatten().to(made)
            if self.stage == 3:
                numbers = numbers[rank * _share(weight) : (rank + 1) * _share(weight)]
            laid[offset : offset + len(numbers)] = numbers
        return made if self.stage == 3 else laid[rank * len(made) : (rank + 1) * len(made)].clone()


def parts_of(engine: Any) -> list[list[Part]]:
    """Return the parts of each group of an engine's optimiser."""
    zero, stage = engine.optimizer, int(engine.zero_optimization_stage())
    if stage == 3:
        return _scattered(zero)
    found = []
    for number, flat in enumerate(zero.single_partition_of_fp32_groups):
        whole, weights = zero.bit16_groups_flat[number], list(zero.bit16_groups[number])
        offsets = [(w.data_ptr() - whole.data_ptr()) // w.element_size() for w in weights]
        found.append([Part(flat=flat, weights=weights, offsets=offsets, stage=stage)])
    return found


def _scattered(zero: Any) -> list[list[Part]]:
    found: list[list[Part]] = [[] for _ in zero.optimizer.param_groups]
    for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
        weights, offsets, end = list(zero.fp16_groups[number]), [], 0
        for weight in weights:
            offsets.append(end)
            end += _share(weight)
        part = Part(flat=flat, weights=weights, offsets=offsets, stage=3)
        found[zero.sub_group_to_group_id[number]].append(part)
    return found


def _share(weight: Any) -> int:
    """Numbers of a weight that a rank has in stage 3, padding included."""
    return int(weight.partition_numel())


def _size(weight: Any) -> int:
    return int(getattr(weight, "ds_numel", weight.numel()))


def _shape(weight: Any) -> torch.Size:
    return getattr(weight, "ds_shape", weight.shape)  # type: ignore[no-any-return]
