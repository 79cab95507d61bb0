"""Drawing with matplotlib, which is loaded when the first plot is drawn."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ppo_lightning.diagnostics import Severity
from ppo_lightning.errors import ConfigError
from ppo_lightning.reporting.examination import Examination, Spell
from ppo_lightning.reporting.figures import Chart, HeatMap, Line
from ppo_lightning.reporting.svg import PLACEHOLDERS, page_svg

WIDTH = 9.0
"""Inches, of 72 units of the picture; it is scaled to the page."""

_MOST_LETTERS = 24  # of a name beside a lane
_MOST_BARS = 100  # of one illness and severity
_MARGINS = {"left": 0.085, "right": 0.985}  # the same for all, so that iterations stand in columns
_COLOURS = [PLACEHOLDERS[f"line-{i}"] for i in range(1, 5)]
_DASHES = ("-", (0, (6, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)))  # lines differ without colour too

_RC: Any = {
    "svg.fonttype": "none",  # text stays text: it can be found, read aloud and enlarged
    "svg.hashsalt": "ppo-lightning",
    "text.parse_math": False,  # names of a log are no formulas
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.edgecolor": PLACEHOLDERS["muted"],
    "axes.labelcolor": PLACEHOLDERS["ink"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "grid.color": PLACEHOLDERS["rule"],
    "grid.linewidth": 0.6,
    "text.color": PLACEHOLDERS["ink"],
    "xtick.color": PLACEHOLDERS["muted"],
    "ytick.color": PLACEHOLDERS["muted"],
    "xtick.labelcolor": PLACEHOLDERS["ink"],
    "ytick.labelcolor": PLACEHOLDERS["ink"],
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "path.simplify": True,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


class Stretch(NamedTuple):
    """Iterations of an illness, as one bar."""

    illness: str
    severity: Severity
    since: int
    last: int


def require_matplotlib() -> None:
    """Raise what to install, if it is not there.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "`--html` draws with matplotlib, which is not installed: "
            "`pip install 'ppo-lightning[report]'`."
        ) from error


def draw_chart(chart: Chart, examination: Examination) -> str:
    """Return a chart as SVG; over time with stretches of illness behind it."""
    with _figure(height=2.4) as (figure, axes):
        if chart.over_time:
            _draw_spells(axes, examination)
            _draw_actions(axes, examination)
            _set_iterations(axes, examination)
        for line, colour, dashes in zip(chart.lines, _COLOURS, _DASHES, strict=False):
            _draw_line(axes, line, colour, dashes, over_time=chart.over_time)
        _draw_healthy(axes, chart)
        if chart.logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter("")
        axes.yaxis.set_major_formatter(_plain)
        axes.set_ylabel(chart.y_label)
        axes.set_xlabel(chart.x_label)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)
        return _svg(figure, key=chart.key, title=chart.title, text=chart.text)


def draw_heat_map(plot: HeatMap, examination: Examination) -> str:
    """Return a heat map as SVG, with the picture itself as a small PNG inside."""
    import numpy as np

    with _figure(height=2.9, right=0.9) as (figure, axes):
        axes.grid(visible=False)
        half = _spacing(plot.x) / 2
        mesh = axes.imshow(
            np.array(_filled(plot), dtype=float).T,
            origin="lower",
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            vmin=0.0,  # or rounding would look like a difference
            extent=(plot.x[0] - half, plot.x[-1] + half, 0, len(plot.edges) - 1),
        )
        ticks = _edge_ticks(plot)
        axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
        axes.set_ylabel(plot.y_label)
        axes.set_xlabel("iteration")
        _set_iterations(axes, examination)
        box = axes.get_position()
        bar = figure.colorbar(mesh, cax=figure.add_axes((0.915, box.y0, 0.014, box.height)))
        bar.set_label(plot.value_label)
        bar.outline.set_visible(False)
        return _svg(figure, key=plot.key, title=plot.title, text=plot.text)


def draw_timeline(examination: Examination, text: str) -> str:
    """Return illnesses as bars, one lane each, and what was done as marks below, as SVG."""
    lanes = list(dict.fromkeys(spell.episode.illness for spell in examination.spells))
    dials = list(dict.fromkeys(change.dial for change in examination.actions))[:8]
    height = 0.9 + 0.27 * (len(lanes) + len(dials))
    with _figure(height=height, left=0.2) as (figure, axes):
        axes.grid(visible=False, axis="y")
        for stretch in merged(examination.spells, shortest=_shortest(examination)):
            _draw_bar(axes, stretch, lanes.index(stretch.illness))
        for place, dial in enumerate(dials, start=len(lanes)):
            at = _apart(
                [change.iteration for change in examination.actions if change.dial == dial],
                _shortest(examination) / 2,
            )
            axes.plot(at, [place] * len(at), "d", color=PLACEHOLDERS["action"], markersize=5)
        labels = [_label(name) for name in (*lanes, *dials)]
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlabel("iteration")
        _set_iterations(axes, examination)
        return _svg(figure, key="timeline-plot", title="Illnesses and changes", text=text)


# ---------------------------------------------------------------------- parts


@contextmanager
def _figure(
    *, height: float, left: float = _MARGINS["left"], right: float = _MARGINS["right"]
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure of its own, whatever the process draws elsewhere."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_RC):
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_subplot()
        above, below = 0.32, 0.5  # inches, for a legend and the names of the x axis
        figure.subplots_adjust(
            left=left, right=right, top=1 - above / height, bottom=below / height
        )
        yield figure, axes


def _svg(figure: Any, *, key: str, title: str, text: str) -> str:
    drawn = io.StringIO()
    with warnings.catch_warnings():
        # Its own font is there to measure text; the page's fonts draw it.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return page_svg(drawn.getvalue(), key=key, title=title, text=text)


def _set_iterations(axes: Any, examination: Examination) -> None:
    from matplotlib.ticker import MaxNLocator

    rows = examination.run.rows
    first, last = rows[0].iteration, rows[-1].iteration
    room = max((last - first) * 0.01, 0.5)
    axes.set_xlim(first - room, last + room)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))


def _draw_line(axes: Any, line: Line, colour: str, dashes: Any, *, over_time: bool) -> None:
    marker = "o" if len(line.x) < 3 else None
    axes.plot(
        line.x,
        line.y,
        color=colour,
        linestyle=dashes,
        label=line.label,
        marker=marker,
        markersize=3,
        linewidth=1.5 if len(line.x) <= 150 else 1.0,
    )
    if line.low:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
    if not over_time:
        axes.plot(line.x[0], line.y[0], "o", color=colour, fillstyle="none", markersize=8)
        axes.plot(line.x[-1], line.y[-1], "s", color=colour, markersize=7)


def _draw_healthy(axes: Any, chart: Chart) -> None:
    """Draw healthy bounds that are in sight; they must not squeeze the lines."""
    low, high = axes.get_ylim()
    for bound in chart.healthy:
        if bound is not None and low <= bound <= high:
            axes.axhline(bound, color=PLACEHOLDERS["muted"], linewidth=1, linestyle=(0, (1, 3)))


def _draw_spells(axes: Any, examination: Examination) -> None:
    for stretch in merged(examination.spells, shortest=_shortest(examination)):
        if stretch.severity == "watch":
            continue
        colour = PLACEHOLDERS[stretch.severity]
        axes.axvspan(stretch.since, stretch.last, color=colour, alpha=0.08, linewidth=0)
        axes.axvline(stretch.since, color=colour, linewidth=1.2)


def _draw_actions(axes: Any, examination: Examination) -> None:
    at = sorted({change.iteration for change in examination.actions})
    most = min(len(examination.run.rows) // 4, _MOST_BARS)
    if 0 < len(at) <= most:  # a law that acts all the time marks nothing
        for iteration in at:
            axes.axvline(
                iteration, color=PLACEHOLDERS["action"], linewidth=1, linestyle=(0, (1, 2))
            )


def _shortest(examination: Examination) -> float:
    """Iterations below which a gap between two bars is not seen."""
    rows = examination.run.rows
    return (rows[-1].iteration - rows[0].iteration) / _MOST_BARS


def _apart(at: Sequence[int], distance: float) -> list[int]:
    """Return the places that can be told from each other."""
    found: list[int] = []
    for place in sorted(at):
        if not found or place - found[-1] > distance:
            found.append(place)
    return found


def merged(spells: Sequence[Spell], *, shortest: float) -> list[Stretch]:
    """Put spells of one illness and severity together that are next to each other.

    An illness that comes and goes for thousands of iterations would be thousands of bars in each
    plot.

    Args:
        spells: By time.
        shortest: Iterations between two of them below which they are one.
    """
    found: dict[tuple[str, str], list[Stretch]] = {}
    for spell in spells:
        illness, severity = spell.episode.illness, spell.episode.severity
        own = found.setdefault((illness, severity), [])
        since, last = spell.episode.since, spell.last
        if own and since - own[-1].last < shortest:
            since, last = own[-1].since, max(last, own[-1].last)
            own.pop()
        own.append(Stretch(illness, severity, since, last))
    return [stretch for own in found.values() for stretch in own]


def _draw_bar(axes: Any, stretch: Stretch, lane: int) -> None:
    severity = stretch.severity
    hatch = {"watch": "", "ill": "///", "critical": "xxxx"}[severity]
    axes.barh(
        lane,
        max(stretch.last - stretch.since, 0.5),
        left=stretch.since,
        height=0.6,
        color="none" if severity == "watch" else PLACEHOLDERS[severity],
        edgecolor=PLACEHOLDERS["ink"] if severity != "watch" else PLACEHOLDERS["watch"],
        hatch=hatch,
        linewidth=1,
    )


def _label(name: str) -> str:
    """Return a name that fits beside its lane; fonts know no halves of surrogate pairs."""
    plain = name.replace("_", " ").encode("utf-8", "replace").decode("utf-8")
    return plain if len(plain) <= _MOST_LETTERS else f"{plain[: _MOST_LETTERS - 1]}…"


def _spacing(x: Sequence[int]) -> float:
    return (x[-1] - x[0]) / (len(x) - 1) if len(x) > 1 else 1.0


def _filled(plot: HeatMap) -> list[Sequence[float]]:
    """Return the columns at even distances: of each the latest there is."""
    if len(plot.x) < 2:
        return list(plot.cells)
    step = min(b - a for a, b in zip(plot.x[:-1], plot.x[1:], strict=True)) or 1
    count = min(round((plot.x[-1] - plot.x[0]) / step) + 1, 1000)
    places = [plot.x[0] + i * (plot.x[-1] - plot.x[0]) / (count - 1) for i in range(count)]
    columns, at = [], 0
    for place in places:
        while at + 1 < len(plot.x) and plot.x[at + 1] <= place + 1e-9:
            at += 1
        columns.append(plot.cells[at])
    return columns


def _edge_ticks(plot: HeatMap) -> list[tuple[int, str]]:
    """Return places and names of some edges: rows are of one height, whatever their width."""
    step = math.ceil((len(plot.edges) - 1) / 8)
    return [(i, f"{plot.edges[i]:.3g}") for i in range(0, len(plot.edges), step)]


_plain: Callable[[float, int], str] = lambda value, _: f"{value:g}"  # noqa: E731
