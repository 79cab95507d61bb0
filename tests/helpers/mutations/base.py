"""One fault as a replacement in the code, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Args:
        trap: Its number.
        file: Where it is put in.
        old: What stands there, found exactly once.
        new: What takes its place.
        tests: At least one of them must fail.
    """

    trap: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def fault(trap: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    places = tuple(f"tests/{test}" for test in tests)
    return Mutation(trap, f"ppo_lightning/{file}", old, new, places)


def misfit(mutation: Mutation, root: Path) -> str | None:
    """Say why a mutation cannot be put in, or None."""
    file = root / mutation.file
    found = file.read_text(encoding="utf-8").count(mutation.old) if file.is_file() else 0
    missing = [t for t in mutation.tests if not (root / t.partition("::")[0]).is_file()]
    if found != 1 or mutation.old == mutation.new:
        return f"{mutation.trap}: found {found} times in {mutation.file}: {mutation.old!r}"
    return f"{mutation.trap}: no file for {missing}" if missing else None
