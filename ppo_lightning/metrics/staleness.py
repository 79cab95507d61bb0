"""Metrics of how old the responses of a buffer are, and of what was done about it."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_lightning.metrics.schema import metric


@dataclass(frozen=True, kw_only=True)
class StalenessStats:
    """Lag of the buffer behind the weights that are trained: ``rollout/…``."""

    lag_mean: float | None = metric(
        "rollout/lag_mean",
        "updates",
        "mean over responses",
        "updates between the weights that sampled a response and the current ones",
        note="0 unless the engine samples ahead",
    )
    lag_max: float | None = metric(
        "rollout/lag_max", "updates", "largest", "the same, of the oldest response in the buffer"
    )
    lag_allowed: float | None = metric(
        "rollout/lag_allowed",
        "updates",
        "state",
        "lag that the run is set up for: the larger of `staleness.max_lag` and how far the engine "
        "samples ahead",
    )
    stale_dropped: float | None = metric(
        "rollout/stale_dropped",
        "responses",
        "total",
        "left out for their age, by `staleness.on_stale: drop`; they count as dropped as well",
    )
    stale_resampled: float | None = metric(
        "rollout/stale_resampled",
        "responses",
        "total",
        "sampled again for their age, by `staleness.on_stale: resample`",
    )
    importance_mean: float | None = metric(
        "rollout/importance_mean",
        "1",
        "mean over tokens",
        "importance weight of the tokens that are corrected, after the cap",
        note="about 1; far below, the sampler is another policy",
    )
    importance_max: float | None = metric(
        "rollout/importance_max", "1", "largest", "the same, the largest; at most the cap"
    )
    importance_capped_share: float | None = metric(
        "rollout/importance_capped_share",
        "share",
        "mean over tokens",
        "corrected tokens whose weight was cut by `staleness.importance_cap`",
        healthy=(0.0, 0.05),
        note="above it the correction is mostly the cap: lower the lag or the learning rate",
    )
