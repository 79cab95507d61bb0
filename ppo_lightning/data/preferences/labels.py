"""Pairs for people to choose from, without a sign of who wrote what, and their choices read back.

A line is ``{"key", "prompt" or "messages", "a", "b", "choice": null}``; whoever labels it sets
``choice`` to ``a``, ``b``, ``tie`` or ``skip``. Who wrote which answer, its scores and why it was
picked stand in a second file, by ``key``.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_lightning.data.preferences.candidates import Candidate
from ppo_lightning.data.records.base import Record, RecordSource, read_examples
from ppo_lightning.errors import DataError

__all__ = ["CHOICES", "Labels", "blind_pairs", "read_labels"]

CHOICES = ("a", "b", "tie", "skip")
_PROMPTS = ("prompt", "messages")


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What labelled files hold.

    Args:
        pairs: Records with ``chosen`` and ``rejected``, as ``PreferenceDataModule`` reads them.
        unlabelled: Lines whose ``choice`` is still null.
        ties: Questions on which the labels say ``tie``, or contradict each other evenly.
        skipped: Lines that were skipped.
    """

    pairs: list[dict[str, Any]]
    unlabelled: int
    ties: int
    skipped: int


def blind_pairs(
    picked: Iterable[tuple[Candidate, Sequence[str]]], *, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Make the lines to label, and the lines that say what is what.

    Which answer is ``a`` depends on seed and key alone; so does the order of the lines, in which
    the best scored do not come first. The key names the question and both answers, whoever wrote
    which.

    Args:
        picked: With the reasons; each has an answer of the SFT model.
        seed: Of the order.

    Returns:
        Both files' records, in the same order.
    """
    rows = []
    for candidate, why in picked:
        assert candidate.sft is not None
        answers = [candidate.policy, candidate.sft]
        key = hashlib.sha256(_pair_text(candidate.asked, *answers).encode()).hexdigest()[:16]
        chance = random.Random(f"{seed}:{key}")
        policy_first = chance.random() < 0.5
        a, b = answers if policy_first else answers[::-1]
        shown = {"key": key, **candidate.asked, "a": a, "b": b, "choice": None}
        aside = {
            "key": key,
            "policy": "a" if policy_first else "b",
            "why": list(why),
            "policy_score": candidate.score,
            "sft_score": candidate.sft_score,
            "policy_gold": candidate.gold,
            "sft_gold": candidate.sft_gold,
            "kl_ref": candidate.kl_ref,
            "source": candidate.source,
        }
        rows.append((chance.random(), shown, aside))
    rows.sort(key=lambda row: row[0])
    return [shown for _, shown, _ in rows], [aside for _, _, aside in rows]


def _pair_text(asked: Mapping[str, Any], one: str, other: str) -> str:
    """Return what two lines have in common that show the same pair, either way round."""
    return json.dumps([asked, *sorted([one, other])], sort_keys=True)


def read_labels(sources: Sequence[RecordSource]) -> Labels:
    """Read labelled files; several labels of one pair are a vote.

    Args:
        sources: Of ``as_records``; the same pairs may be in several, each of another person. A
            pair is told by its key and its texts: other answers under one key are another pair.

    Raises:
        DataError: A choice is none of the four, or fields are missing, by file and line; or
            nothing is labelled yet.
    """
    rows = [row for source in sources for row in read_examples(source, _labelled)]
    votes: dict[tuple[str, str], Counter[str]] = {}
    asked: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        prompt = {name: row[name] for name in _PROMPTS if name in row}
        pair = row["key"], _pair_text(prompt, row["a"], row["b"])
        first = asked.setdefault(pair, row)
        votes.setdefault(pair, Counter())[_choice_in(first, row)] += 1
    decided = [_pair(row, votes[name]) for name, row in asked.items()]
    if not any(row["choice"] for row in rows):
        names = " and ".join(source.name for source in sources)
        choices = ", ".join(f"`{choice}`" for choice in CHOICES)
        raise DataError(f"no line is labelled yet: set `choice` to one of {choices}.", path=names)
    return Labels(
        pairs=[pair for pair in decided if pair is not None],
        unlabelled=sum(row["choice"] is None for row in rows),
        ties=sum(
            _pair(asked[key], vote) is None and any(vote[c] for c in ("a", "b", "tie"))
            for key, vote in votes.items()
        ),
        skipped=sum(row["choice"] == "skip" for row in rows),
    )


def _labelled(record: Record) -> dict[str, Any]:
    a, b = record.required("a"), record.required("b")
    for name, text in (("a", a), ("b", b)):
        if not isinstance(text, str):
            raise record.error(f"`{name}` must be a string, got {text!r:.60}.")
    names = [name for name in _PROMPTS if record.values.get(name) is not None]
    if len(names) != 1:
        raise record.error("needs either `prompt` or `messages`, as `export-pairs` wrote it.")
    choice = record.values.get("choice")
    read = choice.strip().lower() if isinstance(choice, str) else choice
    if read not in (*CHOICES, "", None):
        known = ", ".join(f"`{one}`" for one in CHOICES)
        raise record.error(f"`choice` must be one of {known}, or null, got {choice!r:.40}.")
    key = str(record.values.get("key") or record.origin)
    return {"key": key, names[0]: record.values[names[0]], "a": a, "b": b, "choice": read or None}


def _choice_in(first: dict[str, Any], row: dict[str, Any]) -> str:
    """Return a label in the letters of the first one: another seed may have swapped them."""
    swapped = {"a": "b", "b": "a"} if row["a"] == first["b"] and row["a"] != first["a"] else {}
    choice: str = row["choice"] or "none"
    return swapped.get(choice, choice)


def _pair(row: dict[str, Any], vote: Counter[str]) -> dict[str, Any] | None:
    """Return the pair that most labels agree on; None for a tie, or without a label."""
    if vote["a"] == vote["b"] or vote["tie"] > abs(vote["a"] - vote["b"]):
        return None
    chosen, rejected = ("a", "b") if vote["a"] > vote["b"] else ("b", "a")
    asked: dict[str, Any] = {name: row[name] for name in _PROMPTS if name in row}
    return {**asked, "chosen": row[chosen], "rejected": row[rejected], "key": row["key"]}
