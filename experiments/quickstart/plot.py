"""Draw one run: reward, judge, KL and entropy over its iterations.

    python experiments/quickstart/plot.py runs/quickstart/seed_0 docs/assets/quickstart.png

The curves are those of the training rollouts, from ``metrics.jsonl``; the points are the held-out
answers of the validations, with the reference's as a dashed line. Needs matplotlib, of the extra
``docs``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppo_lightning.metrics import IterationStats, read_metrics

Curve = Callable[[IterationStats], float | None]

PANELS: tuple[tuple[str, Curve | None, str], ...] = (
    ("proxy reward, −1 to 1", lambda stats: stats.raw_score_mean, "score"),
    ("judge's probability of praise", None, "gold"),
    ("KL to the reference, nats per response", lambda stats: stats.kl_ref, "kl_ref"),
    ("entropy, nats per token", lambda stats: stats.entropy, "entropy"),
)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder with metrics.jsonl")
    parser.add_argument("picture", type=Path, help="file to write, .png or .svg")
    return parser.parse_args()


def held_out(
    stats: Sequence[IterationStats], name: str
) -> tuple[list[tuple[int, float]], float | None]:
    """(iteration and value of each validation, the reference's value)."""
    points, reference = [], None
    for one in stats:
        answers = one.val_sampled or one.val_greedy
        value = getattr(answers, name, None)
        if value is not None:
            points.append((one.iteration + 1, value))
            reference = getattr(one.val_reference, name, None)
    return points, reference


def draw(stats: Sequence[IterationStats], picture: Path) -> None:
    """Write the picture of a run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(3.4 * len(PANELS), 2.8))
    for axis, (title, curve, name) in zip(axes, PANELS, strict=True):
        panel(axis, stats, title, curve, name)
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def panel(
    axis: Any, stats: Sequence[IterationStats], title: str, curve: Curve | None, name: str
) -> None:
    """Draw one number over the iterations."""
    if curve is not None:
        numbers = [(one.iteration + 1, curve(one)) for one in stats]
        axis.plot(*zip(*numbers, strict=True), color="tab:blue", label="training rollouts")
    points, reference = held_out(stats, name)
    if points:
        axis.plot(*zip(*points, strict=True), "o", color="tab:orange", label="held-out prompts")
    if reference is not None:
        axis.axhline(reference, color="grey", linestyle="--", linewidth=1, label="reference")
    axis.set_xlim(0.5, len(stats) + 0.5)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("iteration", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)


def main() -> None:
    """Draw the run."""
    given = parse()
    draw(read_metrics(given.run / "metrics.jsonl"), given.picture)


if __name__ == "__main__":
    main()
