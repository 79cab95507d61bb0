"""A trace of one whole iteration by PyTorch's profiler."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import ProfilerAction
from typing_extensions import override

from ppo_lightning.configs.checks import require_at_least


class IterationProfiler(PyTorchProfiler):
    """Trace one iteration, from its rollout to its last optimiser step, for ``trainer.profiler``.

    Lightning's own ``PyTorchProfiler`` counts calls of ``training_step``, which is an optimiser
    step here: by default it traces three steps of the first update and no rollout. The trace goes
    to the run's folder, in a format that Chrome and Perfetto read; a table of the operations that
    took longest is printed when ``fit`` ends. It begins when the last step before it is done, so a
    validation in between is in it, and one that comes after is not.

    Args:
        iteration: Which one of this call of ``fit``, from 0, which cannot be traced.
        options: Arguments of ``PyTorchProfiler`` but for ``schedule``.

    Raises:
        ValueError: ``iteration`` is below 1.
    """

    STEP_FUNCTIONS = {"training_step"}  # noqa: RUF012 - as in the base; validation counts no steps

    def __init__(self, iteration: int = 1, **options: Any) -> None:
        self.iteration = iteration
        super().__init__(schedule=self._action, **options)
        require_at_least("iteration", iteration, 1)  # last: a profiler half made cannot be deleted

    def _action(self, steps_done: int) -> ProfilerAction:
        """Say what happens between an optimiser step and the next."""
        if self._lightning_module is None:
            return ProfilerAction.NONE
        per_iteration = int(self._lightning_module.trainer.num_training_batches)
        place = steps_done - self.iteration * per_iteration
        if place == -1:
            return ProfilerAction.WARMUP
        if 0 <= place < per_iteration - 1:
            return ProfilerAction.RECORD
        return ProfilerAction.RECORD_AND_SAVE if place == per_iteration - 1 else ProfilerAction.NONE

    @override
    def _cache_functions_events(self) -> None:
        # A profiler that never came to record has no events, and PyTorch fails when asked for them.
        if getattr(self.profiler, "profiler", None) is not None:
            super()._cache_functions_events()

    @override
    def summary(self) -> str:
        return super().summary() or (
            f"Nothing was traced: there was no iteration {self.iteration} (counted from 0). Lower "
            "`trainer.profiler.init_args.iteration`, or raise `trainer.max_epochs`."
        )
