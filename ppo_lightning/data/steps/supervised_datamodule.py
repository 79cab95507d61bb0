"""The data module of supervised runs: seeded order, steps of one size, this rank's share."""

from __future__ import annotations

import logging
import math
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from ppo_lightning.configs.checks import require, require_at_least
from ppo_lightning.data.prompts.limits import Overlong
from ppo_lightning.data.prompts.prompt_set import shuffled_order
from ppo_lightning.data.records.base import RecordSource
from ppo_lightning.data.records.formats import as_records
from ppo_lightning.data.steps.base_datamodule import ValidationSwitch
from ppo_lightning.data.steps.share import Share
from ppo_lightning.data.steps.step_loader import StepLoader
from ppo_lightning.distributed import num_replicas, replica
from ppo_lightning.errors import ConfigError

log = logging.getLogger(__name__)

Records = RecordSource | str | Path | Sequence[Mapping[str, Any] | str]


class SupervisedDataModule(ValidationSwitch):
    """Examples in steps: step s of epoch e is a stretch of that epoch's seeded order.

    The order is a pure function of (seed, epoch), and ranks take every n-th example of a step, so
    the examples of a step are the same whatever the number of ranks, and a resumed run needs the
    step's number only. The last step of an epoch may be smaller. A subclass makes examples of
    records.

    Args:
        records: Of the training examples: a file, a list, or a source.
        val_records: Of the held-out ones; None for none, or for those of ``val_share``.
        val_share: Without ``val_records``: share of the prompts of ``records`` that is held out, by
            a hash of the prompt.
        batch_size: Examples of one optimiser step, over all ranks.
        val_batch_size: Held-out examples measured at once on a rank.
        fields: Our name -> their column; null hides a column.
        overlong: What happens to an example that is too long.
        on_error: What happens to a record that cannot be used.
        seed: Of the order; None takes ``seed_everything``'s, or 0.
    """

    setting: ClassVar[str] = "records"
    """Name of the setting with the training examples; ``val_`` stands before the held-out ones'."""

    def __init__(
        self,
        records: Records,
        val_records: Records | None,
        *,
        val_share: float,
        batch_size: int,
        val_batch_size: int,
        fields: Mapping[str, str | None] | None,
        overlong: Overlong,
        on_error: Literal["error", "skip"],
        seed: int | None,
    ) -> None:
        super().__init__()
        require_at_least("batch_size", batch_size, 1)
        require_at_least("val_batch_size", val_batch_size, 1)
        self._check_share(val_share, beside=val_records is not None)
        require(
            overlong in ("error", "drop", "truncate"),
            f"`overlong` must be one of error, drop, truncate, got {overlong!r}.",
        )
        reading: Any = {"fields": fields, "on_error": on_error}
        self.source = as_records(records, name=self.setting, **reading)
        self.val_source = (
            None
            if val_records is None
            else as_records(val_records, name=f"val_{self.setting}", **reading)
        )
        self.val_share = val_share
        self.overlong: Overlong = overlong
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.train_examples: Sequence[Any] = ()
        self.val_examples: Sequence[Any] = ()
        self._order: dict[tuple[int, int], list[int]] = {}

    def _check_share(self, val_share: float, *, beside: bool) -> None:
        require(0 <= val_share < 1, f"`val_share` must lie in [0, 1), got {val_share}.")
        require(
            not (val_share and beside),
            f"`val_share` takes held-out {self.setting} from `{self.setting}`; with "
            f"`val_{self.setting}` leave it out.",
        )

    @abstractmethod
    def read(self, source: RecordSource, share: Share, *, held_out: bool) -> Sequence[Any]:
        """Make examples of records.

        Args:
            source: The records.
            share: Which of them.
            held_out: Whether they are measured, and not learned from.
        """

    @abstractmethod
    def make_batch(self, examples: Sequence[Any], *, epoch: int, step: int, num_steps: int) -> Any:
        """Make a batch of some examples, maybe none, with its place in the run.

        It has a length, the attributes ``epoch``, ``step`` and ``num_steps``, and ``.to(device)``.
        """

    def setup(self, stage: str) -> None:
        """Read the examples: a bad file ends the run before weights are loaded."""
        if stage == "fit":
            share = Share(self.val_share, "train") if self.val_share else Share()
            self.train_examples, self._order = self.read(self.source, share, held_out=False), {}
        self.val_examples = self._read_held_out()
        if self.val_examples:
            return
        if stage != "fit":
            named = getattr(stage, "value", stage)  # of an enum, whose text differs with Python's
            raise ConfigError(f"`{named}` needs held-out examples: {self.held_out_setting}.")
        self.switch_validation_off()  # an empty loader would be warned about

    def _read_held_out(self) -> Sequence[Any]:
        if self.val_source is not None:
            return self.read(self.val_source, Share(), held_out=True)
        if self.val_share:
            return self.read(self.source, Share(self.val_share, "held out"), held_out=True)
        return ()

    @property
    def held_out_setting(self) -> str:
        """How the user gives held-out examples, as the end of a sentence."""
        return f"set `data.init_args.val_{self.setting}` or `val_share`"

    @property
    def has_held_out(self) -> bool:
        """Whether the run has held-out examples; known before they are read."""
        return self.val_source is not None or self.val_share > 0

    @property
    def num_steps(self) -> int:
        """Optimiser steps of an epoch."""
        return math.ceil(len(self.train_examples) / self.batch_size)

    def train_dataloader(self) -> StepLoader[Any]:
        """Batches of an epoch, from wherever the run stands."""
        return StepLoader(self._step, num_steps=self.num_steps, place=self._place)

    def _place(self) -> tuple[int, int]:
        loop: Any = self.trainer.fit_loop  # type: ignore[union-attr]
        return int(self.trainer.current_epoch), int(loop.epoch_loop.batch_progress.current.ready)  # type: ignore[union-attr]

    def step_numbers(self, epoch: int, step: int) -> list[int]:
        """Return the examples of a step, over all ranks, by their number."""
        if (self.seed, epoch) not in self._order:  # of one epoch only: it is sorting work
            total = len(self.train_examples)
            order = shuffled_order(total, epoch * total, total, seed=self.seed)
            self._order = {(self.seed, epoch): order}
        start = step * self.batch_size
        return self._order[self.seed, epoch][start : start + self.batch_size]

    def _step(self, epoch: int, step: int) -> Any:
        own = self.step_numbers(epoch, step)[replica() :: num_replicas()]
        examples = [self.train_examples[number] for number in own]
        return self.make_batch(examples, epoch=epoch, step=step, num_steps=self.num_steps)

    def val_dataloader(self) -> StepLoader[Any] | list[Any]:
        """Held-out examples of this rank, each once, in the order of the file."""
        if not self.val_examples:
            return []
        own = list(range(replica(), len(self.val_examples), num_replicas()))
        size = self.val_batch_size
        starts = range(0, len(own), size) if own else [0]  # Lightning refuses an empty loader
        pieces = [own[start : start + size] for start in starts]

        def make(epoch: int, step: int) -> Any:
            examples = [self.val_examples[number] for number in pieces[step]]
            return self.make_batch(examples, epoch=epoch, step=step, num_steps=len(pieces))

        # Not a list: Lightning would take each of its batches for a loader.
        return StepLoader(make, num_steps=len(pieces), place=lambda: (0, 0))

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        """Return what the order of the examples comes from."""
        return {"seed": self.seed, **self._sizes()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the checkpoint's order; warn where its steps were of other examples."""
        self.seed = int(state_dict["seed"])
        if not self.train_examples:  # nothing is trained
            return
        now = self._sizes()
        for name, what in (("batch_size", "`batch_size`"), ("num_examples", "training examples")):
            if (before := state_dict.get(name, now[name])) != now[name]:
                log.warning(
                    "%s: %d, and %d when the checkpoint was written. Of the epoch that was begun "
                    "as many steps are left out as were done; some of its examples may come again "
                    "or not at all.",
                    what,
                    now[name],
                    before,
                )

    def _sizes(self) -> dict[str, int]:
        return {"batch_size": self.batch_size, "num_examples": len(self.train_examples)}
