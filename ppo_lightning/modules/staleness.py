"""The age of a buffer: what is counted, what is refused at the start, and how its engine ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from ppo_lightning.configs import StalenessConfig
from ppo_lightning.errors import ConfigError
from ppo_lightning.metrics import IterationStats, quotient
from ppo_lightning.modules.collection import Collected
from ppo_lightning.rollout import BackgroundEngine, RolloutEngine

SUMS_OF_AGE = (
    "lag",
    "stale_dropped",
    "stale_resampled",
    "importance",
    "importance_capped",
    "importance_tokens",
)
"""Names of the totals of ``staleness_totals``."""
MAXIMA = ("lag_max", "importance_max")


def staleness_totals(collected: Collected) -> dict[str, Tensor | float]:
    """Sums and extremes over this rank's responses that are in the buffer, and their tokens."""
    found, kept = collected.freshness, collected.kept
    totals: dict[str, Tensor | float] = {
        "lag": found.lags[kept].sum(),
        "stale_dropped": found.dropped.sum(),
        "stale_resampled": found.resampled.sum(),
    }
    if bool(kept.any()):
        totals["lag_max"] = found.lags[kept].max()
    rows = kept & found.corrected
    if found.weights is None or found.capped is None or not bool(rows.any()):
        return totals
    mask = collected.rollout.response_mask & rows[:, None]
    weights = found.weights[mask]
    return totals | {
        "importance": weights.double().sum(),
        "importance_capped": found.capped[mask].sum(),
        "importance_tokens": mask.sum(),
        "importance_max": weights.max(),
    }


def staleness_fields(totals: Mapping[str, float]) -> dict[str, Any]:
    """Fields of ``StalenessStats``, over all ranks."""
    return {
        "lag_mean": quotient(totals, "lag", "responses"),
        "lag_max": totals.get("lag_max"),
        "stale_dropped": totals["stale_dropped"],
        "stale_resampled": totals["stale_resampled"],
        "importance_mean": quotient(totals, "importance", "importance_tokens"),
        "importance_max": totals.get("importance_max"),
        "importance_capped_share": quotient(totals, "importance_capped", "importance_tokens"),
    }


def compares_sampler(stats: IterationStats) -> bool:
    """Whether sampler and trainer should be one distribution.

    Not where the sampler's weights are older, and not where a difference is corrected.
    """
    return not stats.lag_max and stats.importance_mean is None


def allowed_lag(engine: RolloutEngine, config: StalenessConfig) -> float:
    """Return the lag that a run is set up for, in updates: more than it is a sign of trouble."""
    return float(max(config.max_lag, _ahead(engine)))


def _ahead(engine: RolloutEngine) -> int:
    return engine.ahead if isinstance(engine, BackgroundEngine) else 0


def check_staleness(engine: RolloutEngine, config: StalenessConfig) -> None:
    """Refuse an engine that samples ahead beside rules that leave nothing of what it samples.

    Raises:
        ConfigError: Names both settings.
    """
    ahead = _ahead(engine)
    name = type(engine).__name__
    if config.strict and ahead:
        raise ConfigError(
            f"`model.init_args.staleness.strict` takes responses of the current weights only, and "
            f"`{name}` samples {ahead} update ahead: set its `ahead: 0`, or leave `strict` out."
        )
    if ahead > config.max_lag and config.on_stale in ("drop", "resample"):
        raise ConfigError(
            f"`model.init_args.staleness.on_stale: {config.on_stale}` would be done with every "
            f"response, since `{name}` samples {ahead} update ahead: set `staleness.max_lag` to "
            f"{ahead} or more, or take `on_stale: correct`."
        )
    if config.on_stale == "use":
        rank_zero_warn(
            "`staleness.on_stale: use` trains on responses of older weights as if they were of the "
            "current ones, which is biased; `correct` weighs them."
        )


class EndEngine(pl.Callback):
    """Has the engine end what it started when a run fails or is stopped; ``PPOModule`` adds it."""

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        pl_module.engine.close()
