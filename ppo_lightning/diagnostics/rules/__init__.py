"""One pure function for each illness, and the table of them."""

from ppo_lightning.diagnostics.rules.base import LOGGED, Rule, Sign, SignRule, found, seen
from ppo_lightning.diagnostics.rules.learning import critic_failure, no_reward_signal, stalled
from ppo_lightning.diagnostics.rules.numbers import nonfinite_update, reward_nonfinite
from ppo_lightning.diagnostics.rules.policy import (
    entropy_collapse,
    kl_runaway,
    oscillation,
    overfit_buffer,
    policy_collapse,
    update_too_large,
)
from ppo_lightning.diagnostics.rules.rewards import (
    length_exploitation,
    over_optimisation,
    reward_hacking,
    reward_outlier,
    reward_scale,
)
from ppo_lightning.diagnostics.rules.sampling import (
    rank_trouble,
    sampling_mismatch,
    stale_rollouts,
)

__all__ = [
    "COMPANIONS",
    "LOGGED",
    "RULES",
    "Rule",
    "Sign",
    "SignRule",
    "critic_failure",
    "entropy_collapse",
    "found",
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
    "seen",
    "stale_rollouts",
    "stalled",
    "update_too_large",
]

RULES: tuple[Rule, ...] = (
    SignRule("reward_nonfinite", reward_nonfinite, confirm=1, lasting="ill"),
    SignRule("nonfinite_update", nonfinite_update, confirm=1, lasting="ill"),
    SignRule("reward_outlier", reward_outlier, confirm=1, lasting="ill"),
    SignRule("reward_scale", reward_scale),
    SignRule("stale_rollouts", stale_rollouts),
    SignRule("sampling_mismatch", sampling_mismatch),
    SignRule("update_too_large", update_too_large, lasting="critical"),
    SignRule("overfit_buffer", overfit_buffer),
    SignRule("length_exploitation", length_exploitation),
    SignRule("reward_hacking", reward_hacking),
    SignRule("over_optimisation", over_optimisation),
    SignRule("policy_collapse", policy_collapse, lasting="ill"),
    SignRule("entropy_collapse", entropy_collapse),
    SignRule("kl_runaway", kl_runaway),
    SignRule("oscillation", oscillation),
    SignRule("stalled", stalled, confirm=1),
    SignRule("no_reward_signal", no_reward_signal),
    SignRule("critic_failure", critic_failure),
    SignRule("rank_trouble", rank_trouble),
)
"""Causes before what they cause: of two illnesses that are equally bad, the earlier here leads."""

_OF_THE_POLICY = ("policy_collapse", "kl_runaway", "entropy_collapse", "oscillation")
_OF_LEARNING = ("no_reward_signal", "stalled", "critic_failure")
_TOO_FAR = ("update_too_large", "overfit_buffer")

COMPANIONS: dict[str, tuple[str, ...]] = {
    "reward_nonfinite": ("nonfinite_update", *_OF_THE_POLICY, *_OF_LEARNING),
    "nonfinite_update": (*_OF_THE_POLICY, *_OF_LEARNING),
    "reward_outlier": ("reward_scale", "policy_collapse", "oscillation", "critic_failure"),
    "reward_scale": (
        *("reward_outlier", "reward_hacking", "over_optimisation"),
        *(*_OF_THE_POLICY, *_OF_LEARNING),
    ),
    "stale_rollouts": ("sampling_mismatch", *_TOO_FAR, *_OF_LEARNING),
    "sampling_mismatch": (*_TOO_FAR, *_OF_LEARNING),
    "update_too_large": ("reward_hacking", "over_optimisation", *_OF_THE_POLICY, *_OF_LEARNING),
    "overfit_buffer": (*_OF_THE_POLICY, *_OF_LEARNING),
    "length_exploitation": (
        *("reward_hacking", "over_optimisation", "kl_runaway", "entropy_collapse"),
        "critic_failure",
    ),
    "reward_hacking": (
        *("over_optimisation", "length_exploitation", "update_too_large", "critic_failure"),
        *_OF_THE_POLICY,
    ),
    "over_optimisation": ("kl_runaway", "entropy_collapse", "update_too_large", "critic_failure"),
    "kl_runaway": ("entropy_collapse", "update_too_large"),
    "entropy_collapse": ("reward_hacking", "over_optimisation", "kl_runaway", "update_too_large"),
    "stalled": ("critic_failure", "no_reward_signal"),
    "no_reward_signal": ("critic_failure", "kl_runaway"),
    "critic_failure": ("no_reward_signal", "stalled"),
}
"""Illness to those that it accounts for, where both show: these are then told as its companions."""
