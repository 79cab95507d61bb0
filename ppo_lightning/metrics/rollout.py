"""Metrics of the buffer, measured before the updates: they belong to the policy that sampled."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_lightning.metrics.schema import metric


@dataclass(frozen=True, kw_only=True)
class ComponentStats:
    """One reward component: ``rollout/reward/<name>/…``."""

    raw: float | None = metric(
        "raw", "component's own", "mean over responses", "score as the component gave it, if any"
    )
    weighted: float | None = metric(
        "weighted", "reward", "mean over responses", "score times the component's weight"
    )


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """What the buffer looks like: ``rollout/…``."""

    score_mean: float | None = metric(
        "rollout/score_mean",
        "reward",
        "mean over responses",
        "score of a response after weights, penalties, normalisation and clipping",
        note="should rise, with wobble; the score of validation is the one to select by",
    )
    score_std: float | None = metric(
        "rollout/score_std",
        "reward",
        "deviation over responses",
        "spread of that score",
        note="about 1 is what usual values of `kl_coef` are meant for; 0 is no signal",
    )
    score_min: float | None = metric(
        "rollout/score_min", "reward", "smallest", "lowest of those scores"
    )
    score_max: float | None = metric(
        "rollout/score_max", "reward", "largest", "highest of those scores"
    )
    score_spread: float | None = metric(
        "rollout/score_spread",
        "reward",
        "state",
        "σ that scores were divided by: `kl_coef` times it is β in units of the raw score; only "
        "with `reward_processing.normalize`",
    )
    prompt_score_std: float | None = metric(
        "rollout/prompt_score_std",
        "reward",
        "mean over prompts",
        "spread of the raw scores of one prompt's responses; only with `responses_per_prompt` "
        "above 1",
    )
    flat_prompt_share: float | None = metric(
        "rollout/flat_prompt_share",
        "share",
        "mean over prompts",
        "prompts whose responses all have the same raw score: too hard or too easy",
        note="they teach nothing; near 1 there is nothing to learn from",
    )
    raw_score_mean: float | None = metric(
        "rollout/raw_score_mean",
        "reward",
        "mean over responses",
        "weighted sum of the components, before penalties, normalisation and clipping",
    )
    raw_score_std: float | None = metric(
        "rollout/raw_score_std",
        "reward",
        "deviation over responses",
        "spread of the score before penalties, normalisation and clipping",
    )
    score_clipped_share: float | None = metric(
        "rollout/score_clipped_share",
        "share",
        "mean over responses",
        "responses whose score was changed by `reward_processing.clip`",
        note="scores that are clipped away teach nothing",
    )
    reward_mean: float | None = metric(
        "rollout/reward_mean",
        "reward",
        "mean over responses",
        "what PPO maximises: score minus `kl_coef` times the response's KL to the reference, where "
        "that is part of the reward",
    )
    kl_ref: float | None = metric(
        "rollout/kl_ref",
        "nats per response",
        "mean over responses",
        "KL(policy‖reference): log-ratio of the sampled tokens (k1), summed over the response",
        healthy=(0.0, 10.0),
        note="0 at the start, then 3–10; just below 0 is noise of the estimate, clearly below "
        "(−0.7 was seen) means that sampler and trainer disagree",
    )
    kl_ref_per_token: float | None = metric(
        "rollout/kl_ref_per_token",
        "nats per token",
        "mean over tokens",
        "the same log-ratio, for one token",
        healthy=(0.0, 0.1),
        note="hard caps are usually set at 0.05–0.1",
    )
    kl_coef: float | None = metric(
        "rollout/kl_coef", "reward per nat", "state", "β in force for this buffer"
    )
    entropy: float | None = metric(
        "rollout/entropy",
        "nats per token",
        "mean over tokens",
        "entropy of the whole next-token distribution at the sampling temperature",
        note="falls somewhat: healthy runs kept 59 % of the start; half of it is an alarm",
    )
    sampled_nll: float | None = metric(
        "rollout/sampled_nll",
        "nats per token",
        "mean over tokens",
        "−log-probability of the sampled token: an estimate of the entropy, not the entropy",
    )
    sampler_mismatch: float | None = metric(
        "rollout/sampler_mismatch",
        "nats per token",
        "mean over tokens",
        "|log-probability by the sampler − by the trainer's own forward pass|",
        healthy=(0.0, 0.005),
    )
    response_length_mean: float | None = metric(
        "rollout/response_length_mean",
        "tokens",
        "mean over responses",
        "sampled tokens of a response, end token included",
        note="a drift beyond 1.35 times the start together with the score is length exploitation",
    )
    response_length_max: float | None = metric(
        "rollout/response_length_max", "tokens", "largest", "tokens of the longest response"
    )
    truncated_share: float | None = metric(
        "rollout/truncated_share",
        "share",
        "mean over responses",
        "responses that met the length limit without an end token or stop string",
    )
    dropped_responses: float | None = metric(
        "rollout/dropped_responses",
        "responses",
        "total",
        "left out of the buffer: no tokens, or a score, log-probability or value not finite",
        healthy=(0.0, 0.0),
    )
    nonfinite_responses: float | None = metric(
        "rollout/nonfinite_responses",
        "responses",
        "total",
        "those of them of which a network gave a log-probability or value that is not finite",
        healthy=(0.0, 0.0),
    )
    repeated_bigrams: float | None = metric(
        "rollout/repeated_bigrams",
        "share",
        "mean over responses",
        "bigrams of a response that already occurred in it",
        note="a rise together with the score is reward hacking",
    )
    distinct_1: float | None = metric(
        "rollout/distinct_1",
        "share",
        "all responses together",
        "different tokens divided by tokens",
        note="falls as the buffer grows: compare equal sizes",
    )
    distinct_2: float | None = metric(
        "rollout/distinct_2",
        "share",
        "all responses together",
        "different bigrams divided by bigrams",
        note="falls as the buffer grows: compare equal sizes",
    )
    opening_share: float | None = metric(
        "rollout/opening_share",
        "share",
        "all responses together",
        "responses that begin with the most frequent opening of 4 tokens",
        note="near 1 the policy says the same to every prompt",
    )
    distinct_openings: float | None = metric(
        "rollout/distinct_openings",
        "share",
        "all responses together",
        "different openings of 4 tokens divided by responses",
    )
    num_responses: float | None = metric(
        "rollout/num_responses", "responses", "total", "responses in the buffer"
    )
    num_tokens: float | None = metric(
        "rollout/num_tokens", "tokens", "total", "response tokens in the buffer"
    )
    explained_variance: float | None = metric(
        "rollout/explained_variance",
        "1",
        "all tokens together",
        "1 − Var(return − value) / Var(return), with the values that made the advantages",
        healthy=(-0.3, 1.0),
        note="not a number where returns do not vary; about 0 at first; still about 0 after seven "
        "iterations, or below −0.3 three times, points to the critic",
    )
    value_mean: float | None = metric(
        "rollout/value_mean", "reward", "mean over tokens", "the critic's value before the token"
    )
    return_mean: float | None = metric(
        "rollout/return_mean", "reward", "mean over tokens", "return that the critic is fitted to"
    )
    advantage_std: float | None = metric(
        "rollout/advantage_std",
        "reward",
        "deviation over tokens",
        "spread of the advantages before whitening, which hides it from the losses",
    )
    advantage_abs_max: float | None = metric(
        "rollout/advantage_abs_max",
        "reward",
        "largest",
        "|advantage| before whitening",
        note="±100 comes from an untrained critic or an outlier among the scores",
    )
