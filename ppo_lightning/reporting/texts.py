"""Texts that a run keeps: best and worst answers, before and after, what rollbacks undid.

All of it is for reading, so what is missing, cut off or of another form is left out quietly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_lightning.errors import DataError
from ppo_lightning.io import read_jsonl

MOST = 4
"""Texts of each kind."""

MAX_CHARACTERS = 2000
"""Of one text."""


@dataclass(frozen=True, kw_only=True)
class Quote:
    """One text.

    Args:
        head: Who wrote it, or what it is.
        text: The text, cut if it is long.
        numbers: Scores and KL, in words.
    """

    head: str
    text: str
    numbers: str = ""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Texts that stand side by side.

    Args:
        prompt: What was asked.
        quotes: Answers, the earliest first.
    """

    prompt: str
    quotes: Sequence[Quote]


@dataclass(frozen=True, kw_only=True)
class Extremes:
    """Best and worst responses of one time.

    Args:
        title: Of which time.
        best: From the best.
        worst: From the worst.
    """

    title: str
    best: Sequence[Pair]
    worst: Sequence[Pair]


@dataclass(frozen=True, kw_only=True)
class Undone:
    """A rollback.

    Args:
        title: Its number.
        report: What the run wrote of it.
        texts: Responses that were undone.
    """

    title: str
    report: str
    texts: Extremes | None


def extremes(folder: Path) -> Extremes | None:
    """Return the best and worst responses of the last buffer that are kept, or held-out answers."""
    for path in reversed(_by_number((folder / "rewards").glob("iteration_*.json"))):
        report = _json(path)
        best, worst = report.get("best"), report.get("worst")
        if best or worst:
            title = f"responses of iteration {report.get('iteration')}"
            return Extremes(title=title, best=_pairs(best), worst=_pairs(worst))
    for path in reversed(_samples(folder)):
        rows = [row for row in _rows(path) if _is_number(row.get("policy_score"))]
        if rows:
            rows.sort(key=lambda row: row["policy_score"])
            title = f"held-out answers of iteration {rows[0].get('iteration')}"
            return _ends([_answer(row) for row in rows], title)
    return None


def before_after(folder: Path) -> list[Pair]:
    """Return held-out answers of the start, of the first validation and of the last."""
    samples = _samples(folder)
    last = _json(folder / "summary.json").get("texts")
    rows = _mappings(last) or (list(_rows(samples[-1])) if samples else [])
    first = {_place(row): row for row in _rows(samples[0])} if len(samples) > 1 else {}
    shown: dict[Any, Pair] = {}
    for row in rows:
        if _place(row) not in shown and len(shown) < MOST:
            shown[_place(row)] = _compared(row, first.get(_place(row)))
    return list(shown.values())


def rollbacks(folder: Path) -> list[Undone]:
    """Return what was kept of each rollback."""
    found = sorted(
        (p for p in (folder / "rollbacks").glob("*") if p.name.isdecimal()),
        key=lambda p: int(p.name),
    )
    return [_undone(path) for path in found]


# ---------------------------------------------------------------------- rows of each kind


def _samples(folder: Path) -> list[Path]:
    return _by_number((folder / "samples").glob("iteration_*.jsonl"))


def _by_number(paths: Iterable[Path]) -> list[Path]:
    """Order by iteration, without files that an earlier run left under another name."""
    plain = [path for path in paths if path.stem.rpartition("_")[2].isdecimal()]
    return sorted(plain, key=lambda path: int(path.stem.rpartition("_")[2]))


def _pairs(rows: Any) -> list[Pair]:
    return [_response(row) for row in _mappings(rows)[:MOST]]


def _response(row: Mapping[str, Any]) -> Pair:
    score = row.get("raw_score", row.get("score"))
    head = "response" if row.get("iteration") is None else f"iteration {row['iteration']}"
    numbers = _numbers({"score": score, "KL": row.get("kl_ref")})
    quote = Quote(head=head, text=_cut(row.get("response")), numbers=numbers)
    return Pair(prompt=_cut(row.get("prompt")), quotes=[quote])


def _answer(row: Mapping[str, Any]) -> Pair:
    return Pair(prompt=_cut(row.get("prompt")), quotes=[_quote(row, "policy", "policy")])


def _compared(row: Mapping[str, Any], first: Mapping[str, Any] | None) -> Pair:
    quotes = [_quote(row, "reference", "before: the reference")]
    if first is not None and first.get("policy") is not None:
        head = f"iteration {first.get('iteration')}"
        quotes.append(_quote(first, "policy", head))
    at = row.get("iteration")
    head = "after: the policy" + ("" if at is None else f", iteration {at}")
    quotes.append(_quote(row, "policy", head))
    return Pair(prompt=_cut(row.get("prompt")), quotes=quotes)


def _quote(row: Mapping[str, Any], writer: str, head: str) -> Quote:
    parts = row.get(f"{writer}_components")
    numbers = {
        "score": row.get(f"{writer}_score"),
        **(dict(parts) if isinstance(parts, Mapping) else {}),
        "gold": row.get(f"{writer}_gold"),
        "KL": row.get(f"{writer}_kl_ref"),
        "tokens": row.get(f"{writer}_num_tokens"),
    }
    return Quote(head=head, text=_cut(row.get(writer)), numbers=_numbers(numbers))


def _place(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row.get("number"), row.get("mode")


def _undone(path: Path) -> Undone:
    report = path / "report.md"
    rows = [_response(row) for row in _rows(path / "texts.jsonl")]
    said = report.read_text(encoding="utf-8", errors="replace") if report.is_file() else ""
    title = f"rollback {path.name}"
    texts = _ends(rows, f"undone by {title}") if rows else None
    return Undone(title=title, report=_cut(said), texts=texts)


def _ends(rows: Sequence[Pair], title: str) -> Extremes:
    """Take both ends of a list that goes from the worst to the best."""
    half = min(MOST, math.ceil(len(rows) / 2))
    return Extremes(
        title=title, best=list(rows[::-1][:half]), worst=list(rows[: len(rows) - half][:half])
    )


# ---------------------------------------------------------------------- reading


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    bad: list[DataError] = []
    if path.is_file():
        yield from (row for _, row in read_jsonl(path, on_bad=bad.append))


def _mappings(found: Any) -> list[Mapping[str, Any]]:
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []


def _numbers(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items() if _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _cut(text: Any) -> str:
    whole = text if isinstance(text, str) else ""
    if len(whole) <= MAX_CHARACTERS:
        return whole
    return f"{whole[:MAX_CHARACTERS]}… ({len(whole) - MAX_CHARACTERS} more characters)"
