"""Metrics of held-out prompts, one set for each way in which they are answered."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_lightning.metrics.schema import metric


@dataclass(frozen=True, kw_only=True)
class AnswerStats:
    """Answers to the validation prompts: ``val/greedy/…``, ``val/sampled/…``, ``val/reference/…``.

    The policy is the one after the iteration's updates.
    """

    score: float | None = metric(
        "score",
        "reward",
        "mean over responses",
        "weighted sum of the components, before penalties, normalisation and clipping",
    )
    gold: float | None = metric(
        "gold",
        "gold's own",
        "mean over responses",
        "score by the gold reward, which the training never sees; only where one is given",
        note="falling while the score rises is over-optimisation: select checkpoints by this one",
    )
    gold_error: float | None = metric(
        "gold_error",
        "gold's own",
        "deviation over responses",
        "standard error of that mean, the answers taken as independent",
        note="differences of a few of these are noise",
    )
    kl_ref: float | None = metric(
        "kl_ref",
        "nats per response",
        "mean over responses",
        "log-ratio policy to reference of the answer's tokens, summed over the answer",
        note="an estimate of the KL for sampled answers only",
    )
    entropy: float | None = metric(
        "entropy",
        "nats per token",
        "mean over tokens",
        "entropy of the whole next-token distribution at the sampling temperature",
    )
    response_length: float | None = metric(
        "response_length",
        "tokens",
        "mean over responses",
        "tokens of an answer, end token included",
    )
    truncated_share: float | None = metric(
        "truncated_share",
        "share",
        "mean over responses",
        "answers that met the length limit without an end token or stop string",
    )
    repeated_bigrams: float | None = metric(
        "repeated_bigrams",
        "share",
        "mean over responses",
        "bigrams of an answer that already occurred in it",
    )
    distinct_openings: float | None = metric(
        "distinct_openings",
        "share",
        "all responses together",
        "different openings of 4 tokens divided by answers",
    )
    ref_logprob_per_token: float | None = metric(
        "ref_logprob_per_token",
        "nats per token",
        "mean over tokens",
        "log-probability of the answer's tokens under the reference",
        note="how fluent the reference finds the answers: a fall far below the reference's own "
        "answers is a sign of gibberish",
    )
