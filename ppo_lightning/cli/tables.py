"""Scores as a small table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping


def scores_table(results: Mapping[str, float]) -> str:
    """Lay out logged numbers: a row for each quantity, a column for each way of answering.

    Args:
        results: By name: ``test/greedy/score``, ``val/reference/sampled/gold``; names without two
            slashes get a row of their own, with the number in the first column.
    """
    cells: dict[str, dict[str, float]] = {}
    for name, value in results.items():
        head, _, quantity = name.rpartition("/")
        column = head.partition("/")[2]
        cells.setdefault(quantity if column else name, {})[column] = value
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    width = max((len(name) for name in cells), default=0)
    widths = [max(len(column), 9) for column in columns]
    lines = [" ".join([" " * width, *(f"{c:>{w}}" for c, w in zip(columns, widths, strict=True))])]
    for name, row in cells.items():
        numbers = (
            f"{row[c]:>{w}.4g}" if c in row else " " * w
            for c, w in zip(columns, widths, strict=True)
        )
        lines.append(" ".join([f"{name:<{width}}", *numbers]).rstrip())
    return "\n".join(lines)
