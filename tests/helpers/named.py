"""Whether what a page names is there: functions and tests, read from the source."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
CODE = re.compile(r"`([\w/]+\.py):(\w+)`")


@cache
def names_in(file: Path) -> frozenset[str]:
    """Names of the functions and classes of a file, found without importing it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def exists(folder: str, file: str, name: str) -> bool:
    """Whether ``folder/file`` defines ``name``."""
    path = ROOT / folder / file
    return path.is_file() and name in names_in(path)


def missing_tests(text: str) -> list[str]:
    """Tests that a page names as ``file::test`` and that are not there."""
    return [
        f"{file}::{name}" for file, name in TEST.findall(text) if not exists("tests", file, name)
    ]


def missing_code(text: str) -> list[str]:
    """Functions that a page names as ``file:function`` and that are not there."""
    found = CODE.findall(text)
    return [f"{file}:{name}" for file, name in found if not exists("ppo_lightning", file, name)]
