"""What the plots of a report show, before anything is drawn: numbers, names and words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ppo_lightning.reporting.load import Run

TABLE_ROWS = 40
"""Rows of the table beside a plot: evenly chosen where there are more."""

_ENTROPY_AT = re.compile(r"rollout/entropy_at/(\d+)(?:-(\d+|up))?/mean")
_Item = TypeVar("_Item")
_LARGEST = 1e100  # beyond any number in float32; axes overflow well above it
_LOG_RANGE = 200.0  # largest over smallest beyond which an axis is logarithmic


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a plot.

    Args:
        label: What it is.
        x: Rising, or the course of a frontier.
        y: As many.
        low: Lower edge of a band around it, if there is one.
        high: Upper edge.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A plot of lines.

    Args:
        key: Its anchor.
        title: Heading.
        text: What it shows, for those who do not see it too.
        lines: At least one.
        y_label: Unit.
        x_label: The same of the other axis.
        over_time: Whether x is the iteration.
        logarithmic: Whether y is drawn so.
        healthy: Lowest and highest healthy value, each may be None.
    """

    key: str
    title: str
    text: str
    lines: Sequence[Line]
    y_label: str
    x_label: str = "iteration"
    over_time: bool = True
    logarithmic: bool = False
    healthy: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """A plot of a number over iterations and something else.

    Args:
        key: Its anchor.
        title: Heading.
        text: What it shows.
        x: Iteration of each column.
        edges: Of the cells upwards, one more than there are rows.
        cells: A row for each column of the picture, NaN where nothing was measured.
        y_label: What goes upwards.
        value_label: What the colour is.
    """

    key: str
    title: str
    text: str
    x: Sequence[int]
    edges: Sequence[float]
    cells: Sequence[Sequence[float]]
    y_label: str
    value_label: str


@dataclass(frozen=True)
class _Wanted:
    """A chart over time, as logged names with labels."""

    key: str
    title: str
    unit: str
    names: tuple[tuple[str, str], ...]
    healthy: tuple[float | None, float | None] = (None, None)
    logarithmic: bool = False


_CHARTS = (
    _Wanted(
        "scores",
        "Scores",
        "reward",
        (("rollout/raw_score_mean", "raw score"), ("rollout/score_mean", "score in training")),
    ),
    _Wanted(
        "gold",
        "Held-out scores",
        "score",
        (
            ("val/sampled/gold", "gold, sampled"),
            ("val/greedy/gold", "gold, greedy"),
            ("val/sampled/score", "score, sampled"),
            ("val/greedy/score", "score, greedy"),
        ),
    ),
    _Wanted(
        "kl-reference",
        "KL to the reference",
        "nats per response",
        (("rollout/kl_ref", "of the buffer"), ("val/sampled/kl_ref", "of held-out answers")),
        healthy=(None, 10.0),
    ),
    _Wanted(
        "kl-update",
        "KL of one update, and clip fraction",
        "nats per token; share",
        (
            ("update/kl_old", "KL(old‖new)"),
            ("update/clip_fraction", "clip fraction"),
            ("update/clip_active_fraction", "gradient removed"),
        ),
    ),
    _Wanted("entropy", "Entropy", "nats per token", (("rollout/entropy", "of the policy"),)),
    _Wanted(
        "length",
        "Length of responses",
        "tokens",
        (("rollout/response_length_mean", "mean"), ("rollout/response_length_max", "longest")),
    ),
    _Wanted(
        "texts-shares",
        "Truncated, repeated, opening alike",
        "share",
        (
            ("rollout/truncated_share", "truncated"),
            ("rollout/repeated_bigrams", "repeated bigrams"),
            ("rollout/opening_share", "same opening"),
        ),
    ),
    _Wanted(
        "explained-variance",
        "Explained variance of the critic",
        "share of variance",
        (("rollout/explained_variance", "explained variance"),),
        healthy=(-0.3, None),
    ),
    _Wanted(
        "value-loss",
        "Value loss",
        "reward²",
        (("update/value_loss", "value loss"),),
        logarithmic=True,
    ),
    _Wanted(
        "gradients",
        "Largest gradient norms",
        "2-norm before clipping",
        (
            ("update/grad_norm_actor_max", "actor"),
            ("update/grad_norm_critic_max", "critic"),
            ("update/grad_norm_actor", "actor, mean"),
            ("update/grad_norm_critic", "critic, mean"),
        ),
        logarithmic=True,
    ),
    _Wanted("beta", "β in force", "reward per nat", (("rollout/kl_coef", "β"),)),
    _Wanted(
        "rates",
        "Learning rates",
        "per step",
        (("update/lr_actor", "actor"), ("update/lr_critic", "critic")),
        logarithmic=True,
    ),
)


def charts(run: Run) -> list[Chart]:
    """Return the charts over time of what was measured."""
    found = (_chart(run, wanted) for wanted in _CHARTS)
    return [chart for chart in found if chart is not None]


def _chart(run: Run, wanted: _Wanted) -> Chart | None:
    lines: list[Line] = []
    for name, label in wanted.names:
        line = _line(run, name, label)
        if line is not None and all((line.x, line.y) != (other.x, other.y) for other in lines):
            lines.append(line)
    if not lines:
        return None
    return Chart(
        key=wanted.key,
        title=wanted.title,
        text=" ".join(_course(line) for line in lines),
        lines=lines,
        y_label=wanted.unit,
        logarithmic=wanted.logarithmic and _spans_decades(lines),
        healthy=wanted.healthy,
    )


def _line(run: Run, name: str, label: str) -> Line | None:
    x, y = _series(run, name)
    if not x:
        return None
    spread = dict(zip(*_series(run, name.replace("_mean", "_std")), strict=True))
    if not name.endswith("score_mean") or not spread:
        return Line(label=label, x=x, y=y)
    band = [spread.get(i, 0.0) for i in x]
    low = [value - b for value, b in zip(y, band, strict=True)]
    high = [value + b for value, b in zip(y, band, strict=True)]
    return Line(label=f"{label} ± spread", x=x, y=y, low=low, high=high)


def _series(run: Run, name: str) -> tuple[list[int], list[float]]:
    """Return what was measured of a name, without what no axis can hold."""
    points = [(i, y) for i, y in zip(*run.series(name), strict=True) if abs(y) <= _LARGEST]
    return [i for i, _ in points], [y for _, y in points]


def _spans_decades(lines: Sequence[Line]) -> bool:
    values = [y for line in lines for y in line.y]
    low = min(values)
    return low > 0 and max(values) / low > _LOG_RANGE


def _course(line: Line) -> str:
    """Say where a line begins and ends, and its extremes."""
    low, high = min(line.y), max(line.y)
    if low == high:
        return f"{_sentence(line.label)}: {low:.4g} throughout."
    return (
        f"{_sentence(line.label)}: from {line.y[0]:.4g} to {line.y[-1]:.4g}, lowest {low:.4g} in "
        f"iteration {line.x[line.y.index(low)]:g}, highest {high:.4g} in "
        f"{line.x[line.y.index(high)]:g}."
    )


def _sentence(label: str) -> str:
    """Begin with a capital, but leave Greek letters as the symbols that they are."""
    return label[:1].upper() + label[1:] if label.isascii() or label[0].isascii() else label


# ---------------------------------------------------------------------- the others


def quantile_bands(run: Run) -> Chart | None:
    """Return how the raw scores are spread over time, from their quantiles if they are logged."""
    lines = []
    middle = dict(zip(*_series(run, "rollout/raw_score_median"), strict=True))
    for low, high, label in (("q05", "q95", "5 % to 95 %"), ("q25", "q75", "25 % to 75 %")):
        lows = dict(zip(*_series(run, f"rollout/raw_score_{low}"), strict=True))
        highs = dict(zip(*_series(run, f"rollout/raw_score_{high}"), strict=True))
        x = [i for i in middle if i in lows and i in highs]
        if x:
            band = {"low": [lows[i] for i in x], "high": [highs[i] for i in x]}
            lines.append(Line(label=label, x=x, y=[middle[i] for i in x], **band))
    if not lines:
        return None
    return Chart(
        key="score-quantiles",
        title="Raw scores: quantiles",
        text=f"Bands of the raw scores around their median. {_course(lines[0])}",
        lines=lines,
        y_label="reward",
    )


def frontier(run: Run) -> Chart | None:
    """Return what each nat of KL to the reference has bought: proxy and gold against KL."""
    kl = dict(zip(*_series(run, "rollout/kl_ref"), strict=True))
    ways = (
        ("rollout/raw_score_mean", "proxy: raw score"),
        ("val/sampled/gold", "gold, sampled"),
        ("val/greedy/gold", "gold, greedy"),
    )
    lines = []
    for name, label in ways:
        points = [(kl[i], y) for i, y in zip(*_series(run, name), strict=True) if i in kl]
        if len(points) > 1:
            lines.append(Line(label=label, x=[p[0] for p in points], y=[p[1] for p in points]))
    if not lines:
        return None
    return Chart(
        key="frontier",
        title="What KL has bought",
        text="Scores against KL to the reference, in the order of the iterations; the ring is the "
        f"first one, the square the last. {_ends(lines)}",
        lines=lines,
        y_label="score",
        x_label="KL to the reference, nats per response",
        over_time=False,
    )


def _ends(lines: Sequence[Line]) -> str:
    return " ".join(
        f"{_sentence(line.label)}: {line.y[0]:.4g} at {line.x[0]:.4g} nats, "
        f"{line.y[-1]:.4g} at {line.x[-1]:.4g} nats."
        for line in lines
    )


def entropy_by_position(run: Run) -> HeatMap | None:
    """Return the entropy over positions in the response, where that is logged."""
    names: dict[tuple[int, int], str] = {}
    for name in dict.fromkeys(name for values in run.logged for name in values):
        match = _ENTROPY_AT.fullmatch(name)
        if match:
            names[_places(match[1], match[2])] = name
    if not names:
        return None
    parts = sorted(names)
    at = [row.iteration for row in run.rows]
    cells = [[values.get(names[part], math.nan) for part in parts] for values in run.logged]
    edges = [float(part[0]) for part in parts] + [float(parts[-1][1])]
    return HeatMap(
        key="entropy-by-position",
        title="Entropy by position in the response",
        text="A dark stretch is where the policy always says the same.",
        x=at,
        edges=edges,
        cells=cells,
        y_label="position, tokens",
        value_label="nats per token",
    )


def _places(first: str, last: str | None) -> tuple[int, int]:
    """Return where a bin of places begins, and where the next one does."""
    start = int(first)
    if last == "up":
        return start, 2 * start
    return start, int(last or first) + 1


# ---------------------------------------------------------------------- tables


@dataclass(frozen=True, kw_only=True)
class Table:
    """The numbers of a plot.

    Args:
        caption: What they are, and which were left out.
        head: Names of the columns.
        rows: Cells as text.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def table_of(plot: Chart | HeatMap) -> Table:
    """Return the numbers of a plot, so many rows at most."""
    return _heat_table(plot) if isinstance(plot, HeatMap) else _chart_table(plot)


def _chart_table(chart: Chart) -> Table:
    if not chart.over_time:
        rows = [
            [line.label, f"{x:.4g}", f"{y:.4g}"]
            for line in chart.lines
            for x, y in _thinned(list(zip(line.x, line.y, strict=True)))
        ]
        return Table(
            caption=_caption(chart.title, sum(len(line.x) for line in chart.lines), len(rows)),
            head=["", chart.x_label, chart.y_label],
            rows=rows,
        )
    values = [dict(zip(line.x, line.y, strict=True)) for line in chart.lines]
    bands = [dict(zip(li.x, zip(li.low, li.high, strict=True), strict=False)) for li in chart.lines]
    at = sorted({x for line in chart.lines for x in line.x})
    rows = [
        [f"{x:g}", *(_cell(v.get(x), b.get(x)) for v, b in zip(values, bands, strict=True))]
        for x in _thinned(at)
    ]
    head = [chart.x_label, *(line.label for line in chart.lines)]
    return Table(caption=_caption(chart.title, len(at), len(rows)), head=head, rows=rows)


def _heat_table(plot: HeatMap) -> Table:
    parts = list(zip(plot.edges[:-1], plot.edges[1:], strict=True))
    columns = _thinned(list(range(len(parts))), 10)
    rows = [
        [str(x), *(_cell(cells[c]) for c in columns)]
        for x, cells in _thinned(list(zip(plot.x, plot.cells, strict=True)))
    ]
    head = ["iteration", *(f"{parts[c][0]:.4g} to {parts[c][1]:.4g}" for c in columns)]
    title = f"{plot.title}: {plot.value_label}"
    return Table(caption=_caption(title, len(plot.x), len(rows)), head=head, rows=rows)


def _caption(title: str, there: int, shown: int) -> str:
    return title if shown == there else f"{title}; {shown} of {there} rows"


def _cell(value: float | None, band: tuple[float, float] | None = None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.4g}" if band is None else f"{value:.4g} ({band[0]:.4g} to {band[1]:.4g})"


def _thinned(items: Sequence[_Item], most: int = TABLE_ROWS) -> list[_Item]:
    """Return at most so many items, evenly chosen, the last one always."""
    if len(items) <= most:
        return list(items)
    step = (len(items) - 1) / (most - 1)
    return [items[round(i * step)] for i in range(most)]
