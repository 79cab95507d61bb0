"""Names of the illnesses of a run, as verdicts and settings use them."""

from __future__ import annotations

ILLNESSES = (
    "critic_failure",
    "entropy_collapse",
    "kl_runaway",
    "length_exploitation",
    "no_reward_signal",
    "nonfinite_update",
    "oscillation",
    "over_optimisation",
    "overfit_buffer",
    "policy_collapse",
    "rank_trouble",
    "reward_hacking",
    "reward_nonfinite",
    "reward_outlier",
    "reward_scale",
    "sampling_mismatch",
    "stale_rollouts",
    "stalled",
    "update_too_large",
)
"""Those that this project's table knows; a detector of one's own may report others."""

UPDATE_ILLNESSES = frozenset({"nonfinite_update", "update_too_large"})
"""Found in the update itself: as a rule the policy that it began with was still well."""
