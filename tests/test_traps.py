"""Every test that ``docs/traps.md`` names is there, and every trap that is claimed has one."""

from __future__ import annotations

import re

import pytest

from tests.helpers.mutations import MUTATIONS, misfit
from tests.helpers.named import ROOT, TEST, exists, missing_tests

TEXT = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (T\d\d) (?P<cells>.*)\|$", re.MULTILINE)
ALL = [f"T{number:02d}" for number in range(1, 63)]
NOT_YET: set[str] = set()


def test_every_trap_has_one_row():
    assert [match[1] for match in ROW.finditer(TEXT)] == ALL


def test_every_named_test_exists():
    assert len(TEST.findall(TEXT)) > len(ALL)
    assert missing_tests(TEXT) == []
    assert not exists("tests", "test_traps.py", "test_that_is_not_there")


@pytest.mark.parametrize("trap", ALL)
def test_a_trap_has_a_test_or_is_said_to_have_none(trap):
    cells = next(match["cells"] for match in ROW.finditer(TEXT) if match[1] == trap)
    assert bool(TEST.search(cells)) == (trap not in NOT_YET)
    assert ("not yet" in cells) == (trap in NOT_YET)


def test_every_tested_trap_has_a_mutation():
    assert {m.trap for m in MUTATIONS} == set(ALL) - NOT_YET


def test_every_mutation_fits_the_code():
    """`make mutate` runs them; this only sees that none was left behind when code moved."""
    assert [problem for m in MUTATIONS if (problem := misfit(m, ROOT))] == []
    for mutation in MUTATIONS:
        for test in mutation.tests:
            file, _, name = test.removeprefix("tests/").partition("::")
            for part in name.split("::") if name else ():  # of a class, perhaps
                assert exists("tests", file, part), test
