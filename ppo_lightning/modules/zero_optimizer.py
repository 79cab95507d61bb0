"""An optimiser of torch under DeepSpeed's ZeRO, driven by PPO's own steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ppo_lightning.distributed import mark_part
from ppo_lightning.modules.optim import fill_adam_state
from ppo_lightning.modules.zero_layout import Part, parts_of


class ZeROOptimizer(Optimizer):
    """The optimiser that a run sees: its groups hold this rank's part of the weights.

    The engine adds gradients up and cuts them as its stage says. ``collect_gradients`` makes them
    the gradients of the parts, so that norms, clipping and what is left out of a step are done to
    them as to any other; ``step`` hands them back. What goes in and out as ``state_dict`` is whole,
    and as the plain optimiser would have it; both are to be called on all ranks.

    Args:
        engine: Of DeepSpeed, built with ``base``.
        base: Of torch.
        groups: Weights of each of its groups, before the engine took them.
    """

    def __init__(
        self, engine: Any, base: Optimizer, groups: Sequence[Sequence[nn.Parameter]]
    ) -> None:
        # Not the parent's: the groups are those of `base`, whose learning rates a schedule sets.
        self.engine, self.zero, self.base = engine, engine.optimizer, base
        self.defaults = base.defaults
        self.weights = [list(group) for group in groups]
        self.parts: list[list[Part]] = parts_of(engine)
        for part in self._all_parts():
            mark_part(part.flat)
        base.register_step_pre_hook(self._leave_out)
        self._idle: set[str] = set()
        self._collected: list[Tensor] = []
        self._begin_states()
        engine.set_gradient_accumulation_boundary(False)

    def _all_parts(self) -> list[Part]:
        return [part for group in self.parts for part in group]

    def _begin_states(self) -> None:
        """Fill Adam's states as they are without ZeRO: those of before are of other tensors."""
        filled = any(self.base.state.values())
        self.base.state.clear()
        if filled:
            for group, parts in zip(self.base.param_groups, self.parts, strict=True):
                fill_adam_state(self.base, [part.flat for part in parts], group["amsgrad"])

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of ``base``, with the parts as their parameters."""
        pairs = zip(self.base.param_groups, self.parts, strict=True)
        return [{**group, "params": [part.flat for part in parts]} for group, parts in pairs]

    @property
    @override
    def state(self) -> Any:  # type: ignore[override]
        """States of the parts."""
        return self.base.state

    # ------------------------------------------------------------------ one step

    def backward(self, loss: Tensor) -> None:
        """Run a backward pass; gradients add up until the next step.

        Args:
            loss: Of this rank; gradients are averaged over ranks.
        """
        # Both are part of the engine's own forward pass, which is not the one that was called.
        self.zero.clear_backward_seen_flag()
        self.engine._backward_prologue()
        self.engine.backward(loss, scale_wrt_gas=False)

    def collect_gradients(self) -> None:
        """Make what the backward passes have left the gradients of the parts."""
        self.engine.set_gradient_accumulation_boundary(True)
        if self.zero_stage == 1:
            self.engine.allreduce_gradients()
        else:
            self.zero.finalize_gradient_accumulation_boundary()
        self.engine.set_gradient_accumulation_boundary(False)
        for number, part in enumerate(self._all_parts()):
            found = self.zero.averaged_gradients[number]
            self._collected += found if self.zero_stage == 3 else []
            part.flat.grad = torch.cat([gradient.flatten() for gradient in found])
            self.zero.averaged_gradients[number] = [part.flat.grad]

    @property
    def zero_stage(self) -> int:
        """1, 2 or 3."""
        return int(self.engine.zero_optimization_stage())

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        found = None if closure is None else closure()
        if self.zero_stage < 3:
            self.zero.refresh_fp32_params()  # whoever writes to weights writes to the model's
        self._idle = {
            g["name"] for g in self.param_groups if all(p.grad is None for p in g["params"])
        }
        self.zero.step()
        return found

    def _leave_out(self, base: Optimizer, *_: Any) -> None:
        """Take the gradients of a group that is not trained away again, before it would step."""
        for group in base.param_groups:
            for parameter in group["params"] if group["name"] in self._idle else ():
                parameter.grad = None

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zero.zero_grad(set_to_none=True)
        for number, part in enumerate(self._all_parts()):
            part.flat.grad = None
            self.zero.averaged_gradients[number] = None
            if self.zero_stage < 3:
                self.zero.all_grad_tensors[number] = None
        for buffer in self._collected:  # or a weight without a gradient next time would have these
            buffer.zero_()
        self._collected = []

    # ------------------------------------------------------------------ states, whole

    @override
    def state_dict(self) -> dict[str, Any]:
        numbers = {id(p): n for n, p in enumerate(p for group in self.weights for p in group)}
        states: dict[int, dict[str, Any]] = {}
        for part in self._all_parts():
            for key, value in self.base.state.get(part.flat, {}).items():
                for weight, found in part.whole(value):
                    states.setdefault(numbers[id(weight)], {})[key] = found
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            | {"params": [numbers[id(p)] for p in weights]}
            for group, weights in zip(self.base.param_groups, self.weights, strict=True)
        ]
        return {"state": dict(sorted(states.items())), "param_groups": groups}

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        numbers = {id(p): n for n, p in enumerate(p for group in self.weights for p in group)}
        for own, saved in zip(self.base.param_groups, state_dict["param_groups"], strict=True):
            own.update({k: v for k, v in saved.items() if k != "params"})
        for part in self._all_parts():
            entries = {id(w): state_dict["state"].get(numbers[id(w)], {}) for w in part.weights}
            keys = dict.fromkeys(key for entry in entries.values() for key in entry)
            self.base.state[part.flat] = {
                key: part.own([entries[id(w)].get(key) for w in part.weights]) for key in keys
            }
