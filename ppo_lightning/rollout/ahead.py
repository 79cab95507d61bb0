"""Buffers that are sampled while another one is trained on, and what a checkpoint keeps of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ppo_lightning.distributed import any_rank, gather_objects
from ppo_lightning.errors import RolloutError
from ppo_lightning.rollout.engines.background import BackgroundEngine
from ppo_lightning.types import PromptBatch, Rollout

log = logging.getLogger(__name__)

T = TypeVar("T")
Begin = Callable[[PromptBatch], None]

_COLUMNS = ("response_ids", "response_mask", "sampler_logprobs", "truncated")
_MARK_FACTOR = 6364136223846793005  # odd, so that no token's share is lost; Knuth's


@dataclass(kw_only=True)
class _Task:
    """A buffer that is being sampled, or has been.

    Args:
        iteration: That it is for.
        prompts: As they were handed over.
        rollout: Once it has been waited for.
        wanted: Whether it will still be used.
    """

    iteration: int
    prompts: PromptBatch
    rollout: Rollout | None = None
    wanted: bool = True


class RolloutsAhead:
    """At most one buffer ahead of the training: one that is done is taken before the next begins.

    Waiting is agreed on by all ranks, so that a failure on one of them ends all.
    """

    def __init__(self) -> None:
        self._next: tuple[int, PromptBatch] | None = None
        self._task: _Task | None = None
        self._kept: Mapping[str, Any] | None = None

    def prefetch(self, prompts: PromptBatch, *, iteration: int) -> None:
        """Have these prompts answered once the current buffer is there.

        Args:
            prompts: This rank's, for the next iteration.
            iteration: Its number.
        """
        self._next = iteration, prompts

    def sample(
        self, engine: BackgroundEngine, prompts: PromptBatch, *, iteration: int, begin: Begin
    ) -> Rollout:
        """Return the buffer of an iteration, and begin that of the next.

        Args:
            engine: Samples.
            prompts: Of this iteration.
            iteration: Its number.
            begin: Hands prompts over to the engine, with the current weights.

        Raises:
            RolloutError: The engine failed, on this rank or another.
        """
        device = prompts.prompt_ids.device
        rollout = _agreed(lambda: self._obtain(engine, prompts, iteration, begin), device)
        following, self._next = self._next, None
        if following is not None:
            number, later = following
            _agreed(lambda: begin(later), device)
            self._task = _Task(iteration=number, prompts=later)
        return rollout

    def _obtain(
        self, engine: BackgroundEngine, prompts: PromptBatch, iteration: int, begin: Begin
    ) -> Rollout:
        task, self._task = self._task, None
        kept, self._kept = self._kept, None
        if task is not None:
            found = task.rollout or engine.finish()
            if task.wanted and task.iteration == iteration:
                return _for(prompts, found)
        if kept is not None and (resumed := _resumed(kept, prompts, iteration)) is not None:
            return resumed
        begin(prompts)
        return _for(prompts, engine.finish())

    def discard(self) -> None:
        """Do not use what is being sampled: its weights were given up."""
        if self._task is not None:
            self._task.wanted = False
        self._kept = None

    def forget(self) -> None:
        """Begin a new run."""
        self._next = self._task = self._kept = None

    def state_dict(self, engine: Any, device: torch.device) -> dict[str, Any]:
        """Return the buffer that is ahead, of all ranks, once it is there; to be called on all.

        A resumed run takes it as it is: the weights that sampled it are gone by then.

        Args:
            engine: That samples it.
            device: Of the process group.

        Returns:
            Tensors and numbers; empty where nothing is ahead.
        """
        task = self._task
        if task is None or not task.wanted:
            return dict(self._kept or {})
        task.rollout = rollout = _agreed(lambda: task.rollout or engine.finish(), device)
        columns = {name: getattr(rollout, name).cpu() for name in _COLUMNS}
        columns["indices"] = task.prompts.indices.cpu()
        columns["prompts"] = _marks(task.prompts)
        return {
            "iteration": task.iteration,
            "policy_version": rollout.policy_version,
            "temperature": rollout.temperature,
            **_joined(gather_objects([columns])),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` returned, in a run of any number of ranks.

        A buffer of an earlier version, which did not say at what temperature it was sampled, is
        left out, and so sampled anew.
        """
        self.forget()
        self._kept = dict(state_dict) if "temperature" in state_dict else None


def _agreed(call: Callable[[], T], device: torch.device) -> T:
    """Call something on all ranks, and raise on all where it failed on one."""
    failure, found = None, []
    try:
        found.append(call())
    except RolloutError as error:
        failure = error
    if any_rank(failure is not None, device):
        raise failure or RolloutError(
            "sampling failed on another rank, which says why; all ranks end."
        )
    return found[0]


def _for(prompts: PromptBatch, rollout: Rollout) -> Rollout:
    """Put a rollout on the device of its prompts, which stay the trainer's own."""
    device = prompts.prompt_ids.device
    columns = {name: getattr(rollout, name).to(device) for name in _COLUMNS}
    return Rollout(
        prompts=prompts,
        policy_version=rollout.policy_version,
        temperature=rollout.temperature,
        **columns,
    )


def _resumed(kept: Mapping[str, Any], prompts: PromptBatch, iteration: int) -> Rollout | None:
    """Take this rank's rows of what a checkpoint kept; None where they answer other prompts."""
    rows = {int(index): row for row, index in enumerate(kept["indices"])}
    indices = prompts.indices.tolist()
    if kept["iteration"] != iteration or not rows.keys() >= {*indices}:
        return None
    own = torch.tensor([rows[index] for index in indices], dtype=torch.long)
    if not kept["prompts"][own].equal(_marks(prompts)):
        log.warning(
            "the buffer that the checkpoint kept answers other prompts than those of this run: it "
            "is sampled anew, so the run is not exactly the one that was stopped."
        )
        return None
    device = prompts.prompt_ids.device
    mask = kept["response_mask"][own]
    width = int(mask.sum(1).max()) if len(own) else 0
    columns = {name: kept[name][own].to(device) for name in _COLUMNS}
    cut = {name: c[:, :width] if c.dim() > 1 else c for name, c in columns.items()}
    return Rollout(
        prompts=prompts,
        policy_version=int(kept["policy_version"]),
        temperature=float(kept["temperature"]),
        **cut,
    )


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Put the rows of all ranks together, in the order of their numbers."""
    width = max(part["response_ids"].shape[1] for part in parts)

    def widened(values: Tensor) -> Tensor:
        missing = width - values.shape[1] if values.dim() > 1 else 0
        return nn.functional.pad(values, (0, missing)) if missing else values

    order = torch.cat([part["indices"] for part in parts]).argsort()
    return {name: torch.cat([widened(part[name]) for part in parts])[order] for name in parts[0]}


def _marks(prompts: PromptBatch) -> Tensor:
    """Tell prompts apart by their tokens, whatever their padding. ``[B]`` long."""
    ids, mask = prompts.prompt_ids.cpu(), prompts.prompt_mask.cpu()
    mark = torch.zeros(len(ids), dtype=torch.long)
    for column in range(ids.shape[1]):
        mark = torch.where(mask[:, column], mark * _MARK_FACTOR + ids[:, column] + 1, mark)
    return mark
