"""What the callbacks that steer dials share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import lightning.pytorch as pl

from ppo_lightning.configs.checks import require, require_positive
from ppo_lightning.errors import ConfigError
from ppo_lightning.metrics import IterationStats
from ppo_lightning.modules.controls import Request


class Steering(pl.Callback):
    """Steer dials of ``module.controls``, as their only law.

    A subclass names its dials in ``steers``.
    """

    steers: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Name in requests and in the journal."""
        return type(self).__name__

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Claim the dials, and refuse settings that do not suit the run."""
        self._refuse_twins(trainer)
        for dial in self.steers:
            pl_module.controls.claim(dial, self.source)
        self.check(trainer, pl_module)

    def check(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what cannot work in this run, by a ``ConfigError``.

        Args:
            trainer: With its data module and callbacks.
            pl_module: The ``PPOModule``.
        """

    def law_value(self, pl_module: Any, dial: str) -> float:
        """Return what this law has made of a dial, before any doctor or guard had its word."""
        return float(pl_module.controls.wanted(self.source, dial))

    def steer(
        self, pl_module: Any, dial: str, value: float, reason: str, *, until: int | None = None
    ) -> None:
        """Ask for a value from now on.

        Args:
            pl_module: The ``PPOModule``.
            dial: Its name.
            value: Wanted value.
            reason: For the journal, with the figures.
            until: Last iteration that it holds for; None holds for good.
        """
        request = Request(
            source=self.source, dial=dial, value=float(value), reason=reason, until=until
        )
        pl_module.controls.request(request)

    def _refuse_twins(self, trainer: Any) -> None:
        """Two of one class have one name, so ``claim`` cannot tell them apart."""
        twins = [c for c in trainer.callbacks if type(c) is type(self) and c is not self]
        shared = [dial for twin in twins for dial in twin.steers if dial in self.steers]
        if shared:
            raise ConfigError(
                f"`trainer.callbacks` has {self.source} twice, and both steer `{shared[0]}`: "
                "keep one of them."
            )


class Controller(Steering, ABC):
    """Steer dials from what an iteration measured.

    The numbers are those of all ranks, so all ranks do the same.
    """

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """React to the iteration that ends, if the actor was trained in it.

        A law that saw a policy at rest would go on turning its dial without any effect.
        """
        stats = fresh_stats(pl_module)
        if stats is not None and pl_module.controls["train_actor"] > 0:
            self.react(pl_module, stats)

    @abstractmethod
    def react(self, pl_module: Any, stats: IterationStats) -> None:
        """Decide on requests for the iterations to come.

        Args:
            pl_module: The ``PPOModule``.
            stats: Of the iteration that ends.
        """


def fresh_stats(pl_module: Any) -> IterationStats | None:
    """Return the record of the iteration that ends, or None where nothing was measured in it."""
    stats: IterationStats | None = pl_module.iteration_stats
    return None if stats is None or stats.iteration != pl_module.controls.iteration else stats


def measured(*values: float | None) -> tuple[float, ...] | None:
    """Return the values, or None unless all of them are there and finite."""
    found = tuple(value for value in values if value is not None and math.isfinite(value))
    return found if len(found) == len(values) else None


def require_bounds(low_name: str, low: float, high_name: str, high: float) -> None:
    """Refuse bounds that are not positive, or the wrong way round."""
    require_positive(low_name, low)
    require_positive(high_name, high)
    require(low < high, f"`{low_name}` ({low}) must be below `{high_name}` ({high}).")


def check_kl_coef(pl_module: Any, source: str, low: float, high: float) -> None:
    """Refuse a first β that a law which multiplies it cannot move, or that is out of its bounds.

    Args:
        pl_module: The ``PPOModule``.
        source: The law.
        low: Its ``min_coef``.
        high: Its ``max_coef``.

    Raises:
        ConfigError: It is 0, or outside [low, high].
    """
    coef = pl_module.kl.coef
    if coef == 0:
        raise ConfigError(
            f"`kl.coef` is 0 and would stay 0, because {source} multiplies it: set "
            f"`model.init_args.kl.coef` above 0, or leave {source} out."
        )
    if not low <= coef <= high:
        raise ConfigError(
            f"`kl.coef` ({coef}) is outside {source}'s bounds, `min_coef` {low} and `max_coef` "
            f"{high}: change one of them."
        )
