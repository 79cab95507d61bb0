"""Policy versions: how old a response is, and what its age means for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ppo_lightning.configs import StalenessConfig
from ppo_lightning.errors import RolloutError
from ppo_lightning.functional import truncated_importance_weights
from ppo_lightning.types import PromptBatch, Rollout

_KEPT = 256
"""Versions that are remembered; older ones count as so far behind."""


class PolicyVersions:
    """The versions that a run's weights have had, one an update that took a step.

    A version is the number of optimiser steps behind the weights.
    """

    def __init__(self) -> None:
        self._known: list[int] = []

    def note(self, version: int) -> None:
        """Remember the version of the current weights."""
        if not self._known or version > self._known[-1]:
            self._known = [*self._known, version][-_KEPT:]

    def lags(self, versions: Tensor) -> Tensor:
        """Count the updates between some versions and the current one.

        Args:
            versions: ``[B]`` long.

        Returns:
            ``[B]`` long, 0 for the current version.
        """
        known = torch.tensor(self._known, dtype=torch.long, device=versions.device)
        return len(known) - torch.searchsorted(known, versions, right=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"known": list(self._known)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a checkpoint kept; one of an earlier version kept nothing."""
        self._known = [int(version) for version in state_dict.get("known", ())]


@dataclass(frozen=True, kw_only=True)
class Freshness:
    """How old the responses of a rollout are, and what was decided.

    Args:
        lags: Updates behind the current weights, in what is used. ``[B]`` long.
        dropped: Left out for their age. ``[B]`` bool.
        resampled: Sampled again for their age. ``[B]`` bool.
        corrected: To be weighed. ``[B]`` bool.
        weights: Importance weight of each token; None where no response is corrected.
            ``[B, R]`` float, 1 for responses that are not, 0 at padding.
        capped: Tokens whose weight was cut. ``[B, R]`` bool, or None.
    """

    lags: Tensor
    dropped: Tensor
    resampled: Tensor
    corrected: Tensor
    weights: Tensor | None = None
    capped: Tensor | None = None

    @classmethod
    def of_current(cls, rollout: Rollout) -> Freshness:
        """Say of a rollout that it is of the current weights."""
        lags = torch.zeros_like(rollout.sampled_by)
        none = lags.bool()
        return cls(lags=lags, dropped=none, resampled=none, corrected=none)

    def weighed(self, logprobs: Tensor, rollout: Rollout, *, cap: float) -> Freshness:
        """Add the importance weights.

        Args:
            logprobs: Of the current weights, the trainer's own. ``[B, R]`` float.
            rollout: With the sampler's.
            cap: Largest weight.
        """
        if not bool(self.corrected.any()):
            return self
        mask = rollout.response_mask
        weights, capped = truncated_importance_weights(
            logprobs, rollout.sampler_logprobs, mask, cap=cap
        )
        rows = self.corrected[:, None]
        ones = mask.to(weights.dtype)
        return replace(self, weights=weights.where(rows, ones), capped=capped & rows)


def judged(
    rollout: Rollout,
    versions: PolicyVersions,
    config: StalenessConfig,
    *,
    sample: Callable[[PromptBatch], Rollout],
    any_rank: Callable[[bool], bool],
) -> tuple[Rollout, Freshness]:
    """Decide what becomes of responses of older weights.

    Args:
        rollout: As it was sampled.
        versions: That the run has had.
        config: What is stale, and what is done with it.
        sample: Samples with the current weights; called on all ranks or none.
        any_rank: Whether something holds on any rank.

    Returns:
        The rollout that is used, and what is known of it.

    Raises:
        RolloutError: A response is not of the current weights, and ``strict`` is set; or one that
            was sampled again is still stale.
    """
    lags = versions.lags(rollout.sampled_by)
    if config.strict:
        _require_exact(lags, any_rank)
    stale = lags > config.max_lag
    none = torch.zeros_like(stale)
    resampled = none
    if config.on_stale == "resample" and any_rank(bool(stale.any())):
        rollout, resampled = _sampled_again(rollout, stale, sample), stale
        lags = versions.lags(rollout.sampled_by)
        _require_fresh(lags, config.max_lag, any_rank)
    corrected = stale if config.on_stale == "correct" else none
    return rollout, Freshness(
        lags=lags,
        dropped=stale if config.on_stale == "drop" else none,
        resampled=resampled,
        corrected=torch.ones_like(stale) if config.correct_all else corrected,
    )


def _require_exact(lags: Tensor, any_rank: Callable[[bool], bool]) -> None:
    own = int((lags > 0).sum())
    if any_rank(own > 0):
        raise RolloutError(
            f"`staleness.strict`: {own} of {len(lags)} responses on this rank are of weights up to "
            f"{int(lags.max()) if own else 0} updates old. Let the engine sample with the current "
            "weights (`ahead: 0` of AsyncEngine), or leave `strict` out."
        )


def _require_fresh(lags: Tensor, max_lag: int, any_rank: Callable[[bool], bool]) -> None:
    own = int((lags > max_lag).sum())
    if any_rank(own > 0):
        raise RolloutError(
            f"`staleness.on_stale: resample`: {own} responses on this rank are still more than "
            f"`max_lag: {max_lag}` updates old when they have been sampled again. The engine does "
            "not take the current weights; raise `max_lag`, or take `on_stale: correct`."
        )


def _sampled_again(
    rollout: Rollout, rows: Tensor, sample: Callable[[PromptBatch], Rollout]
) -> Rollout:
    """Put new responses in the place of some rows.

    Args:
        rollout: The rows that stay, and their order.
        rows: Which are sampled again. ``[B]`` bool.
        sample: Answers prompts.
    """
    places = rows.nonzero()[:, 0].cpu()
    new = sample(rollout.prompts.select(places))
    width = max(rollout.response_ids.shape[1], new.response_ids.shape[1])
    columns: dict[str, Any] = {"versions": rollout.sampled_by.clone()}
    columns["versions"][rows] = new.sampled_by.to(rows.device)
    for name in ("response_ids", "response_mask", "sampler_logprobs", "truncated"):
        old, fresh = getattr(rollout, name), getattr(new, name)
        if old.dim() > 1:
            old, fresh = _widened(old, width), _widened(fresh, width)
        columns[name] = old.index_copy(0, places.to(old.device), fresh)
    return replace(rollout, **columns)


def _widened(values: Tensor, width: int) -> Tensor:
    return nn.functional.pad(values, (0, width - values.shape[1]))
