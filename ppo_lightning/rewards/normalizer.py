"""Scores in units of a spread: of a batch, of the past, of a reference, or of a prompt's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.configs import RewardProcessing
from ppo_lightning.functional import (
    Moments,
    Reduce,
    ema_update,
    group_zscore,
    identity,
    moments,
    normalise,
    running_update,
)


class ScoreNormalizer:
    """Takes the mean off scores and divides them by a spread; remembers what it needs for that.

    The moments take in the current batch before it is divided by them, so the first batch is
    normalised by itself. ``ema`` is the bias-corrected form: in the plain one the first batch
    would keep the weight of a whole past for 1 / (1 - decay) iterations, and a jump of the mean
    between batches would not count as spread, so that scores were divided by too little just when
    they move. Fed with sums over all ranks, it is the same on every rank.

    Args:
        processing: Says how, in ``normalize`` and the settings that belong to it.
    """

    def __init__(self, processing: RewardProcessing) -> None:
        self.processing = processing
        self._moments = self._start()

    @property
    def spread(self) -> float | None:
        """σ in force, for β_eff = β · σ; None before the first scores, for ``none`` and ``group``.

        For ``batch`` it is that of the latest batch.
        """
        return math.sqrt(self._moments.var) if self._moments.count else None

    def __call__(
        self,
        scores: Tensor,
        counted_mask: Tensor,
        groups: Tensor | None = None,
        reduce: Reduce = identity,
    ) -> Tensor:
        """Normalise a batch, and move the state on by it.

        Args:
            scores: This rank's share, maybe empty. ``[B]`` float.
            counted_mask: Scores that enter the moments; the others are normalised and do not
                count. ``[B]`` bool.
            groups: Number of the prompt that each score belongs to, from 0, the same on all
                ranks; only ``group`` reads it. ``[B]`` long.
            reduce: Adds a vector over ranks. All ranks call it equally often.

        Returns:
            ``[B]``; all 0 where the spread is 0.

        Raises:
            ValueError: ``group`` without ``groups``, or with other ones than one a score.
        """
        how = self.processing.normalize
        if how == "none":
            return scores
        if how == "group":
            if groups is None:
                raise ValueError("`normalize: group` needs `groups`, the prompt of each response.")
            return group_zscore(scores, groups.to(scores.device), counted_mask, reduce=reduce)
        self._moments = self._moved(scores, counted_mask, reduce)
        if self._moments.var == 0:
            # All that count are equal. One that does not would be divided by next to nothing.
            return torch.zeros_like(scores)
        return normalise(scores, self._moments)

    def state_dict(self) -> dict[str, Any]:
        """Return plain text and numbers."""
        return {"normalize": self.processing.normalize, **asdict(self._moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, or from the start if it lacks one or has that of another kind.

        Args:
            state: Of ``state_dict``, maybe of an older version. Moments that the settings fix
                stay those of the settings.
        """
        self._moments = self._start()
        fixed = self.processing.reference_std is not None
        if not fixed and state.get("normalize") == self.processing.normalize:
            names = [field.name for field in fields(Moments)]
            self._moments = Moments(**{n: float(state[n]) for n in names if n in state})

    def _start(self) -> Moments:
        mean, std = self.processing.reference_mean, self.processing.reference_std
        return Moments() if mean is None or std is None else Moments(1, mean, std**2)

    def _moved(self, scores: Tensor, counted: Tensor, reduce: Reduce) -> Moments:
        now, how = self._moments, self.processing.normalize
        if how == "running":
            return running_update(now, scores, counted, reduce=reduce)
        if how == "ema":
            decay = self.processing.ema_decay
            return ema_update(now, scores, counted, decay=decay, bias_corrected=True, reduce=reduce)
        # A buffer without spread gives no unit to measure in: the next one is asked again.
        if how == "reference" and now.var > 0:
            return now
        return moments(scores, counted, reduce=reduce)
