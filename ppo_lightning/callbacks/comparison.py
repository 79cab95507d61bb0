"""The policy's answers against the reference's: numbers with intervals, tables, texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ppo_lightning.functional import bootstrap_interval, distinct_openings
from ppo_lightning.modules import Answer

Pairs = Mapping[int, tuple[list[Answer], list[Answer]]]
"""For each prompt that both have answered: (the reference's answers, the policy's)."""

NUMBERS: Mapping[str, Callable[[Answer], float | None]] = {
    "proxy reward": lambda answer: answer.score,
    "gold reward": lambda answer: answer.gold,
    "KL to reference, nats": lambda answer: 0.0 if answer.kl_ref is None else answer.kl_ref,
    "entropy, nats per token": lambda answer: answer.entropy,
    "length, tokens": lambda answer: float(answer.num_tokens),
    "log p_ref, nats per token": lambda answer: answer.ref_logprob,
    "repeated bigrams": lambda answer: answer.repeated_bigrams,
}
"""What is compared answer by answer; a number that is None was not measured."""

OPENINGS = "distinct openings"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One number before and after training, each a mean over prompts of means over answers.

    Args:
        before: Of the reference's answers.
        after: Of the policy's.
        low: Lower end of the gain's 95 % interval, resampled over prompts; None where the number
            belongs to all answers together.
        high: Upper end.
    """

    before: float
    after: float
    low: float | None = None
    high: float | None = None

    @property
    def gain(self) -> float:
        """After minus before."""
        return self.after - self.before


def pair_answers(answers: Iterable[Answer]) -> Pairs:
    """Group the answers to the same prompt: the sampled ones, or the greedy ones if there are none.

    Args:
        answers: Of policy and reference, in any order.

    Returns:
        By number of the prompt; prompts that only one of them has answered are left out.
    """
    answers = list(answers)
    mode = "sampled" if any(answer.mode == "sampled" for answer in answers) else "greedy"
    found: dict[int, tuple[list[Answer], list[Answer]]] = defaultdict(lambda: ([], []))
    for answer in answers:
        if answer.mode == mode:
            found[answer.number][answer.writer == "policy"].append(answer)
    return {number: pair for number, pair in sorted(found.items()) if all(pair)}


def changes_of(pairs: Pairs, *, seed: int = 0) -> dict[str, Change]:
    """Compare the two writers in everything that was measured.

    Args:
        pairs: At least one prompt.
        seed: Of the resampling.

    Returns:
        By the names of ``NUMBERS``, and ``distinct openings``.
    """
    found = {}
    for name, number_of in NUMBERS.items():
        means = [tuple(_mean(answers, number_of) for answers in pair) for pair in pairs.values()]
        known = [(before, after) for before, after in means if before is not None is not after]
        if known:
            gains = [after - before for before, after in known]
            low, high = bootstrap_interval(gains, seed=seed)
            before, after = (fmean(column) for column in zip(*known, strict=True))
            found[name] = Change(before=before, after=after, low=low, high=high)
    before, after = (
        distinct_openings([answer.response_ids for pair in pairs.values() for answer in pair[k]])
        for k in (0, 1)
    )
    return found | {OPENINGS: Change(before=before, after=after)}


def _mean(answers: Sequence[Answer], number_of: Callable[[Answer], float | None]) -> float | None:
    numbers = [number for answer in answers if (number := number_of(answer)) is not None]
    return fmean(numbers) if numbers else None


def count_of(pairs: Pairs) -> str:
    """Say what was compared: ``64 prompts x 2 sampled answers``."""
    first = next(iter(pairs.values()))[1]
    answers = "answer" if len(first) == 1 else "answers"
    return f"{len(pairs)} prompts x {len(first)} {first[0].mode} {answers}"


def changes_table(changes: Mapping[str, Change]) -> str:
    """Lay the changes out as a Markdown table whose columns also line up as plain text."""
    rows = [("", "before", "after", "gain", "95 % interval")]
    for name, change in changes.items():
        numbers = (f"{change.before:.3f}", f"{change.after:.3f}", f"{change.gain:+.3f}")
        bounds = change.low is not None and change.high is not None
        interval = f"{change.low:+.3f} to {change.high:+.3f}" if bounds else ""
        rows.append((name, *numbers, interval))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    return "\n".join(_line(row, widths) for row in rows)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.rjust(width) if k else cell.ljust(width)
        for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join([first, *rest])} |"


def texts_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Lay side-by-side rows out for a terminal: prompt, then the answers and their scores."""
    blocks = []
    for row in rows:
        lines = [row["prompt"]]
        for writer in ("reference", "policy"):
            text = " ".join(str(row[writer]).split())
            lines.append(f"  {writer:<9} {row[f'{writer}_score']:+.2f}  … {text}")
        blocks.append("\n".join(lines))
    return "\n".join(blocks)
