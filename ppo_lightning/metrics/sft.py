"""What supervised fine-tuning measures."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_lightning.metrics.schema import metric
from ppo_lightning.metrics.supervised import StepStats


@dataclass(frozen=True, kw_only=True)
class SFTStats(StepStats):
    """A row of supervised fine-tuning: some optimiser steps, or a validation.

    *Learned tokens* are those of the answers, the end token of each included.
    """

    loss: float | None = metric(
        "train/loss",
        "nats/token",
        "mean over tokens",
        "−log p of the learned tokens",
        note="falls; far below `val/loss` it is learning by heart",
    )
    token_accuracy: float | None = metric(
        "train/token_accuracy",
        "share",
        "mean over tokens",
        "learned tokens that are the likeliest in their place",
    )
    tokens: float | None = metric("train/tokens", "tokens", "total", "learned tokens")
    padding_share: float | None = metric(
        "train/padding_share",
        "share",
        "ratio of totals",
        "computed places that hold no token; `packing` lowers it",
    )
    tokens_per_second: float | None = metric(
        "time/tokens_per_second", "tokens/s", "ratio of totals", "tokens read in training a second"
    )
    val_loss: float | None = metric(
        "val/loss",
        "nats/token",
        "mean over tokens",
        "−log p of the learned tokens of held-out demonstrations",
        note="rises again when the run is too long",
    )
    val_perplexity: float | None = metric(
        "val/perplexity", "", "mean over tokens", "exp of `val/loss`"
    )
    val_token_accuracy: float | None = metric(
        "val/token_accuracy",
        "share",
        "mean over tokens",
        "learned tokens of held-out demonstrations that are the likeliest in their place",
    )
    val_tokens: float | None = metric(
        "val/tokens", "tokens", "total", "learned tokens of held-out demonstrations"
    )
