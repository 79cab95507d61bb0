"""Pictures of a sweep, as SVG to be put into a page."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ppo_lightning.io import own_ids
from ppo_lightning.studies.compare import Comparison, Row

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Of Okabe and Ito, which people with any colour vision tell apart."""

_DASHES = ("-", "--", ":", "-.")
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_MOST_CURVES = 8
_LONGEST_LABEL = 44


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One picture.

    Args:
        svg: Without prologue, to stand inside a page.
        caption: Below it.
        told: What is to be seen, for those who do not see it.
    """

    svg: str
    caption: str
    told: str


def plots_of(comparison: Comparison) -> list[Plot] | None:
    """Draw what there is to draw.

    Returns:
        None without matplotlib.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return None
    drawn: list[Plot] = []
    if any(row.metric is not None for row in comparison.rows):
        drawn.append(_by_arm(comparison))
    groups = curve_groups(comparison)
    if any(run.curve for _, rows in groups for row in rows for run in row.runs):
        drawn.append(_curves(comparison, groups))
    if sum(row.metric is not None and row.kl is not None for row in comparison.rows) > 1:
        drawn.append(_against_kl(comparison))
    return drawn


def curve_groups(comparison: Comparison) -> list[tuple[str, list[Row]]]:
    """Return which arms share a picture of their curves, each with the base in front.

    One setting changed at a time gives one picture a setting; otherwise the best arms share one.
    """
    if not comparison.rows:
        return []
    base, *others = comparison.rows
    by_setting: dict[str, list[Row]] = defaultdict(list)
    for row in others:
        by_setting[next(iter(row.arm.settings), "") if len(row.arm.settings) == 1 else ""].append(
            row
        )
    groups = []
    for key, rows in by_setting.items():
        best = sorted(rows, key=_rank)
        shown = {row.arm.name for row in best[-_MOST_CURVES:]}
        groups.append((key, [base, *(row for row in rows if row.arm.name in shown)]))
    return groups or [("", [base])]


def _rank(row: Row) -> float:
    mean = math.nan if row.metric is None else row.metric.mean
    return -math.inf if math.isnan(mean) else mean


# ---------------------------------------------------------------------- the pictures


def _by_arm(comparison: Comparison) -> Plot:
    rows = [row for row in comparison.rows if row.metric is not None]

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for place, row in enumerate(rows):
            mean = row.metric
            assert mean is not None  # mypy does not see the line above
            if mean.low is not None:
                axes.plot([mean.low, mean.high], [place, place], color=_COLOURS[0], linewidth=2)
            axes.plot([mean.mean], [place], "o", color=_COLOURS[0])
        if rows and rows[0] is comparison.rows[0] and rows[0].metric is not None:
            axes.axvline(rows[0].metric.mean, color="grey", linewidth=1, linestyle="--")
        axes.set_yticks(range(len(rows)), [_cut(row.arm.label) for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel(_cut(comparison.metric))

    told = "; ".join(f"{row.arm.label}: {row.metric.mean:.4g}" for row in rows if row.metric)
    return Plot(
        svg=_svg(draw, (8, 1.2 + 0.35 * len(rows)), "arms"),
        caption=f"{comparison.metric} at the end of the runs, mean over seeds with its 95 % "
        "interval; the dashed line is the base.",
        told=f"{comparison.metric} of each arm. {told}.",
    )


def _curves(comparison: Comparison, groups: Sequence[tuple[str, Sequence[Row]]]) -> Plot:
    from matplotlib.ticker import MaxNLocator

    def draw(figure: Any) -> None:
        grid = figure.subplots(len(groups), 1, squeeze=False)
        for axes, (key, rows) in zip(grid[:, 0], groups, strict=True):
            for number, row in enumerate(rows):
                points = mean_curve(row)
                axes.plot(
                    [iteration for iteration, _ in points],
                    [value for _, value in points],
                    color=_COLOURS[number % len(_COLOURS)],
                    linestyle=_DASHES[number % len(_DASHES)],
                    marker=_MARKS[number % len(_MARKS)],
                    markersize=4,
                    label=_cut(row.arm.label),
                )
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set(xlabel="iteration", ylabel=_cut(comparison.metric), title=_cut(key))
            axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)

    names = "; ".join(row.arm.label for _, rows in groups for row in rows)
    return Plot(
        svg=_svg(draw, (8, 3.2 * len(groups)), "curves"),
        caption=f"{comparison.metric} over the iterations, mean over the seeds that got there.",
        told=f"Curves of {comparison.metric} over the iterations, of the arms {names}.",
    )


def _against_kl(comparison: Comparison) -> Plot:
    rows = [row for row in comparison.rows if row.metric is not None and row.kl is not None]

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for number, row in enumerate(rows):
            assert row.metric is not None
            axes.plot(
                [row.kl],
                [row.metric.mean],
                _MARKS[number % len(_MARKS)],
                color=_COLOURS[number % len(_COLOURS)],
                label=_cut(row.arm.label),
            )
        axes.set(xlabel="KL to the reference, nats per response", ylabel=_cut(comparison.metric))
        if len(rows) <= 3 * _MOST_CURVES:
            axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)

    told = "; ".join(
        f"{row.arm.label}: KL {row.kl:.3g}, {row.metric.mean:.4g}" for row in rows if row.metric
    )
    return Plot(
        svg=_svg(draw, (8, max(4.0, 0.24 * min(len(rows), 3 * _MOST_CURVES))), "kl"),
        caption=f"{comparison.metric} against what it cost in KL, both at the end of the runs.",
        told=f"{comparison.metric} against KL of each arm. {told}.",
    )


def mean_curve(row: Row) -> list[tuple[int, float]]:
    """Return the mean over an arm's runs at each iteration that one of them has measured."""
    values: dict[int, list[float]] = defaultdict(list)
    for run in row.runs:
        for iteration, value in run.curve:
            values[iteration].append(value)
    return [(iteration, fmean(found)) for iteration, found in sorted(values.items())]


def _svg(draw: Callable[[Any], None], size: tuple[float, float], name: str) -> str:
    """Draw into a picture whose names no other picture of the page has."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",  # letters stay letters, for those who search or listen
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "text.parse_math": False,  # names of metrics and values are no formulas
    }
    with rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return own_ids(text[text.index("<svg") :].strip(), name)


def _cut(label: str) -> str:
    """Shorten a label that would leave no room for the picture; the table has it whole."""
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"
