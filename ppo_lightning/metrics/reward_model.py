"""What the training of a reward model measures, beside what every supervised run does."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_lightning.metrics.schema import metric
from ppo_lightning.metrics.supervised import StepStats


@dataclass(frozen=True, kw_only=True)
class RewardModelStats(StepStats):
    """Training steps of a reward model (``train/…``), or a validation on held-out pairs."""

    preference_loss: float | None = metric(
        "train/preference_loss",
        "nats",
        "mean over examples",
        "-log σ(chosen - rejected - margin), without the centring term",
        note="log 2 = 0.693 is a coin; 0 on few pairs is learning by heart",
    )
    accuracy: float | None = metric(
        "train/accuracy",
        "share",
        "mean over examples",
        "training pairs whose chosen answer scored higher when they were learned from; ties half",
    )
    score_gap: float | None = metric(
        "train/score_gap", "score", "mean over examples", "score of chosen minus rejected answer"
    )
    score_mean: float | None = metric(
        "train/score_mean", "score", "mean over examples", "mean score of the pair's two answers"
    )
    score_std: float | None = metric(
        "train/score_std",
        "score",
        "mean over examples",
        "pooled deviation of all scores, population",
        note="growing without end is over-confidence: fewer epochs, or more `label_smoothing`",
    )
    val_preference_loss: float | None = metric(
        "val/preference_loss",
        "nats",
        "mean over examples",
        "-log σ(chosen - rejected - margin) on held-out pairs; without smoothing or centring",
    )
    val_accuracy: float | None = metric(
        "val/accuracy",
        "share",
        "mean over examples",
        "held-out pairs whose chosen answer scores higher; ties half",
        healthy=(0.65, None),
        note="noisy labels bound it from above",
    )
    val_accuracy_low: float | None = metric(
        "val/accuracy_low",
        "share",
        "mean over examples",
        "lower end of the accuracy's 95 % interval (Wilson)",
        healthy=(0.5, None),
    )
    val_accuracy_high: float | None = metric(
        "val/accuracy_high",
        "share",
        "mean over examples",
        "upper end of the accuracy's 95 % interval (Wilson)",
    )
    val_calibration_error: float | None = metric(
        "val/calibration_error",
        "share",
        "mean over examples",
        "expected calibration error: mean |accuracy - confidence| over bins of σ(|gap|)",
        healthy=(0, 0.1),
    )
    val_score_mean: float | None = metric(
        "val/score_mean", "score", "mean over examples", "mean score of all held-out answers"
    )
    val_score_std: float | None = metric(
        "val/score_std",
        "score",
        "mean over examples",
        "pooled deviation of all held-out scores, population",
    )
    val_score_gap: float | None = metric(
        "val/score_gap",
        "score",
        "mean over examples",
        "score of chosen minus rejected answer on held-out pairs",
    )
    val_accuracy_chosen_longer: float | None = metric(
        "val/accuracy_chosen_longer",
        "share",
        "mean over examples",
        "accuracy where the chosen answer is the longer one",
    )
    val_accuracy_chosen_shorter: float | None = metric(
        "val/accuracy_chosen_shorter",
        "share",
        "mean over examples",
        "accuracy where the chosen answer is the shorter one",
        note="far below `accuracy_chosen_longer`: length is taken for quality",
    )
    val_longer_wins_accuracy: float | None = metric(
        "val/longer_wins_accuracy",
        "share",
        "mean over examples",
        "accuracy of the rule that the longer answer is the better one; of the data, not the model",
    )
    val_length_correlation: float | None = metric(
        "val/length_correlation",
        "",
        "mean over examples",
        "Pearson correlation of score and answer length in tokens",
    )
    val_length_partial_correlation: float | None = metric(
        "val/length_partial_correlation",
        "",
        "mean over examples",
        "the same with 'was chosen' held fixed",
        healthy=(-0.3, 0.3),
        note="what PPO will exploit: raise the length penalty, or balance the pairs by length",
    )
