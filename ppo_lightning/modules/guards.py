"""Guards of the update: the ratio at its start, and steps that are not finite."""

from __future__ import annotations

import warnings
from typing import Literal

import torch

from ppo_lightning.distributed import rank
from ppo_lightning.errors import UpdateError
from ppo_lightning.metrics import IterationStats

TOLERANCE = {
    torch.float64: 1e-7,
    torch.float32: 2e-3,
    torch.bfloat16: 0.5,
    torch.float16: 0.05,
}
"""Largest |log ratio| of a single token that rounding explains, by the dtype of the forward pass.

Rounding grows with the differing shapes of the two passes and with depth; the faults that the
check is for (position ids, temperature, dropout, masks) shift log-probs by 0.01 to several nats. In
bfloat16 the two overlap for a single token: logits of 16 to 32 are 0.125 apart, and healthy runs of
a model of 135 M parameters reach 0.19. There the mean decides, see ``MEAN_TOLERANCE``; 0.5 sees
what shifts few tokens by much, as a mask does that is off by one.
"""

MEAN_TOLERANCE = {torch.bfloat16: 0.04}
"""Mean |log ratio| over the tokens of the minibatch that rounding explains, where the largest says
too little.

Measured in bfloat16: 0.001 on a tiny model and 0.014 on one of 135 M parameters, at prompts of
several lengths; with equal shapes both passes are the same, bit for bit. A temperature of 0.95 in
the place of 1 makes 0.05 to 0.09 of it, dropout of 0.1 a nat or more.
"""


class SelfCheck:
    """At the first minibatch of an iteration the policy is still the one that sampled.

    So the ratio is 1 and KL(old‖new) is 0. Where they are not, the two forward passes are not of
    the same distribution, and everything that follows is biased.

    Args:
        mode: ``warn``, ``error`` or ``off``.
    """

    def __init__(self, mode: Literal["warn", "error", "off"]) -> None:
        self.mode = mode

    def __call__(self, largest: float, mean: float, dtype: torch.dtype) -> None:
        """Compare the log ratios with what rounding explains.

        Args:
            largest: max |log π_θ − log π_old| over the minibatch, on all ranks.
            mean: Mean of it over the tokens.
            dtype: Coarsest dtype of the forward pass.

        Raises:
            UpdateError: One is larger, and ``mode`` is ``error``.
        """
        if self.mode == "off":
            return
        bound, mean_bound = TOLERANCE[dtype], MEAN_TOLERANCE.get(dtype, TOLERANCE[dtype])
        # A nan is the business of the guard on steps.
        if largest > bound:
            found, explained = f"reaches {largest:.2g}", bound
        elif mean > mean_bound:
            found, explained = f"is {mean:.2g} in the mean", mean_bound
        else:
            return
        message = (
            f"The ratio is not 1 before the first update: |log ratio| {found}, "
            f"rounding in {dtype} explains {explained:.2g}. The rollout's log-probabilities and "
            "the update's are of different distributions. Usual causes: dropout left on in a "
            "custom model, a module that behaves differently in `train()`, an attention "
            "implementation that ignores padding, weights that a callback changed between "
            "rollout and update."
        )
        if self.mode == "error":
            raise UpdateError(message)
        _warn(message)


MISMATCH_TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.05}
"""Mean |log-probability by the sampler − by the trainer| that rounding explains, nats per token.

0.005 in float32 and finer: the sampler keeps its log-probabilities in float32.
"""


class SamplerCheck:
    """The engine that samples and the forward pass that trains must be of one distribution.

    Where they are not, ratios and advantages are of responses that this policy does not write so.
    ``SelfCheck`` cannot see it: it compares two passes of the trainer.

    Args:
        mode: ``warn`` (once), ``error`` or ``off``.
    """

    def __init__(self, mode: Literal["warn", "error", "off"]) -> None:
        self.mode = mode

    def __call__(self, mismatch: float | None, *dtypes: torch.dtype | None) -> None:
        """Compare an iteration's mean mismatch with what rounding explains.

        Args:
            mismatch: Nats per token; None where there was nothing to compare.
            dtypes: Of the trainer's forward pass and, where it has its own, of the sampler's.

        Raises:
            UpdateError: It is larger, and ``mode`` is ``error``.
        """
        known = {d: MISMATCH_TOLERANCE.get(d, 0.005) for d in dtypes if d is not None}
        dtype = max(known, key=lambda d: known[d])
        tolerance = known[dtype]
        if self.mode == "off" or mismatch is None or not mismatch > tolerance:
            return
        message = (
            f"The sampler's log-probabilities differ from the trainer's by {mismatch:.2g} nats a "
            f"token in the mean (`rollout/sampler_mismatch`); rounding in {dtype} explains "
            f"{tolerance:.2g}. Responses are sampled from another distribution than the one that "
            "is trained. Usual causes: a decoding cache or left padding that the model's family "
            "reads in its own way (try `engine: {class_path: "
            "ppo_lightning.rollout.GenerateEngine}`), an engine of your own with old weights or "
            "another temperature."
        )
        if self.mode == "error":
            raise UpdateError(message)
        self.mode = "off"
        _warn(message)


class SkipCounter:
    """Counts steps in a row that were skipped because a number was not finite.

    Args:
        limit: This many in a row are an illness.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def count(self, skipped: bool) -> bool:
        """Count one step.

        Returns:
            Whether ``limit`` steps in a row were skipped.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        return self.in_a_row >= self.limit

    @property
    def evidence(self) -> str:
        """What was counted, as a sentence."""
        return (
            f"{self.in_a_row} optimiser steps in a row had a loss or gradient that is not finite; "
            "no parameter was changed by them."
        )

    def error(self) -> UpdateError:
        """Return the error that ends a run which nothing treats."""
        return UpdateError(
            f"{self.evidence} Lower `actor.lr`, clip the rewards (`reward_processing.clip`), or "
            "raise `optimizer.eps` to 1e-4, and resume from the last checkpoint; or add the "
            "callback `CheckpointRollback`, which does so by itself. `guards.max_skipped_steps` "
            "sets how many are tolerated."
        )


def warn_of_idle_update(stats: IterationStats) -> None:
    """Say that an iteration trained nothing, and why; the first rank does, once for each reason.

    Args:
        stats: Of the iteration.
    """
    if stats.steps_skipped_nonfinite:
        reason = "no loss and gradient was finite; the model's own weights may not be"
    elif stats.stale_dropped and stats.stale_dropped == stats.num_responses:
        reason = "every response was older than `staleness.max_lag`, and `on_stale: drop` left none"
    elif stats.dropped_responses == stats.num_responses:
        reason = (
            "every response was dropped, for want of tokens, a finite score or finite "
            "log-probabilities"
        )
    elif stats.kl_stopped or stats.kl_capped:
        bound = "`ppo.target_kl`" if stats.kl_stopped else "`kl.max_kl_ref` or `..._per_token`"
        reason = f"{bound} was exceeded at the first of them"
    elif not stats.num_tokens:
        reason = (
            "no response counts: `reward_processing.mask_truncated` leaves out what ended without "
            "an end token, `ppo.drop_flat_prompts` prompts whose scores are all equal"
        )
    else:
        reason = "no pass over the buffer was due"
    _warn(f"An iteration took no optimiser step: {reason}.")


def _warn(message: str) -> None:
    """Warn on the first rank: all have found the same."""
    if rank() == 0:
        warnings.warn(message, stacklevel=3)
