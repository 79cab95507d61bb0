"""The mathematics of PPO from human feedback: tensors in, tensors out.

No state, no logging, no configuration objects; hyperparameters are keyword-only numbers. Nothing is
averaged over microbatches or ranks behind the caller's back: functions that need all ranks take
a ``reduce`` that adds vectors over them.
"""

from ppo_lightning.functional.advantages import discounted_returns, gae
from ppo_lightning.functional.control import adapted_kl_coef, adapted_penalty_coef
from ppo_lightning.functional.kl import KLEstimator, full_kl, kl_estimate, kl_loss_per_token
from ppo_lightning.functional.logprobs import (
    entropy_from_logits,
    log_softmax,
    logprobs_and_entropy,
    shifted_logprobs,
    token_logprobs,
)
from ppo_lightning.functional.losses import (
    LossAggregation,
    PenaltyTerms,
    PolicyTerms,
    ValueTerms,
    aggregate,
    lm_loss,
    log_ratio,
    penalty_loss_per_token,
    policy_loss_per_token,
    value_loss_per_token,
)
from ppo_lightning.functional.masking import (
    accumulation_dtype,
    last_index,
    mask_from_lengths,
    masked_mean,
    masked_sum,
    position_ids,
    response_mask,
    upcast,
)
from ppo_lightning.functional.normalize import (
    Moments,
    Reduce,
    ema_update,
    identity,
    masked_moments,
    moments,
    normalise,
    running_update,
    whiten,
    zscore,
)
from ppo_lightning.functional.random import combine_keys, hash_uniform, inverse_cdf_sample
from ppo_lightning.functional.rewards import (
    KLPlacement,
    at_last_token,
    clip_scores,
    overlong_penalties,
    score_after_penalties,
    token_rewards,
)
from ppo_lightning.functional.schedules import Schedule, lr_factor
from ppo_lightning.functional.stats import (
    approx_kl,
    bootstrap_interval,
    distinct_ngrams,
    distinct_openings,
    explained_variance,
    opening_share,
    repeated_ngram_fraction,
)

__all__ = [
    "KLEstimator",
    "KLPlacement",
    "LossAggregation",
    "Moments",
    "PenaltyTerms",
    "PolicyTerms",
    "Reduce",
    "Schedule",
    "ValueTerms",
    "accumulation_dtype",
    "adapted_kl_coef",
    "adapted_penalty_coef",
    "aggregate",
    "approx_kl",
    "at_last_token",
    "bootstrap_interval",
    "clip_scores",
    "combine_keys",
    "discounted_returns",
    "distinct_ngrams",
    "distinct_openings",
    "ema_update",
    "entropy_from_logits",
    "explained_variance",
    "full_kl",
    "gae",
    "hash_uniform",
    "identity",
    "inverse_cdf_sample",
    "kl_estimate",
    "kl_loss_per_token",
    "last_index",
    "lm_loss",
    "log_ratio",
    "log_softmax",
    "logprobs_and_entropy",
    "lr_factor",
    "mask_from_lengths",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "moments",
    "normalise",
    "opening_share",
    "overlong_penalties",
    "penalty_loss_per_token",
    "policy_loss_per_token",
    "position_ids",
    "repeated_ngram_fraction",
    "response_mask",
    "running_update",
    "score_after_penalties",
    "shifted_logprobs",
    "token_logprobs",
    "token_rewards",
    "upcast",
    "value_loss_per_token",
    "whiten",
    "zscore",
]
