"""Metrics of the update: over the minibatches of one iteration that were really worked on."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_lightning.metrics.schema import metric


@dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """What the optimiser steps did: ``update/…``.

    Means run over the minibatches whose forward pass was made, the one at which the update stopped
    included. A minibatch whose loss or gradient was not finite is in none of them, nor are those
    after a stop.
    """

    policy_loss: float | None = metric(
        "update/policy_loss",
        "1",
        "mean over tokens",
        "clipped surrogate −min(ratio·A, clip(ratio)·A), or that of the penalty objective",
        note="wanders around 0: its level says little",
    )
    value_loss: float | None = metric(
        "update/value_loss",
        "reward²",
        "mean over tokens",
        "squared error of the value against the return, clipped as configured, without ½",
        note="should settle; a high or jumping one points to the critic or to unscaled rewards",
    )
    ptx_loss: float | None = metric(
        "update/ptx_loss",
        "nats per token",
        "mean over tokens",
        "−log-probability of the texts that are learned beside; only with `ptx`",
    )
    kl_loss: float | None = metric(
        "update/kl_loss",
        "nats per token",
        "mean over tokens",
        "KL to the reference as part of the loss, before `kl_coef`; only with `placement: loss`",
    )
    update_entropy: float | None = metric(
        "update/entropy",
        "nats per token",
        "mean over tokens",
        "entropy of the whole next-token distribution while it is being updated",
    )
    kl_old: float | None = metric(
        "update/kl_old",
        "nats per token",
        "mean over tokens",
        "KL(old‖new): ratio − 1 − log ratio (k3), from each minibatch's forward before its step",
        healthy=(0.0, 0.02),
        note="above 0.05 with a clip fraction above 0.3 the buffer is overfitted",
    )
    kl_old_last: float | None = metric(
        "update/kl_old_last",
        "nats per token",
        "state",
        "the same at the last minibatch of the iteration whose forward was made",
    )
    kl_stopped: float | None = metric(
        "update/kl_stopped", "0 or 1", "state", "1 if the bound on KL(old‖new) ended the update"
    )
    kl_ref_update: float | None = metric(
        "update/kl_ref",
        "nats per response",
        "mean over responses",
        "KL(policy‖reference) while it is being updated: ratio times log-ratio to the reference on "
        "the buffer's tokens",
    )
    kl_capped: float | None = metric(
        "update/kl_capped",
        "0 or 1",
        "state",
        "1 if a bound on KL(policy‖reference) ended the update",
    )
    kl_returning: float | None = metric(
        "update/kl_returning",
        "0 or 1",
        "state",
        "1 if the buffer was beyond such a bound, and trained nothing but the way back",
    )
    penalty_coef: float | None = metric(
        "update/penalty_coef",
        "1",
        "state",
        "coefficient of KL(old‖new) in force; only with `objective: penalty`",
    )
    clip_fraction: float | None = metric(
        "update/clip_fraction",
        "share",
        "mean over tokens",
        "tokens whose ratio lies outside the band [1 − ε, 1 + ε]",
        healthy=(0.0, 0.12),
        note="0.2 is an alarm; about 0 with a flat score means that nothing is learned",
    )
    clip_fraction_positive: float | None = metric(
        "update/clip_fraction_positive",
        "share",
        "mean over tokens",
        "the same among tokens whose advantage is above 0",
    )
    clip_fraction_negative: float | None = metric(
        "update/clip_fraction_negative",
        "share",
        "mean over tokens",
        "the same among tokens whose advantage is below 0",
    )
    clip_active_fraction: float | None = metric(
        "update/clip_active_fraction",
        "share",
        "mean over tokens",
        "tokens whose gradient the clip removes",
    )
    dual_clip_fraction: float | None = metric(
        "update/dual_clip_fraction",
        "share",
        "mean over tokens",
        "tokens whose loss the dual clip bounds; only with `dual_clip`",
    )
    value_clip_fraction: float | None = metric(
        "update/value_clip_fraction",
        "share",
        "mean over tokens",
        "tokens whose value loss is that of the clipped value",
    )
    clip_range: float | None = metric(
        "update/clip_range", "1", "state", "ε in force (the lower one where they differ)"
    )
    ent_coef: float | None = metric(
        "update/ent_coef", "1", "state", "weight of the entropy bonus in force"
    )
    ratio_mean: float | None = metric(
        "update/ratio_mean", "1", "mean over tokens", "probability ratio new/old", note="about 1"
    )
    ratio_max: float | None = metric(
        "update/ratio_max",
        "1",
        "largest",
        "probability ratio new/old",
        note="a poor alarm: healthy runs reached 22",
    )
    ratio_beyond_2: float | None = metric(
        "update/ratio_beyond_2",
        "share",
        "mean over tokens",
        "tokens whose probability more than doubled or fell below half: ratio above 2 or below ½",
        note="the tail that `update/ratio_max` sees one token of",
    )
    log_ratio_clamped: float | None = metric(
        "update/log_ratio_clamped",
        "tokens",
        "total",
        "tokens whose log-ratio was beyond the clamp of ±10",
        healthy=(0.0, 0.0),
    )
    first_ratio_error: float | None = metric(
        "update/first_ratio_error",
        "nats",
        "largest",
        "|log-ratio| at the first minibatch, where new and old policy are the same weights",
        healthy=(0.0, 0.5),
        note="rounding: about 1e-5 in float32, up to 0.2 in bfloat16, where 0.5 is the "
        "self-check's bound",
    )
    grad_norm_actor: float | None = metric(
        "update/grad_norm_actor",
        "1",
        "mean over steps",
        "2-norm of the actor's gradient before clipping",
    )
    grad_norm_actor_max: float | None = metric(
        "update/grad_norm_actor_max", "1", "largest", "the largest of those norms"
    )
    grad_norm_critic: float | None = metric(
        "update/grad_norm_critic",
        "1",
        "mean over steps",
        "2-norm of the critic's gradient before clipping",
    )
    grad_norm_critic_max: float | None = metric(
        "update/grad_norm_critic_max", "1", "largest", "the largest of those norms"
    )
    lr_actor: float | None = metric(
        "update/lr_actor", "1", "state", "the actor's learning rate at the last step"
    )
    lr_critic: float | None = metric(
        "update/lr_critic", "1", "state", "the critic's learning rate at the last step"
    )
    steps_taken: float | None = metric(
        "update/steps_taken", "steps", "total", "optimiser steps of the iteration"
    )
    actor_steps: float | None = metric(
        "update/actor_steps", "steps", "total", "those of them that moved the actor"
    )
    steps_skipped_kl: float | None = metric(
        "update/steps_skipped_kl",
        "steps",
        "total",
        "planned steps that a bound on a KL left out, the one at which it stopped included",
    )
    steps_skipped_nonfinite: float | None = metric(
        "update/steps_skipped_nonfinite",
        "steps",
        "total",
        "steps not taken because the loss or a gradient was not finite",
        healthy=(0.0, 0.0),
    )
    epochs_done: float | None = metric(
        "update/epochs_done",
        "epochs",
        "ratio of totals",
        "passes over the buffer that were made: steps taken divided by minibatches of one pass",
    )
