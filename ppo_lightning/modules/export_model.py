"""The model that a run leaves behind: a plain Hugging Face folder, the next step's input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal
from uuid import uuid4

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from ppo_lightning.checkpointing import copied
from ppo_lightning.checkpointing.entry import frozen_names
from ppo_lightning.configs.checks import require, require_at_least
from ppo_lightning.distributed import any_rank, gather_from_ranks, is_sharded, whole_on_cpu
from ppo_lightning.errors import ModelError
from ppo_lightning.io import set_aside
from ppo_lightning.models.card import (
    Ancestor,
    ModelCard,
    ancestor_of,
    make_card,
    read_card,
    was_changed,
    with_source,
    write_card,
)
from ppo_lightning.models.runs import MODEL_FOLDER
from ppo_lightning.modules.metrics_file import run_folder
from ppo_lightning.modules.stages import call_listeners


class ExportModel(pl.Callback):
    """Write the trained model as a Hugging Face folder when ``fit`` ends.

    The folder ``model`` in the run's folder holds weights (adapters merged), tokenizer with its
    chat template, and ``ppo_lightning.json``, which names what it was made from; the run's own
    folder may then be given wherever a model's path is asked for. It appears only when complete.
    A run that is stopped by a signal or an error writes nothing: resume it, or write a checkpoint's
    model with ``ppo-lightning export``. A model that an earlier run has left is kept as
    ``model.1``. Where ``ActorEMA`` answers the held-out prompts, it is the average that is written.

    Of a module it asks for ``export(folder)``, which writes what its networks hold, on one rank;
    and, if it has them, for ``kind`` (``sft``), ``export_source`` (path of the model that it
    began with; else that of ``policy`` or ``backbone``), ``export_settings()`` (a mapping for the
    card) and ``export_network`` (the part whose weights are written; else the module). Where
    ``export`` writes a card, that one is kept but for the model that the run began with.

    Args:
        folder: Null takes ``model`` in the run's folder.
        monitor: Name of a logged metric: the weights of its best epoch are written instead of the
            last ones. A copy of them is kept in main memory and in checkpoints, so that a resumed
            run knows them.
        mode: Whether the best is the smallest (``min``) or the largest (``max``).
        every_n_epochs: Write after every so many epochs too; null writes at the end alone.
    """

    def __init__(
        self,
        folder: str | None = None,
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        every_n_epochs: int | None = None,
    ) -> None:
        require(mode in ("min", "max"), f"`mode` must be `min` or `max`, got {mode!r}.")
        require_at_least("every_n_epochs", every_n_epochs, 1)
        self.folder = folder
        self.monitor = monitor
        self.mode = mode
        self.every_n_epochs = every_n_epochs
        self._best: float | None = None
        self._best_epoch = 0
        self._kept: dict[str, Tensor] = {}
        self._mine = False  # whether this run has written what is there
        self._finished = False
        self._source: Ancestor | None = None

    # ------------------------------------------------------------------ the best so far

    @override
    def state_dict(self) -> dict[str, Any]:
        best = {"best": self._best, "epoch": self._best_epoch, "weights": dict(self._kept)}
        return best | {"source": None if self._source is None else asdict(self._source)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best, self._best_epoch = state_dict["best"], int(state_dict["epoch"])
        self._kept = dict(state_dict["weights"])
        source = state_dict.get("source")  # files of before have none
        self._source = None if source is None else Ancestor(**source)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":  # of an earlier run with this object; a resumed one is loaded later
            self._best, self._best_epoch, self._kept = None, 0, {}
            self._mine = self._finished = False
            self._source = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        source = _source_of(pl_module)
        if source is None or not trainer.is_global_zero:
            return
        found, began = ancestor_of(source), self._source
        self._source = began or found
        if began is not None and began.fingerprint != found.fingerprint:
            rank_zero_warn(
                f"`{source}` holds other weights now than when this run began. The card of the "
                "run's model will go on to name the former ones."
            )
        if was_changed(source):
            rank_zero_warn(
                f"`{source}`: its weights were changed after `ppo_lightning.json` was written, "
                "so what that says of their origin may not hold."
            )

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if fitting and self._is_of_validation():
            self._keep_if_best(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.monitor is not None and not self._is_of_validation():
            self._keep_if_best(trainer, pl_module)
        done, every = trainer.current_epoch + 1, self.every_n_epochs
        if every is not None and done % every == 0 and done != trainer.max_epochs:
            self._write(trainer, pl_module)

    def _is_of_validation(self) -> bool:
        """Whether the number is new after a validation alone: later epochs still show it."""
        return self.monitor is not None and self.monitor.startswith("val")

    def _keep_if_best(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        value = trainer.callback_metrics.get(self.monitor or "")
        # After a rollback the number is that of a policy which was undone.
        known = value is not None and not getattr(module, "went_back", False)
        better = float(value) if value is not None and known and self._is_better(value) else None
        # The first rank's number: a metric may differ, and all must put the weights together.
        (better, *_) = gather_from_ranks([better])
        if better is None:
            return
        self._best, self._best_epoch = better, trainer.current_epoch
        with as_validated(module):
            self._kept = copied(whole_on_cpu(written_weights(module), keep=trainer.is_global_zero))

    def _is_better(self, value: Tensor) -> bool:
        number = float(value)
        if not math.isfinite(number):
            return False
        sign = 1.0 if self.mode == "max" else -1.0
        return self._best is None or sign * number > sign * self._best

    # ------------------------------------------------------------------ writing

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer, pl_module)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A complete run that is resumed, as it was stopped while it wrote: nothing is trained.
        if not self._finished:
            self._finish(trainer, pl_module)

    def _finish(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step == 0 and trainer.current_epoch == 0:
            return
        if self.monitor is not None and not self._kept:
            rank_zero_warn(
                f"ExportModel found no finite `{self.monitor}` in this run, so the last weights "
                "are written. Set `monitor` to a metric that the run logs."
            )
        self._write(trainer, module)
        self._finished = True

    def _write(self, trainer: pl.Trainer, module: Any) -> None:
        """Write on the first rank, and raise on all of them where it could not."""
        folder = run_folder(trainer) / MODEL_FOLDER if self.folder is None else Path(self.folder)
        trial_run: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
        if trial_run:
            return
        failure: Exception | None = None
        gathered = self._gathered(module, keep=trainer.is_global_zero)
        if trainer.is_global_zero:
            try:
                self._replace(folder, module, gathered, resumed=trainer.ckpt_path is not None)
            except Exception as error:
                failure = error
        if any_rank(failure is not None, trainer.strategy.root_device):
            raise failure or ModelError(f"`{folder}` could not be written; the first rank says why")
        which = f", of epoch {self._best_epoch}: {self.monitor} {self._best}" if self._kept else ""
        rank_zero_info(f"Model written to `{folder}`{which}.")

    def _gathered(self, module: Any, *, keep: bool) -> dict[str, Tensor] | None:
        """Put together what lies in shards, on all ranks; None where each has all weights."""
        if not is_sharded(getattr(module, "export_network", module)):
            return None
        if self._kept:
            return dict(self._kept)
        with as_validated(module):
            found: dict[str, Tensor] = whole_on_cpu(written_weights(module), keep=keep)
        return found

    def _replace(
        self, folder: Path, module: Any, gathered: Mapping[str, Tensor] | None, *, resumed: bool
    ) -> None:
        """Let a complete folder take the name; what was there is kept, or gone if this run's."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear(folder, "new")
        work = folder.with_name(f".{folder.name}.{uuid4().hex}.new")
        try:
            self._export(work, module, gathered)
            former = _aside(folder) if self._mine or resumed else set_aside(folder)
            try:
                work.rename(folder)
            except OSError:
                if former is not None:
                    former.rename(folder)
                raise
        finally:
            rmtree(work, ignore_errors=True)
        _clear(folder, "old")  # not before: it may have been the only one
        self._mine = True

    def _export(self, folder: Path, module: Any, gathered: Mapping[str, Tensor] | None) -> None:
        if gathered is not None:
            module.export(folder, weights=gathered)
        else:
            with as_validated(module), lent(module, self._kept):
                module.export(folder)
        card = read_card(str(folder))  # of a module that writes one: it knows all but the start
        write_card(
            folder, self._card(folder, module) if card is None else with_source(card, self._source)
        )

    def _card(self, folder: Path, module: Any) -> ModelCard:
        settings: Mapping[str, Any] = getattr(module, "export_settings", dict)()
        kind = getattr(module, "kind", "model")
        return make_card(folder, kind=kind, source=self._source, settings=settings)


def export_callback(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return an ``ExportModel`` for ``configure_callbacks`` of a module whose runs should have one.

    Returns:
        An empty list if the user gave one already.
    """
    given: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    there = any(isinstance(callback, ExportModel) for callback in given)
    # Not for `fit` alone: Lightning warns of a callback's state in a checkpoint, if that is gone.
    return [] if there else [ExportModel()]


@contextmanager
def as_validated(module: Any) -> Iterator[None]:
    """Let callbacks put the weights in that have answered the held-out prompts, as ``ActorEMA``.

    Args:
        module: Attached to a trainer or not.
    """
    attached = getattr(module, "_trainer", None) is not None
    try:
        if attached:
            call_listeners(module, "on_export_start")
        yield
    finally:
        if attached:
            call_listeners(module, "on_export_end")


@contextmanager
@torch.no_grad()
def lent(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Put other weights in, and the module's own back again.

    Args:
        module: Whose weights they are, by the names of ``written_weights``.
        weights: Maybe none.
    """
    places = written_weights(module) if weights else {}
    own = {name: places[name].detach().clone() for name in weights}
    try:
        for name, weight in weights.items():
            places[name].copy_(weight)
        yield
    finally:
        for name, weight in own.items():
            places[name].copy_(weight)


def written_weights(module: Any) -> dict[str, Tensor]:
    """Weights and buffers that training changes and a model's folder holds, by name.

    Frozen ones are left out.
    """
    network: nn.Module = getattr(module, "export_network", module)
    frozen = frozen_names(network)
    tensors = network.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if name not in frozen}


def _source_of(module: Any) -> str | None:
    configs = [getattr(module, name, None) for name in ("policy", "backbone")]
    paths = [getattr(module, "export_source", None), *(getattr(c, "path", None) for c in configs)]
    return next((path for path in paths if path is not None), None)


def _clear(folder: Path, ending: str) -> None:
    """Remove what stands under hidden names: also what a killed run has left there."""
    for leftover in folder.parent.glob(f".{folder.name}.*.{ending}"):
        rmtree(leftover, ignore_errors=True)


def _aside(folder: Path) -> Path | None:
    if not folder.exists():
        return None
    return folder.rename(folder.with_name(f".{folder.name}.{uuid4().hex}.old"))
