"""Time of an iteration against rollout size, response length and vocabulary, in steps of 2.

    python experiments/speed/growth.py                                # measure, print, draw
    python experiments/speed/growth.py --axes vocab --rounds 1 --threads 1
    python experiments/speed/growth.py --draw-only

The work is that of size S with one number changed, every response as long as it may be. Each point
is a process of its own and goes to ``--out`` at once; a point that is there is not measured again.
The exponent is the slope of log(time) over log(value), by least squares over all points of an axis,
each the median of its rounds, and over the upper three, where fixed costs weigh least: 1 is linear.
Times are wall time on two threads on a quiet machine, else processor time of one thread. Needs
matplotlib, of the extra ``docs``, to draw.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments.speed import ppo, rows
from experiments.speed.sizes import SIZES, Size

ROOT = Path(__file__).resolve().parents[2]

AXES: dict[str, tuple[int, ...]] = {
    "rollout": (32, 64, 128, 256, 512),
    "response_len": (32, 64, 128, 256, 512),
    "vocab": (4096, 8192, 16384, 32768, 65536),
}
"""Fields of ``Size`` and their values."""

TITLES = {
    "rollout": "responses of an iteration",
    "response_len": "tokens of a response",
    "vocab": "tokens of the vocabulary",
}
UPPER = 3
STAGES = {"total": "iteration", "gen": "sampling", "fwd": "scoring", "update": "update"}


@dataclass(frozen=True)
class Point:
    """One process.

    Args:
        axis: What is changed.
        value: To what.
        round: Number of the repetition.
        threads: Of the process.
    """

    axis: str
    value: int
    round: int
    threads: int


def size_of(axis: str, value: int) -> Size:
    """Return size S with one number changed."""
    return replace(SIZES["S"], **{axis: value})


def planned(given: Any) -> Iterator[Point]:
    """All points; neighbours come one after the other, so that they see the same machine."""
    for number in range(given.rounds):
        for axis in given.axes:
            for value in given.values or AXES[axis]:
                yield Point(axis, value, number, given.threads)


def make(point: Point, iterations: int) -> dict[str, Any]:
    """Measure one point in a process of its own."""
    command = [sys.executable, __file__, "--point", point.axis, str(point.value)]
    command += ["--iters", str(iterations), "--threads", str(point.threads)]
    env = os.environ | {"OMP_NUM_THREADS": str(point.threads)}
    finished = subprocess.run(command, env=env, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"{point} failed:\n{finished.stderr[-2000:]}")
    return dict(json.loads(finished.stdout.splitlines()[-1]))


def exponents(times: Mapping[int, float]) -> tuple[float, float]:
    """Fit time = c · value^k over all values, and over the upper few.

    Args:
        times: Seconds by value, two at least.
    """
    values = sorted(times)
    x = np.log(values)
    y = np.log([times[value] for value in values])
    return float(np.polyfit(x, y, 1)[0]), float(np.polyfit(x[-UPPER:], y[-UPPER:], 1)[0])


def medians(
    results: Mapping[Point, Mapping[str, Any]], axis: str, threads: int, stage: str = "total"
) -> dict[int, float]:
    """Return the median over the rounds of one axis, by value."""
    found: dict[int, list[float]] = {}
    for point, result in results.items():
        if (point.axis, point.threads) == (axis, threads):
            key = "s_per_iter" if threads > 1 else "cpu_s_per_iter"
            found.setdefault(point.value, []).append(float(result[key][stage]))
    return {value: statistics.median(found[value]) for value in sorted(found)}


def report(results: Mapping[Point, Mapping[str, Any]], given: Any) -> str:
    """Write times and exponents as a Markdown table."""
    lines = ["| axis | stage | seconds | exponent | of the upper 3 |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for axis in given.axes:
        for stage, name in STAGES.items():
            times = medians(results, axis, given.threads, stage)
            if len(times) > 1 and min(times.values()) > 0:
                whole, upper = exponents(times)
                said = ", ".join(f"{value}: {spent:.3g}" for value, spent in times.items())
                lines.append(f"| {axis} | {name} | {said} | {whole:.2f} | {upper:.2f} |")
    return "\n".join(lines)


def draw(results: Mapping[Point, Mapping[str, Any]], given: Any) -> None:
    """Write the picture: one panel an axis, both scales logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(given.axes), figsize=(4 * len(given.axes), 3.2))
    for panel, axis in zip(np.atleast_1d(panels), given.axes, strict=True):
        _draw_axis(panel, results, axis, given.threads)
    np.atleast_1d(panels)[0].set_ylabel(
        "seconds of an iteration" if given.threads > 1 else "processor seconds of an iteration",
        fontsize=8,
    )
    figure.tight_layout()
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.picture, dpi=110)


def _draw_axis(panel: Any, results: Any, axis: str, threads: int) -> None:
    for stage, name in STAGES.items():
        times = medians(results, axis, threads, stage)
        style = "o-" if stage == "total" else ".--"
        label = f"{name}, exponent {exponents(times)[0]:.2f}" if len(times) > 1 else name
        panel.plot(list(times), list(times.values()), style, label=label, linewidth=1)
    total = medians(results, axis, threads)
    if total:
        first = next(iter(total))
        linear = [total[first] * value / first for value in total]
        panel.plot(list(total), linear, color="grey", linestyle=":", linewidth=1, label="linear")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(TITLES[axis], fontsize=9)
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=7)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, print the exponents, draw."""
    given = parser().parse_args(arguments)
    if given.point:
        axis, value = given.point
        options = ppo.options(size="S", mode="fixed", iters=given.iters, threads=given.threads)
        ppo.measure(size_of(axis, int(value)), options)
        return
    wanted = () if given.draw_only else planned(given)
    results = rows.complete(given.out, Point, wanted, lambda point: make(point, given.iters))
    print(report(results, given))
    if given.picture is not None:
        draw(results, given)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    made.add_argument("--values", nargs="+", type=int, default=None, help="in the place of all")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--iters", type=int, default=3, help="the first is not counted")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--out", type=Path, default=ROOT / "runs" / "speed" / "growth.jsonl")
    made.add_argument("--picture", type=Path, default=ROOT / "docs" / "assets" / "growth.png")
    made.add_argument("--draw-only", action="store_true", help="measure nothing")
    made.add_argument("--point", nargs=2, default=None, help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    main()
