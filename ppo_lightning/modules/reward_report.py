"""What held-out pairs say of a reward model, as a record, a page and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.functional.preferences import (
    LengthBias,
    ReliabilityBin,
    bradley_terry_loss,
    calibration_error,
    length_bias,
    pair_credit,
    reliability,
    wilson_interval,
)
from ppo_lightning.io import finite, write_json_atomic, write_text_atomic
from ppo_lightning.modules.held_out_pairs import HeldOutPair

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

_MOST_WRONG = 10
_QUOTED = 200  # characters of a text
_AXES = ("confidence", "accuracy")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How numbers are distributed.

    Args:
        mean: Of all of them.
        std: Population deviation.
        quantiles: By their probability.
    """

    mean: float
    std: float
    quantiles: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class RewardReport:
    """What held-out pairs say of a reward model.

    Args:
        step: Optimiser steps behind the weights.
        num_pairs: Pairs measured.
        accuracy: Pairs whose chosen answer scores higher; ties half.
        interval: Its 95 % interval (Wilson), the pairs taken as independent.
        ties: Share of pairs with equal scores.
        loss: Mean of -log σ(gap - margin), in nats.
        calibration_error: Expected calibration error.
        bins: Confidence against accuracy.
        chosen: Scores of chosen answers.
        rejected: Scores of rejected answers.
        gap: Differences.
        scores: All scores.
        length: How far scores follow length.
        most_wrong: Pairs with the most negative gaps: wrong labels, or what the model misses.
    """

    step: int
    num_pairs: int
    accuracy: float
    interval: tuple[float, float]
    ties: float
    loss: float
    calibration_error: float
    bins: tuple[ReliabilityBin, ...]
    chosen: Spread
    rejected: Spread
    gap: Spread
    scores: Spread
    length: LengthBias
    most_wrong: tuple[dict[str, Any], ...]


def reward_report(pairs: Sequence[HeldOutPair], *, step: int, num_bins: int = 10) -> RewardReport:
    """Measure a reward model by its scores of held-out pairs.

    Args:
        pairs: Of all ranks, at least one.
        step: Optimiser steps behind the weights.
        num_bins: Bins of the confidence.
    """
    ordered = sorted(pairs)
    chosen, rejected = _column(ordered, "chosen"), _column(ordered, "rejected")
    credit = pair_credit(chosen, rejected)
    bins = reliability(chosen, rejected, num_bins=num_bins)
    loss = bradley_terry_loss(chosen, rejected, margin=_column(ordered, "margin"))
    accuracy = float(credit.mean())
    right = float(credit.sum())
    measured = math.isfinite(right)
    return RewardReport(
        step=step,
        num_pairs=len(ordered),
        accuracy=accuracy,
        interval=wilson_interval(right, len(ordered)) if measured else (math.nan, math.nan),
        ties=float((chosen == rejected).double().mean()),
        loss=float(loss.mean()),
        calibration_error=calibration_error(bins),
        bins=bins,
        chosen=_spread(chosen),
        rejected=_spread(rejected),
        gap=_spread(chosen - rejected),
        scores=_spread(torch.cat([chosen, rejected])),
        length=length_bias(
            chosen,
            rejected,
            _column(ordered, "chosen_length"),
            _column(ordered, "rejected_length"),
        ),
        most_wrong=tuple(map(_quoted, sorted(ordered, key=lambda p: p.gap)[:_MOST_WRONG])),
    )


def _column(pairs: Sequence[HeldOutPair], name: str) -> Tensor:
    return torch.tensor([getattr(pair, name) for pair in pairs], dtype=torch.float64)


def _spread(values: Tensor) -> Spread:
    points = values.quantile(torch.tensor(QUANTILES, dtype=values.dtype)).tolist()
    return Spread(
        mean=float(values.mean()),
        std=float(values.std(correction=0)),
        quantiles={f"{q:g}": point for q, point in zip(QUANTILES, points, strict=True)},
    )


def _quoted(pair: HeldOutPair) -> dict[str, Any]:
    prompt, chosen, rejected = (text[:_QUOTED] for text in pair.texts)
    return {
        "origin": pair.origin,
        "chosen_score": pair.chosen,
        "rejected_score": pair.rejected,
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
    }


def write_report(report: RewardReport, folder: Path, *, name: str = "reward_report") -> None:
    """Write a report as JSON and as a page, and a picture where matplotlib is installed.

    Args:
        report: To write.
        folder: Made if need be.
        name: Of the files, without ending.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomic(folder / f"{name}.json", finite(asdict(report)))
    write_text_atomic(folder / f"{name}.md", report_markdown(report))
    draw_reliability(report, folder / f"{name}.png")


def report_markdown(report: RewardReport) -> str:
    """Return a report as a page."""
    low, high = report.interval
    parts = [
        f"# Reward model after {report.step} steps\n",
        f"{report.num_pairs} held-out pairs: accuracy **{report.accuracy:.4f}** "
        f"(95 % interval {low:.4f} to {high:.4f}), ties {report.ties:.2%}, "
        f"loss {report.loss:.4f} nats (a coin: {math.log(2):.4f}).\n",
        "## Scores\n",
        _score_table(report),
        f"## Calibration: expected error {report.calibration_error:.4f}\n",
        "Confidence is σ(|gap|): how sure the scores are of their own verdict.\n",
        _reliability_table(report),
        "## Length\n",
        _length_table(report),
        "## Most wrong\n",
        "Pairs with the most negative gaps: wrong labels, or what the model misses.\n",
        _wrong_table(report),
    ]
    return "\n".join(parts)


def _score_table(report: RewardReport) -> str:
    names = ["chosen", "rejected", "gap", "scores"]
    header = ["", "mean", "std", *(f"q{float(q) * 100:g}" for q in report.gap.quantiles)]
    rows = []
    for name in names:
        spread: Spread = getattr(report, name)
        numbers = [spread.mean, spread.std, *spread.quantiles.values()]
        rows.append([name, *(f"{number:.3f}" for number in numbers)])
    return _table(header, rows)


def _reliability_table(report: RewardReport) -> str:
    rows = [
        [f"{b.low:.2f} to {b.high:.2f}", str(b.count), _share(b.confidence), _share(b.accuracy)]
        for b in report.bins
    ]
    return _table(["bin", "pairs", "confidence", "accuracy"], rows)


def _length_table(report: RewardReport) -> str:
    length = report.length
    rows = [
        ["accuracy where the chosen answer is longer", _share(length.accuracy_chosen_longer)],
        ["accuracy where it is shorter", _share(length.accuracy_chosen_shorter)],
        ["pairs whose chosen answer is longer", _share(length.share_chosen_longer)],
        ["accuracy of the rule 'longer wins'", _share(length.longer_wins_accuracy)],
        ["correlation of score and length", _share(length.correlation)],
        ["the same with 'was chosen' held fixed", _share(length.partial_correlation)],
    ]
    return _table(["", ""], rows)


def _wrong_table(report: RewardReport) -> str:
    rows = [
        [
            entry["origin"],
            f"{entry['chosen_score']:.3f}",
            f"{entry['rejected_score']:.3f}",
            *(_cell(entry[name]) for name in ("prompt", "chosen", "rejected")),
        ]
        for entry in report.most_wrong
        if entry["chosen_score"] < entry["rejected_score"]
    ]
    names = ["where", "chosen", "rejected", "prompt", "chosen answer", "rejected answer"]
    return _table(names, rows) if rows else "None.\n"


def _share(number: float | None) -> str:
    return "-" if number is None or math.isnan(number) else f"{number:.4f}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw_reliability(report: RewardReport, path: Path) -> bool:
    """Draw confidence against accuracy.

    Args:
        report: With its bins.
        path: Of the picture, in the format of its ending.

    Returns:
        Whether there is one: without matplotlib there is none, and the page has the table.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    filled = [b for b in report.bins if b.count]
    confidence, accuracy = ([float(getattr(b, n) or 0) for b in filled] for n in _AXES)
    figure = Figure(figsize=(4.5, 4.5))
    axes = figure.add_subplot()
    axes.plot([0.5, 1], [0.5, 1], color="grey", linewidth=1, linestyle="--")
    sizes = [10 + 190 * b.count / report.num_pairs for b in filled]
    axes.scatter(confidence, accuracy, s=sizes)
    axes.set(xlim=(0.48, 1.02), ylim=(0, 1.02), xlabel=_AXES[0], ylabel=_AXES[1])
    axes.set_title(f"ECE {report.calibration_error:.3f}, {report.num_pairs} pairs", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True
