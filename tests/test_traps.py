"""Every test that ``docs/traps.md`` names is there, and every trap that is claimed has one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.mutations import MUTATIONS, misfit

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "traps.md"
ROW = re.compile(r"^\| (T\d\d) (?P<cells>.*)\|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
NOT_YET = {"T30", "T46", "T47", "T48"}
# Tested, but by no small replacement in the code: see the row for why.
NO_MUTATION = {"T21", "T49", "T50", "T53", "T58", "T61"}
ALL = [f"T{number:02d}" for number in range(1, 63)]


def rows() -> dict[str, str]:
    return {match[1]: match["cells"] for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))}


@cache
def names_in(file: Path) -> frozenset[str]:
    """Names of the test functions of a file, found without importing it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def exists(file: str, name: str) -> bool:
    path = ROOT / "tests" / file
    return path.is_file() and name in names_in(path)


def test_every_trap_has_one_row():
    text = PAGE.read_text(encoding="utf-8")
    assert [match[1] for match in ROW.finditer(text)] == ALL


def test_every_named_test_exists():
    named = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > len(ALL)
    assert [f"{file}::{name}" for file, name in named if not exists(file, name)] == []
    assert not exists("test_traps.py", "test_that_is_not_there")


@pytest.mark.parametrize("trap", ALL)
def test_a_trap_has_a_test_or_is_said_to_have_none(trap):
    cells = rows()[trap]
    assert bool(NAMED.search(cells)) == (trap not in NOT_YET)
    assert ("not yet" in cells) == (trap in NOT_YET)


def test_every_tested_trap_has_a_mutation():
    assert {m.trap for m in MUTATIONS} == set(ALL) - NOT_YET - NO_MUTATION


def test_every_mutation_fits_the_code():
    """`make mutate` runs them; this only sees that none was left behind when code moved."""
    assert [problem for m in MUTATIONS if (problem := misfit(m, ROOT))] == []
    for mutation in MUTATIONS:
        for test in mutation.tests:
            file, _, name = test.removeprefix("tests/").partition("::")
            assert not name or exists(file, name), test
