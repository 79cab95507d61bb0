"""Adam whose states lie on the CPU while the weights are on a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

PORTION = 1 << 26
"""Most numbers of the weights on their way to the CPU at once; a larger tensor goes alone."""


class OffloadedAdam(Optimizer):
    """Adam or AdamW with its states on the CPU, which computes the steps.

    The GPU keeps weights and gradients; a step brings both down and the new weights up. Weights are
    read anew each time, so that others may change them between steps. Numbers are those of the
    class on a CPU, and ``state_dict`` has its form: a run may go on with the plain class, or come
    from it. Parameters that lie on a CPU are stepped in place.

    Args:
        groups: Of parameters, as the class takes them.
        cls: ``torch.optim.Adam`` or ``torch.optim.AdamW``.
        options: Of the class.

    Raises:
        ValueError: A parameter is a shard of a larger one.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        cls: type[torch.optim.Adam],
        **options: Any,
    ) -> None:
        parameters = [parameter for group in groups for parameter in group["params"]]
        if any(hasattr(parameter, "full_tensor") for parameter in parameters):
            raise ValueError("weights in shards cannot be offloaded; leave `offload` out.")
        self._stand_ins = {parameter: _stand_in(parameter) for parameter in parameters}
        self._inner = cls(
            [{**g, "params": [self._stand_ins[p] for p in g["params"]]} for g in groups], **options
        )
        super().__init__([dict(group) for group in groups], self._inner.defaults)
        self.state = _States()

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _copy_settings(self.param_groups, self._inner.param_groups)
        for arrived in _prefetched(self._portions()):
            self._step_some(arrived)
        return loss

    def _portions(self) -> Iterator[list[Parameter]]:
        """Parameters with a gradient, as many at a time as may be on their way."""
        taken: list[Parameter] = []
        size = 0
        for parameter in self._stand_ins:
            if parameter.grad is None:
                continue
            if taken and size + parameter.numel() > PORTION:
                yield taken
                taken, size = [], 0
            taken.append(parameter)
            size += parameter.numel()
        if taken:
            yield taken

    def _step_some(self, rows: Sequence[_Row]) -> None:
        for row in rows:
            stand_in = self._stand_ins[row.parameter]
            stand_in.data, stand_in.grad = row.weight, row.grad
            self._inner.state[stand_in] = self.state[row.parameter]
        self._inner.step()
        for row in rows:
            row.parameter.copy_(row.weight, non_blocking=True)
            stand_in = self._stand_ins[row.parameter]
            stand_in.data, stand_in.grad = row.weight.new_empty(0), None

    @override
    def state_dict(self) -> dict[str, Any]:
        """As of the plain class; tensors are on the CPU."""
        found = super().state_dict()
        return {**found, "state": {key: dict(state) for key, state in found["state"].items()}}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of either class."""
        # Torch brings states to their parameters, which here are the stand-ins on the CPU.
        self._inner.load_state_dict(dict(state_dict))
        _copy_settings(self._inner.param_groups, self.param_groups)
        self.state = _States()
        for parameter, stand_in in self._stand_ins.items():
            self.state[parameter] = self._inner.state[stand_in]


class _States(defaultdict[Tensor, dict[str, Any]]):
    """What is remembered of each parameter, on the CPU, whatever is put in."""

    def __missing__(self, parameter: Tensor) -> dict[str, Any]:
        self[parameter] = {}
        return self[parameter]

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        super().__setitem__(parameter, _CPUState(state))


class _CPUState(dict[str, Any]):
    """States of one parameter; Lightning moves an optimiser's to the weights' device, or tries."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for name, value in (given or {}).items():
            self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value.cpu() if isinstance(value, Tensor) else value)


class _Row(NamedTuple):
    """A parameter, and its weight and gradient on the CPU."""

    parameter: Parameter
    weight: Tensor
    grad: Tensor


def _prefetched(portions: Iterator[list[Parameter]]) -> Iterator[list[_Row]]:
    """Bring parameters down, one portion further than the one that is handed out."""
    coming: tuple[list[_Row], torch.cuda.Event | None] | None = None
    for portion in portions:
        before, coming = coming, _start_copies(portion)
        if before is not None:
            yield _wait_for(*before)
    if coming is not None:
        yield _wait_for(*coming)


def _start_copies(portion: Sequence[Parameter]) -> tuple[list[_Row], torch.cuda.Event | None]:
    rows = [_Row(p, to_cpu(p.detach()), to_cpu(p.grad)) for p in portion if p.grad is not None]
    if not portion[0].is_cuda:
        return rows, None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(portion[0].device))
    return rows, event


def _wait_for(rows: list[_Row], event: torch.cuda.Event | None) -> list[_Row]:
    if event is not None:
        event.synchronize()
    return rows


def to_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU: itself, or a copy that may still be on its way."""
    if tensor.device.type == "cpu":
        return tensor
    room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return room.copy_(tensor, non_blocking=tensor.is_cuda)


def _stand_in(parameter: Parameter) -> Parameter:
    """Make what the class steps in a parameter's place; it has numbers only during a step."""
    return Parameter(parameter.detach().new_empty(0, device="cpu"))


def _copy_settings(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Bring rates and the like from some groups to others."""
    for given, group in zip(source, target, strict=True):
        group.update({name: value for name, value in given.items() if name != "params"})
