"""Every function and test that ``docs/details.md`` names is there, and every row has both."""

from tests.helpers.named import CODE, ROOT, TEST, exists, missing_code, missing_tests

TEXT = (ROOT / "docs" / "details.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and "`" in line]


def test_functions_and_tests_exist():
    assert missing_code(TEXT) == []
    assert missing_tests(TEXT) == []
    assert not exists("ppo_lightning", "functional/kl.py", "kl_estimat")


def test_every_row_names_its_code_and_its_test():
    assert len(ROWS) > 40
    for row in ROWS:
        assert row.count("|") == 6, row
        assert len(CODE.findall(row)) == len(TEST.findall(row)) == 1, row
