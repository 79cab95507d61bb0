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
        "weighted",
        "reward",
        "mean over responses",
        "what it adds to the weighted sum: weight times the score, of a constraint less its bound",
    )
    std: float | None = metric(
        "std", "component's own", "deviation over responses", "spread of the raw scores"
    )
    weight: float | None = metric(
        "weight",
        "reward per component's own",
        "state",
        "factor in force for this buffer: of a schedule, or the multiplier with its sign",
    )
    multiplier: float | None = metric(
        "multiplier",
        "reward per component's own",
        "state",
        "λ in force for this buffer; only with a `constraint`",
        note="at its `max` for long, the bound cannot be met at this price",
    )
    violation: float | None = metric(
        "violation",
        "component's own",
        "mean over responses",
        "how far the mean score is beyond the bound of the `constraint`; below 0 it is within",
        note="should come down to 0; below 0 with a multiplier of 0 the bound costs nothing",
    )
    dropped: float | None = metric(
        "dropped",
        "responses",
        "total",
        "responses for which it gave no usable score",
        healthy=(0.0, 0.0),
    )


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """What the buffer looks like: ``rollout/…``."""

    score_mean: float | None = metric(
        "rollout/score_mean",
        "reward",
        "mean over responses",
        "score of a response after weights, penalties, normalisation and clipping; rewards per "
        "token are added",
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
        "weighted sum of the components (of rewards per token their sum), before penalties, "
        "normalisation and clipping",
    )
    raw_score_std: float | None = metric(
        "rollout/raw_score_std",
        "reward",
        "deviation over responses",
        "spread of the score before penalties, normalisation and clipping",
    )
    raw_score_min: float | None = metric(
        "rollout/raw_score_min", "reward", "smallest", "lowest raw score"
    )
    raw_score_q05: float | None = metric(
        "rollout/raw_score_q05", "reward", "all responses together", "5 % of raw scores are below"
    )
    raw_score_q25: float | None = metric(
        "rollout/raw_score_q25", "reward", "all responses together", "25 % of raw scores are below"
    )
    raw_score_median: float | None = metric(
        "rollout/raw_score_median", "reward", "all responses together", "half of them are below"
    )
    raw_score_q75: float | None = metric(
        "rollout/raw_score_q75", "reward", "all responses together", "75 % of raw scores are below"
    )
    raw_score_q95: float | None = metric(
        "rollout/raw_score_q95", "reward", "all responses together", "95 % of raw scores are below"
    )
    raw_score_max: float | None = metric(
        "rollout/raw_score_max", "reward", "largest", "highest raw score"
    )
    raw_score_skew: float | None = metric(
        "rollout/raw_score_skew",
        "1",
        "all responses together",
        "mean of z³ of the raw scores; not measured where all are equal",
        healthy=(-8.0, 8.0),
        note="beyond it one score is out of all proportion: look at the best and worst texts",
    )
    raw_score_kurtosis: float | None = metric(
        "rollout/raw_score_kurtosis",
        "1",
        "all responses together",
        "mean of z⁴ of the raw scores, less the 3 of a normal distribution",
        note="a single outlier among n scores gives about n",
    )
    raw_score_outliers: float | None = metric(
        "rollout/raw_score_outliers",
        "responses",
        "total",
        "raw scores farther than 5 · 1.4826 times the median distance from the median; not "
        "measured where more than half are equal",
        note="of 512 normal ones none; a few are common with bounded or sparse rewards",
    )
    score_length_correlation: float | None = metric(
        "rollout/score_length_correlation",
        "1",
        "all responses together",
        "correlation of the raw score with the response's length in tokens",
        note="high from the start, and the length growing with the score: length exploitation",
    )
    score_repetition_correlation: float | None = metric(
        "rollout/score_repetition_correlation",
        "1",
        "all responses together",
        "correlation of the raw score with the response's share of repeated bigrams",
        note="clearly above 0 the reward pays for repetition; not measured where all scores or all "
        "shares are equal",
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
    temperature: float | None = metric(
        "rollout/temperature",
        "1",
        "state",
        "temperature that this buffer was sampled at: that of its log-probabilities, of its KL and "
        "entropy, and of the update on it",
        healthy=(0.5, 1.5),
        note="that of `sampling` unless something turns the dial; entropy and KL before and after "
        "a change are of different distributions",
    )
    entropy: float | None = metric(
        "rollout/entropy",
        "nats per token",
        "mean over tokens",
        "entropy of the whole next-token distribution at the sampling temperature",
        note="falls somewhat: healthy runs kept 59 % of the start; half of it is an alarm",
    )
    entropy_start: float | None = metric(
        "rollout/entropy_start",
        "nats per token",
        "state",
        "that entropy in the first buffer, which the weights wrote that the run began with",
        note="the entropy of the SFT model where the policy starts as it, else of what it starts "
        "as; kept over a resume",
    )
    entropy_relative: float | None = metric(
        "rollout/entropy_relative",
        "share",
        "ratio of totals",
        "`rollout/entropy` divided by `rollout/entropy_start`",
        healthy=(0.5, None),
        note="on the responses of now and of then, not on the same ones",
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
    behaviour_kl: float | None = metric(
        "rollout/behaviour_kl",
        "nats per token",
        "mean over tokens",
        "KL(sampler‖trainer): log-probability by the sampler − by the trainer's own forward pass",
        healthy=(-0.005, 0.005),
        note="far below `rollout/sampler_mismatch` that one is rounding; as large, the sampler is "
        "another policy; clearly below 0 the tokens are not drawn from what the sampler says",
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
        "left out of the buffer: no tokens, a score, log-probability or value not finite, or too "
        "old for `staleness`",
        healthy=(0.0, 0.0),
    )
    unscored_responses: float | None = metric(
        "rollout/unscored_responses",
        "responses",
        "total",
        "those of them that have tokens and no usable score",
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
