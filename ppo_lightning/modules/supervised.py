"""What SFT and reward models share: optimiser steps over examples, under manual optimisation."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from ppo_lightning.checkpointing.entry import pack_checkpoint, unpack_checkpoint
from ppo_lightning.configs import GroupConfig, OptimizerConfig
from ppo_lightning.configs.checks import require, require_at_least
from ppo_lightning.distributed import all_reduce_sum, max_over_ranks, num_replicas, pulse, replica
from ppo_lightning.errors import ConfigError, UpdateError
from ppo_lightning.functional import combine_keys
from ppo_lightning.metrics import StepStats
from ppo_lightning.modules.export_model import export_callback
from ppo_lightning.modules.guards import SkipCounter
from ppo_lightning.modules.host_memory import keep_freed_memory
from ppo_lightning.modules.metrics_file import MetricsFile
from ppo_lightning.modules.monitors import check_monitors
from ppo_lightning.modules.optim import (
    advance,
    clip_gradients,
    gradient_norm,
    optimizer_over,
    refuse_coarse,
    scheduler_over,
)
from ppo_lightning.modules.owed import go_back, owed_now
from ppo_lightning.modules.run_safety import run_callbacks
from ppo_lightning.modules.shared_gradients import SharedGradients
from ppo_lightning.modules.stages import StageClock, call_listeners
from ppo_lightning.modules.supervised_log import HeldOutLog, StepLog
from ppo_lightning.modules.trainer_checks import check_data, check_supervised_trainer, spare_copies

Dropout = Literal["off", "keep"]

_MAX_SEED = 2**63 - 1


class SupervisedModule(pl.LightningModule):
    """Take one optimiser step a batch, over this rank's share of the step's examples.

    A step is cut into parts (``parts``), one backward each. Losses are sums, divided by the count
    of the whole step over all ranks, so neither the cut nor the number of ranks changes the
    gradient. A subclass says what a part's loss is; see the abstract methods. A batch has a length
    (its examples on this rank) and the attributes ``epoch``, ``step`` and ``num_steps`` (see
    ``SupervisedDataModule``).

    Args:
        groups: Learning rate of each group of weights, by the name of the argument that holds it.
        optimizer: The optimiser.
        microbatch_tokens: Most tokens of one part, padding included; None is one part a step.
        max_skipped_steps: The run ends after this many steps in a row whose loss or gradient was
            not finite.
        dropout: ``off``, or ``keep`` for what the model's folder says.

    Attributes:
        network: What is trained; there is one once ``configure_model`` has run.
        steps_done: Planned optimiser steps behind the weights, taken or skipped.
    """

    kind: ClassVar[str]
    """Of the run, kept in checkpoints: ``sft`` or ``reward``."""
    stats_class: ClassVar[type[StepStats]] = StepStats
    """The record of a row of ``metrics.jsonl``."""
    sums: ClassVar[tuple[str, ...]] = ()
    """Names of what ``loss_sum`` adds up beside the loss."""
    whole_at_steps: ClassVar[bool] = True
    """That a checkpoint may be written at the end of any step; asked for by callbacks."""
    weights_setting: ClassVar[str] = "`policy.dtype`"
    """Setting that rules the dtype of the trained weights."""

    def __init__(
        self,
        *,
        groups: Mapping[str, GroupConfig],
        optimizer: OptimizerConfig,
        microbatch_tokens: int | None,
        max_skipped_steps: int = 5,
        dropout: Dropout = "off",
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        require_at_least("microbatch_tokens", microbatch_tokens, 1)
        require_at_least("max_skipped_steps", max_skipped_steps, 1)
        require(dropout in ("off", "keep"), f"`dropout` must be off or keep, got {dropout!r}.")
        require(
            optimizer.lr_scaling == "none",
            "`optimizer.lr_scaling` is for PPO's buffers, whose size changes: set the rate itself.",
        )
        self.groups = dict(groups)
        self.optimizer_config = optimizer
        self.microbatch_tokens = microbatch_tokens
        self.max_skipped_steps = max_skipped_steps
        self.dropout = dropout
        self.network: nn.Module | None = None
        self.clock = StageClock()
        self.checkpoint_complete = True
        self._paused = 0.0
        self.start_anew()

    def start_anew(self) -> None:
        """Forget what an earlier run has counted, but for the weights."""
        self.steps_done = 0
        self.skips = SkipCounter(self.max_skipped_steps)
        self.step_log = StepLog(self.sums)
        self.held_out_log = HeldOutLog(self.sums)

    # ------------------------------------------------------------------ what a subclass says

    @abstractmethod
    def build_network(self) -> nn.Module:
        """Load what is trained, frozen parts included."""

    @abstractmethod
    def parts(self, batch: Any) -> list[Any]:
        """Cut this rank's examples into microbatches; none where it has no example."""

    @abstractmethod
    def idle_part(self, batch: Any) -> Any:
        """Return a part that is read and counts nowhere, for a rank short of parts."""

    @abstractmethod
    def count(self, batch: Any) -> Tensor:
        """Return what the loss is divided by, of this rank: tokens or pairs. 0-d."""

    @abstractmethod
    def loss_sum(self, part: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of a part, as a sum with gradient, and the sums named in ``sums``."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write a plain Hugging Face folder; to be called on the first rank."""

    def trained(self) -> Mapping[str, Sequence[nn.Parameter]]:
        """Return the trained weights of each group."""
        assert self.network is not None
        (name,) = self.groups
        return {name: [p for p in self.network.parameters() if p.requires_grad]}

    def train_values(self, totals: Mapping[str, float]) -> dict[str, float | None]:
        """Make fields of the record from the totals of some steps, all ranks.

        Args:
            totals: ``loss``, ``count``, ``examples``, ``seconds`` and the sums.
        """
        return {}

    def val_values(self, totals: Mapping[str, float]) -> dict[str, float | None]:
        """Make fields of the record from the totals of a validation, all ranks."""
        return {}

    def models(self) -> dict[str, Any]:
        """Say, as plain containers, where the run's models came from; kept in checkpoints."""
        return {}

    # ------------------------------------------------------------------ the run

    @property
    def iteration(self) -> int:
        """The epoch, for callbacks that count iterations."""
        return int(self.trainer.current_epoch)

    @property
    def place(self) -> str:
        """Where the run is, in words."""
        return f"epoch {self.trainer.current_epoch}, after {self.steps_done} steps"

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        own: list[pl.Callback] = run_callbacks(self.trainer, whole_at_steps=True)
        check_supervised_trainer(self.trainer, type(self).__name__, next(iter(self.groups)))
        check_data(self.trainer, type(self).__name__, self.kind)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        added = (MetricsFile, SharedGradients)
        own += [c() for c in added if not any(isinstance(given, c) for given in callbacks)]
        if self.trainer.state.fn == "fit":
            check_monitors(self)
        return [*own, *export_callback(self.trainer)]

    @override
    def configure_model(self) -> None:
        if self.network is None:
            self.network = self.build_network().train()

    @override
    def configure_optimizers(self) -> Any:
        trained = self.trained()
        for name, weights in trained.items():
            refuse_coarse(name, self.weights_setting, weights)
        rates = {name: (trained[name], group.lr) for name, group in self.groups.items()}
        optimizer = optimizer_over(rates, self.optimizer_config)
        scheduler = scheduler_over(optimizer, self.groups, total_steps=self._planned_steps())
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def _planned_steps(self) -> int | None:
        """Optimiser steps of the whole run; None for an endless one, or where nobody asks."""
        if all(group.schedule == "constant" for group in self.groups.values()):
            return None  # asking for the number makes Lightning build the loader early
        steps = self.trainer.estimated_stepping_batches
        return None if steps == math.inf else int(steps)

    @override
    def setup(self, stage: str) -> None:
        """Begin a fit as a new run; a checkpoint that is resumed is loaded later."""
        if stage == "fit":
            keep_freed_memory()
            spare_copies(self.trainer)
            self.start_anew()

    # ------------------------------------------------------------------ one step

    @override
    def on_train_epoch_start(self) -> None:
        self.step_log.begin()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.checkpoint_complete = False

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        with self.clock.stage(self, "update"):
            totals = self._gradients(batch)
            norms = {group["name"]: gradient_norm(group["params"]) for group in _groups(optimizer)}
            taken = _finite([totals["loss"], *norms.values()])
            if taken:
                self._clip(optimizer, norms)
            else:
                optimizer.zero_grad()  # without gradients nothing moves, and Lightning counts on
            optimizer.step()
            optimizer.zero_grad()
        self.step_log.add(totals, norms, taken=taken, groups=_groups(optimizer))
        advance(scheduler)
        self.steps_done += 1
        if self.skips.count(not taken):
            raise self._endless_skips()
        self.checkpoint_complete = True
        self._log_steps(batch)

    def _gradients(self, batch: Any) -> dict[str, float]:
        """Forward and backward over the step; returns its totals over all ranks."""
        own = self.count(batch).double().to(self.device)
        count = float(all_reduce_sum(own))
        sums = torch.zeros(1 + len(self.sums), dtype=torch.float64, device=self.device)
        for number, part in enumerate(self._parts_of_all_ranks(batch)):
            pulse.beat()
            with self._noise(number):
                loss, found = self.loss_sum(part)
            # DDP averages over ranks what is to be added up.
            self.manual_backward(loss * (num_replicas() / max(count, 1.0)))
            values = [loss.detach(), *(found[name].detach() for name in self.sums)]
            sums += torch.stack([value.double() for value in values])
        examples = sums.new_tensor([len(batch)])
        loss_total, *others, seen = all_reduce_sum(torch.cat([sums, examples])).tolist()
        named = dict(zip(self.sums, others, strict=True))
        return {"loss": loss_total, "count": count, "examples": seen, **named}

    def _parts_of_all_ranks(self, batch: Any) -> list[Any]:
        """Equally many parts on every rank: each backward brings their gradients together."""
        parts = self.parts(batch)
        wanted = max_over_ranks(len(parts), self.device)
        return parts + [self.idle_part(batch)] * (wanted - len(parts))

    @contextmanager
    def _noise(self, part: int) -> Iterator[None]:
        """Let dropout depend on seed, step, rank and part alone, so that a resumed run repeats."""
        if self.dropout == "off":
            yield
            return
        seed = int(getattr(getattr(self.trainer, "datamodule", None), "seed", 0))
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(combine_keys(seed, self.steps_done, replica(), part) & _MAX_SEED)
            yield

    def _clip(self, optimizer: Any, norms: Mapping[str, Tensor]) -> None:
        for group in _groups(optimizer):
            bound = self.groups[group["name"]].max_grad_norm
            clip_gradients(group["params"], max_norm=bound, norm=norms[group["name"]])

    def _endless_skips(self) -> UpdateError:
        rates = " and ".join(f"`{name}.lr`" for name in self.groups)
        return UpdateError(
            f"{self.skips.evidence} Lower {rates}, or raise `optimizer.eps` to 1e-4, and resume "
            "from the last checkpoint. `max_skipped_steps` sets how many are tolerated."
        )

    # ------------------------------------------------------------------ what was measured

    def _log_steps(self, batch: Any) -> None:
        """Write a row every ``log_every_n_steps`` steps, and at the end of the epoch."""
        every = max(1, int(getattr(self.trainer, "log_every_n_steps", 1) or 1))
        if self.steps_done % every and not self.trainer.is_last_batch:
            return
        totals = self.step_log.take(self.device)
        own = self.train_values(totals.sums) if totals.sums["count"] else {}
        stats = self.stats_class(
            step=self.steps_done,
            epoch=batch.epoch + (batch.step + 1) / batch.num_steps,
            steps_skipped_nonfinite=totals.skipped,
            **(totals.values | own),
        )
        self._publish(stats)

    def _publish(self, stats: StepStats) -> None:
        """Hand a row to loggers, to callbacks that monitor a number, and to those that listen.

        Not by ``self.log``: the numbers are reduced already, and a logged ``step`` would stay in
        the names of checkpoints until it is logged again.
        """
        logged = stats.to_log()
        for logger in self.trainer.loggers:
            logger.log_metrics(dict(logged), step=self.steps_done)
        monitored = self.trainer.callback_metrics
        monitored.update({name: torch.tensor(value) for name, value in logged.items()})
        call_listeners(self, "on_step_stats", stats)

    @override
    def on_validation_start(self) -> None:
        self._paused = time.perf_counter()

    @override
    def on_validation_end(self) -> None:
        self.step_log.leave_out(time.perf_counter() - self._paused)

    @override
    def on_validation_epoch_start(self) -> None:
        self.held_out_log.begin(self.device)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with self.clock.stage(self, "validation"):
            self.held_out_log.add(count=self.count(batch), examples=float(len(batch)))
            for part in self.parts(batch):
                pulse.beat()
                loss, found = self.loss_sum(part)
                self.held_out_log.add(loss=loss, **{name: found[name] for name in self.sums})

    @override
    def on_validation_epoch_end(self) -> None:
        stats = self._held_out_stats()
        if self.trainer.state.fn != "fit":
            self._log_held_out("val", stats)
        elif not self.trainer.sanity_checking:
            self._publish(stats)

    def _held_out_stats(self) -> StepStats:
        totals = self.held_out_log.totals()
        if not totals["count"]:
            raise ConfigError("the held-out examples have nothing that the loss counts.")
        return self.stats_class(
            step=self.steps_done,
            val_loss=totals["loss"] / totals["count"],
            val_examples=totals["examples"],
            val_seconds=self.held_out_log.seconds(self.device),
            **self.val_values(totals),
        )

    def _log_held_out(self, prefix: str, stats: StepStats) -> None:
        logged = {
            f"{prefix}/{name.removeprefix('val/')}": value
            for name, value in stats.to_log().items()
            if name.startswith("val/")
        }
        logged["step"] = float(self.steps_done)
        # Reduced already: the mean over ranks is each rank's own value, and Lightning is content.
        self.log_dict(logged, batch_size=1, on_step=False, on_epoch=True, sync_dist=True)

    @override
    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    @override
    def on_test_epoch_end(self) -> None:
        self._log_held_out("test", self._held_out_stats())

    # ------------------------------------------------------------------ checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        extra = {
            "steps_done": self.steps_done,
            "skipped_in_a_row": self.skips.in_a_row,
            "step_log": self.step_log.state_dict(),
            "models": self.models(),
            "owed": owed_now(self.trainer),
        }
        complete = self.checkpoint_complete
        pack_checkpoint(checkpoint, self, complete=complete, extra=extra, beside={}, kind=self.kind)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        entry = unpack_checkpoint(checkpoint, self, kind=self.kind)
        self.steps_done = int(entry["steps_done"])
        self.skips.in_a_row = int(entry["skipped_in_a_row"])
        self.step_log.load_state_dict(entry["step_log"])
        if self.trainer.state.fn == "fit":
            go_back(checkpoint, entry.get("owed"), validates=self.trainer.enable_validation)


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def _finite(values: Sequence[float | Tensor]) -> bool:
    """Whether all are finite; of numbers that are the same on all ranks."""
    return all(math.isfinite(float(value)) for value in values)
