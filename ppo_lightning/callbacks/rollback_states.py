"""Which state a rollback goes back to: what is suspected, and what a gold score found well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.checkpointing import Snapshot, SnapshotStore
from ppo_lightning.diagnostics import is_of_update_alone
from ppo_lightning.distributed import any_rank
from ppo_lightning.modules.training_state import all_finite, capture, restore
from ppo_lightning.types import Verdict


class HealthyStates:
    """Snapshots of a run, and what is known of them.

    ``store`` is set when the run starts.
    """

    store: SnapshotStore

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin as if nothing were known; the store stays."""
        self.on_trial: int | None = None  # the next iteration has not yet shown how it behaves
        self.just_restored: int | None = None
        self.proven: int | None = None  # not after a fall of the gold score

    def keep(self, module: Any, iteration: int) -> bool:
        """Take a snapshot, if every number in it is finite; returns whether there is one."""
        state = capture(module)
        if any_rank(not all_finite(state), module.device):
            return False
        return self.store.put(iteration, state, pinned=self.proven)

    def found_well(self) -> None:
        """Note that the newest state is not after a fall of the gold score: it stays."""
        self.proven = max(self.store.iterations, default=None)

    def go_back(self, module: Any, verdicts: Sequence[Verdict]) -> Snapshot:
        """Restore the newest state that is not suspected.

        Raises:
            CheckpointError: No snapshot can be read.
        """
        if any(verdict.illness == "over_optimisation" for verdict in verdicts):
            self._drop_unproven()
        suspects = {self.just_restored}
        if not is_of_update_alone(verdicts, module.iteration_stats):
            suspects.add(self.on_trial)
        while len(kept := self.store.iterations) > 1 and kept[-1] in suspects:
            self.store.drop_after(kept[-2])
        snapshot = self.store.latest()
        self.store.drop_after(snapshot.iteration)
        restore(module, snapshot.state)
        self.on_trial, self.just_restored = None, snapshot.iteration
        if self.proven is not None and self.proven > snapshot.iteration:
            self.proven = None
        return snapshot

    def _drop_unproven(self) -> None:
        """Forget the states since the last one that a gold score found well."""
        proven = self.proven
        if proven is not None and any(i <= proven for i in self.store.iterations):
            self.store.drop_after(proven)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "on_trial": self.on_trial,
            "just_restored": self.just_restored,
            "proven": self.proven,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self.on_trial, self.just_restored = state["on_trial"], state["just_restored"]
        self.proven = state["proven"]


def write_last(trainer: pl.Trainer) -> None:
    """Bring ``last.ckpt`` up to the state that was restored.

    Lightning writes nothing where no step was taken since the last file, or where none is due, and
    that file may hold the state that was gone back from.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            if callback.save_last:
                candidates = callback._monitor_candidates(trainer)
                name = callback.format_checkpoint_name(candidates, callback.CHECKPOINT_NAME_LAST)
                callback._save_checkpoint(trainer, callback.last_model_path or name)
            callback._last_global_step_saved = -1  # its own files, too, where they are due
