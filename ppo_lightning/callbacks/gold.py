"""Stop, and keep the best checkpoint, by the gold score of held-out answers."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from typing_extensions import override

from ppo_lightning.configs.checks import require, require_at_least
from ppo_lightning.errors import ConfigError

Answers = Literal["sampled", "greedy"]
_CHOICES = ("sampled", "greedy")


class GoldEarlyStopping(EarlyStopping):
    """End the run when the gold score has stopped rising.

    The score that is trained on goes on rising while the answers get worse (over-optimisation); the
    gold reward is not trained on, so its fall shows. It is looked at after every validation, never
    in an iteration without one. Lightning's own ``EarlyStopping`` may be used beside it.

    Args:
        patience: The run ends after so many validations in a row without a new best.
        min_delta: What counts as a new best is better than the last one by more than this, in
            the gold reward's own unit.
        answers: Whose gold score: of the ``sampled`` or of the ``greedy`` answers.
        stopping_threshold: The run ends as soon as the score is above this; None never.
    """

    def __init__(
        self,
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        answers: Answers = "sampled",
        stopping_threshold: float | None = None,
    ) -> None:
        _require_answers(answers)
        require_at_least("patience", patience, 1)
        require_at_least("min_delta", min_delta, 0)
        super().__init__(
            monitor=f"val/{answers}/gold",
            mode="max",
            min_delta=min_delta,
            patience=patience,
            stopping_threshold=stopping_threshold,
            verbose=True,
            check_on_train_epoch_end=True,  # after the validation of the iteration, if it had one
            log_rank_zero_only=True,
        )
        self.answers = answers

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            _require_gold("GoldEarlyStopping", self.answers, trainer, pl_module)
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # After a rollback the score is that of a policy which was undone.
        if _has_gold(pl_module, self.answers) and not getattr(pl_module, "went_back", False):
            super().on_train_epoch_end(trainer, pl_module)


class BestByGold(ModelCheckpoint):
    """Keep the checkpoints with the highest gold scores, and the last one.

    A file is written at the end of an iteration with a validation, if its gold score is among the
    best; what was validated is what is kept. Lightning's own ``ModelCheckpoint`` may be used beside
    it; if that keeps a ``last.ckpt`` too, set ``save_last: false`` in one of them.

    Args:
        answers: Whose gold score: of the ``sampled`` or of the ``greedy`` answers.
        save_top_k: How many of the best to keep; -1 keeps all.
        save_last: Whether to write ``last.ckpt`` at the end of every iteration, to resume from.
        dirpath: Folder; None takes the run's ``checkpoints``.
        filename: Without ending; None takes ``best-sampled-{epoch}``. An epoch is an iteration.
    """

    def __init__(
        self,
        *,
        answers: Answers = "sampled",
        save_top_k: int = 1,
        save_last: bool = True,
        dirpath: str | None = None,
        filename: str | None = None,
    ) -> None:
        _require_answers(answers)
        require(
            save_top_k == -1 or save_top_k >= 1,
            f"`save_top_k` must be -1 (all) or at least 1, got {save_top_k}.",
        )
        super().__init__(
            monitor=f"val/{answers}/gold",
            mode="max",
            save_top_k=save_top_k,
            save_last=save_last,
            dirpath=dirpath,
            filename=filename or f"best-{answers}-{{epoch}}",
            every_n_epochs=1,
            save_on_train_epoch_end=True,
        )
        self.answers = answers

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            _require_gold("BestByGold", self.answers, trainer, pl_module)
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        # The last validation's score is still there in an iteration without one: it must not be
        # taken for this iteration's.
        candidates = self._monitor_candidates(trainer)
        if _has_gold(pl_module, self.answers):
            self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)


def _require_answers(answers: str) -> None:
    require(answers in _CHOICES, f"`answers` must be one of {_CHOICES}, got {answers!r}.")


def _has_gold(module: Any, answers: Answers) -> bool:
    """Whether the iteration that ends has validated, and gold scored its answers."""
    stats = getattr(module.iteration_stats, f"val_{answers}", None)
    return stats is not None and stats.gold is not None


def _require_gold(who: str, answers: Answers, trainer: pl.Trainer, module: Any) -> None:
    """Refuse a run that will have no gold score to look at, before anything is loaded.

    Raises:
        ConfigError: Names what is missing.
    """
    validation = getattr(module, "validation", None)
    greedy, samples = getattr(validation, "greedy", False), getattr(validation, "num_samples", 0)
    wanted = "`model.init_args.validation." + (
        "greedy: true`" if answers == "greedy" else "num_samples`, at least 1"
    )
    needs = (
        (
            getattr(module, "gold", None) is not None,
            "`model.init_args.gold`, the independent reward",
        ),
        (
            trainer.enable_validation,
            "`data.init_args.val_prompts`, the held-out prompts (and `trainer.limit_val_batches` "
            "above 0)",
        ),
        (greedy if answers == "greedy" else samples > 0, wanted),
    )
    missing = [need for there, need in needs if not there]
    if missing:
        raise ConfigError(
            f"{who} goes by `val/{answers}/gold`, which this run does not measure: set "
            f"{' and '.join(missing)}."
        )
