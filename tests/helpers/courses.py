"""Rows of made-up runs, for rules."""

import math

from ppo_lightning.diagnostics import RULES, Course, RuleLimits
from ppo_lightning.metrics import AnswerStats, IterationStats


def healthy(i, **changes):
    """An iteration of a run that learns: the score rises, KL and entropy move slowly."""
    wobble = 0.05 * math.sin(2.1 * i)
    score = -0.6 + 0.05 * min(i, 40) + wobble
    row = {
        "iteration": i,
        "raw_score_mean": score,
        "raw_score_std": 1.3,
        "raw_score_min": -4.0,
        "raw_score_max": 3.0,
        "raw_score_skew": -0.4,
        "score_mean": score,
        "score_std": 1.3,
        "kl_ref": min(0.09 * i, 3.0),
        "kl_coef": 0.1,
        "entropy": max(2.0 - 0.02 * i, 1.4),
        "kl_old": 0.004,
        "clip_fraction": 0.05,
        "value_loss": 0.5,
        "explained_variance": min(0.4, 0.04 * i),
        "advantage_abs_max": 4.0,
        "grad_norm_actor": 0.5,
        "grad_norm_critic": 1.5,
        "policy_loss": -0.01,
        "response_length_mean": 9.0 + wobble,
        "repeated_bigrams": 0.12,
        "opening_share": 0.02,
        "score_length_correlation": 0.1,
        "num_responses": 128.0,
        "dropped_responses": 0.0,
        "steps_taken": 8.0,
        "actor_steps": 8.0,
        "epochs_done": 4.0,
        "sampler_mismatch": 1e-6,
        "first_ratio_error": 1e-6,
        "lag_mean": 0.0,
    }
    return IterationStats(**(row | changes))


def run(number=20, **changes):
    """Rows of a healthy run but for what changes: numbers, or functions of the iteration."""

    def of(i):
        made = {name: value(i) if callable(value) else value for name, value in changes.items()}
        return healthy(i, **made)

    return [of(i) for i in range(number)]


def gold(score, error=None):
    """Validation with a gold score."""
    return AnswerStats(gold=score, gold_error=error)


def finding(illness, rows, **limits):
    """What one rule sees in the last row."""
    rule = next(rule for rule in RULES if rule.illness == illness)
    return rule.examine(Course(rows), RuleLimits(**limits))
