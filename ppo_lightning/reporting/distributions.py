"""How scores and lengths were distributed over time, from what a run keeps of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_lightning.errors import DataError
from ppo_lightning.io import read_jsonl
from ppo_lightning.reporting.columns import ITERATION
from ppo_lightning.reporting.figures import HeatMap

HISTOGRAMS = "histograms.jsonl"
_BINS = 40
_MOST_COLUMNS = 500
_LARGEST = 1e100  # of an edge; NaN is not below it either
_TAIL = 0.002  # share of all responses, at either end, that may lie beyond the picture


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts of one iteration.

    Args:
        iteration: Its number.
        edges: Of the bins, rising; one more than there are counts.
        counts: Numbers in each.
    """

    iteration: int
    edges: Sequence[float]
    counts: Sequence[float]


def score_map(folder: Path) -> HeatMap | None:
    """Return the distribution of the raw scores, where the run has kept histograms."""
    found = _of_file(folder / HISTOGRAMS, "rollout/raw_score") or list(
        _of_reports(folder / "rewards")
    )
    return _heat_map(found, key="score-histogram", title="Raw scores: distribution", unit="reward")


def length_map(folder: Path) -> HeatMap | None:
    """Return the distribution of the lengths, where the run has kept histograms."""
    found = _of_file(folder / HISTOGRAMS, "rollout/response_length")
    return _heat_map(found, key="length-histogram", title="Lengths: distribution", unit="tokens")


# ---------------------------------------------------------------------- reading


def _of_file(path: Path, name: str) -> list[Histogram]:
    """Return the histograms of one quantity; of an iteration that came again the latest."""
    if not path.is_file():
        return []
    bad: list[DataError] = []
    found: dict[int, Histogram] = {}
    for _, row in read_jsonl(path, on_bad=bad.append):
        histogram = _histogram(row.get(ITERATION), row.get(name))
        if histogram is not None:
            found[histogram.iteration] = histogram
    return [found[i] for i in sorted(found)]


def _of_reports(folder: Path) -> Iterator[Histogram]:
    for path in sorted(folder.glob("iteration_*.json"), key=lambda p: (len(p.name), p.name)):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            bins = report["raw_score"].get("histogram")
            histogram = _histogram(report["iteration"], bins)
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            continue  # a file that is cut off tells nothing; the others do
        if histogram is not None:
            yield histogram


def _histogram(iteration: Any, found: Any) -> Histogram | None:
    if not isinstance(iteration, int | float) or not isinstance(found, Mapping):
        return None
    edges: Any = found.get("edges")
    counts: Any = found.get("counts")
    if not (_is_numbers(edges) and _is_numbers(counts) and len(edges) == len(counts) + 1):
        return None
    if list(edges) != sorted(edges):
        return None
    return Histogram(iteration=int(iteration), edges=edges, counts=counts)


def _is_numbers(found: Any) -> bool:
    return (
        isinstance(found, list)
        and bool(found)
        and all(isinstance(x, int | float) and abs(x) <= _LARGEST for x in found)
    )


# ---------------------------------------------------------------------- one picture


def _heat_map(
    histograms: Sequence[Histogram], *, key: str, title: str, unit: str
) -> HeatMap | None:
    bounds = _bounds(histograms)
    if bounds is None:
        return None
    step = math.ceil(len(histograms) / _MOST_COLUMNS)
    shown = histograms[::step]
    low, high = bounds
    bins = _bins(shown, high - low)
    edges = [low + (high - low) * i / bins for i in range(bins + 1)]
    return HeatMap(
        key=key,
        title=title,
        text="Share of the responses of a buffer in each bin, light where there are most. "
        f"The first buffer lies around {_middle(shown[0]):.4g}, the last around "
        f"{_middle(shown[-1]):.4g}.",
        x=[h.iteration for h in shown],
        edges=edges,
        cells=[_shares(h, edges) for h in shown],
        y_label=unit,
        value_label="share of responses",
    )


def _bounds(histograms: Sequence[Histogram]) -> tuple[float, float] | None:
    """Return where all but a few of all responses lie: one outlier would squeeze the rest."""
    parts = sorted(
        (low, high, count)
        for h in histograms
        for low, high, count in zip(h.edges[:-1], h.edges[1:], h.counts, strict=True)
        if count > 0
    )
    total = sum(count for *_, count in parts)
    if not total:
        return None
    kept, below = [], 0.0
    for low, high, count in parts:
        if _TAIL * total < below + count and below < (1 - _TAIL) * total:
            kept.append((low, high))
        below += count
    kept = kept or [(low, high) for low, high, _ in parts]
    low, high = min(low for low, _ in kept), max(high for _, high in kept)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _bins(histograms: Sequence[Histogram], width: float) -> int:
    """Return how many bins to draw: none finer than those that were counted."""
    parts = (b - a for h in histograms for a, b in zip(h.edges[:-1], h.edges[1:], strict=True))
    narrowest = min((part for part in parts if part > 0), default=0.0)
    return min(max(round(width / narrowest), 1), _BINS) if narrowest else _BINS


def _shares(histogram: Histogram, edges: Sequence[float]) -> list[float]:
    """Spread the counts over other bins, evenly within their own."""
    total = sum(histogram.counts) or 1.0
    shares = [0.0] * (len(edges) - 1)
    width = edges[1] - edges[0]
    bins = zip(histogram.edges[:-1], histogram.edges[1:], histogram.counts, strict=True)
    for low, high, count in bins:
        first = min(max(int((low - edges[0]) / width), 0), len(shares) - 1)
        last = min(max(math.ceil((high - edges[0]) / width) - 1, first), len(shares) - 1)
        for i in range(first, last + 1):
            inside = min(high, edges[i + 1]) - max(low, edges[i])
            part = inside / (high - low) if high > low else 1.0
            shares[i] += max(part, 0.0) * count / total
    return shares


def _middle(histogram: Histogram) -> float:
    """Return the mean, as far as bins tell."""
    bins = zip(histogram.edges[:-1], histogram.edges[1:], histogram.counts, strict=True)
    total = sum(histogram.counts) or 1.0
    return sum((low + high) / 2 * count for low, high, count in bins) / total
