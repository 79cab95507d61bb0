"""What a checkpoint from the end of a step still owes: a validation, the end of its epoch.

Lightning writes such a file before the validation that the step is due for, and resumes it as if
that were over; of an epoch's last step, as if the epoch were. So that the resumed run does all that
the run would have done, the loops' counters are set to what makes Lightning go back to it.
"""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl

Owed = Literal["validation", "epoch_end"]


def owed_now(trainer: pl.Trainer) -> Owed | None:
    """Return what a file that is written now leaves undone; None between steps."""
    loop: Any = trainer.fit_loop.epoch_loop
    done = loop.batch_progress.total
    if not trainer.training or done.completed != done.processed - 1:
        return None  # not within the hooks of a step's end
    last = bool(loop.batch_progress.is_last_batch)
    by_time = getattr(trainer, "_val_check_time_interval", None) is not None
    # A request to stop asks for a validation, too, but is not in the file.
    repeatable = (last or not trainer.should_stop) and not by_time
    if repeatable and loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
        return "validation"
    return "epoch_end" if last else None


def go_back(checkpoint: dict[str, Any], owed: Owed | None, *, validates: bool) -> None:
    """Let Lightning do what is owed before it goes on.

    Args:
        checkpoint: As read, its loops not yet restored; changed in place.
        owed: From ``owed_now``, of when it was written.
        validates: Whether the resumed run has validations.
    """
    loops = checkpoint["loops"]["fit_loop"]
    step = loops["epoch_loop.batch_progress"]
    if owed == "validation" and not validates:
        owed = "epoch_end" if step["is_last_batch"] else None
    if owed is None:
        return
    for counts in (step["total"], step["current"]):
        counts["completed"] = counts["processed"]
    if owed == "validation":  # as of a validation that has begun
        begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
        validation = loops["epoch_loop.val_loop.batch_progress"]
        validation["total"] |= begun
        validation["current"] |= dict.fromkeys(begun, 0)
    else:
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
