"""Validation, test and predict: the hooks that answer held-out prompts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from ppo_lightning.configs import ValidationConfig
from ppo_lightning.metrics import AnswerStats, IterationStats
from ppo_lightning.modules.held_out import Answer, HeldOut, answers_log, summarise
from ppo_lightning.modules.stages import StageClock, call_listeners
from ppo_lightning.types import PromptBatch


class HeldOutSteps(pl.LightningModule):
    """Answers held-out prompts with the policy and, once, with the reference.

    Args:
        validation: How prompts are answered.
    """

    def __init__(self, validation: ValidationConfig) -> None:
        super().__init__()
        self.validation = validation
        self.clock = StageClock()
        self.iteration_stats: IterationStats | None = None
        self.answers: list[Answer] = []
        self._together = ExitStack()
        self._reference_answers: dict[tuple[bytes, bytes], list[Answer]] = {}

    @property
    @abstractmethod
    def iteration(self) -> int:
        """Number of the current iteration."""

    @abstractmethod
    def held_out(self) -> HeldOut:
        """What answers and scores, with the current weights."""

    @abstractmethod
    def frozen_to_device(self) -> None:
        """Bring what is no submodule to the module's device."""

    def gathered(self) -> AbstractContextManager[None]:
        """Put together what answers, where it lies in shards: ranks answer different numbers."""
        return nullcontext()

    @contextmanager
    def _apart_after_errors(self) -> Iterator[None]:
        """Give weights back to their shards before callbacks hear of an error."""
        try:
            yield
        except BaseException:
            self._together.close()
            raise

    def _answers(self, batch: PromptBatch) -> list[Answer]:
        """The policy's answers, and the reference's, which are made once."""
        if len(batch) == 0:
            return []
        held_out = self.held_out()
        asked = (_bytes_of(batch.prompt_ids), _bytes_of(batch.keys))
        if asked not in self._reference_answers:
            self._reference_answers[asked] = held_out.answers(
                batch, writer="reference", config=self.validation
            )
        own = held_out.answers(batch, writer="policy", config=self.validation)
        return own + self._reference_answers[asked]

    def forget_reference_answers(self) -> None:
        """To be called when the reference has changed: its answers are asked for again."""
        self._reference_answers.clear()

    def _log_answers(self, prefix: str, found: Mapping[str, AnswerStats]) -> None:
        logged = answers_log(prefix, found) | {"step": float(self.iteration)}
        # Reduced already: the mean over ranks is each rank's own value, and Lightning is content.
        self.log_dict(logged, batch_size=1, on_step=False, on_epoch=True, sync_dist=True)
        call_listeners(self, "on_answers", self.answers)

    @override
    def on_validation_epoch_start(self) -> None:
        self.frozen_to_device()
        self.answers = []
        self._together.enter_context(self.gathered())

    @override
    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        with self.clock.stage(self, "validation"), self._apart_after_errors():
            self.answers += self._answers(batch)

    @override
    def on_validation_epoch_end(self) -> None:
        self._together.close()
        found = summarise(self.answers, self.device)
        if self.iteration_stats is not None and self.trainer.state.fn == "fit":
            self.iteration_stats = replace(self.iteration_stats, **found)
        self._log_answers("val", found)

    @override
    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    @override
    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    @override
    def on_test_epoch_end(self) -> None:
        self._together.close()
        self._log_answers("test", summarise(self.answers, self.device))

    @override
    def on_predict_start(self) -> None:
        self.frozen_to_device()
        self._together.enter_context(self.gathered())

    @override
    def on_predict_epoch_end(self) -> None:
        self._together.close()

    @override
    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[Answer]:
        if len(batch) == 0:
            return []
        with self._apart_after_errors():
            return self.held_out().answers(batch, writer="policy", config=self.validation)


def _bytes_of(ids: Tensor) -> bytes:
    return ids.cpu().numpy().tobytes()
