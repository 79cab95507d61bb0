"""The planning tables of the documentation are what the code computes."""

from dataclasses import replace

import pytest

from ppo_lightning.errors import ConfigError
from ppo_lightning.estimate import ARCHITECTURES, HARDWARE, SketchEstimator, hardware_of, plan
from ppo_lightning.estimate.docs import (
    BEGIN,
    END,
    RANKS,
    STRATEGIES,
    introduction,
    main,
    planned_run,
    table,
    tables,
    with_tables,
)
from ppo_lightning.io import read_text
from tests.helpers.pages import ROOT

PAGE = ROOT / "docs/scaling.md"


@pytest.mark.slow
def test_the_page_is_what_the_code_prints():
    page = read_text(PAGE)
    assert with_tables(page, tables()) == page


def test_the_page_has_a_row_for_each_plan_and_says_what_it_assumes():
    page = read_text(PAGE)
    assert introduction(HARDWARE["h100"]) in page
    for name in ARCHITECTURES:
        rows = page.partition(f"### {name} ")[2].partition("\n#")[0].splitlines()
        found = [row.split("|")[1:3] for row in rows if row.startswith("| ") and "GPUs" not in row]
        expected = [[f" {n:,} ", f" {s.name} "] for n in RANKS for s in STRATEGIES]
        assert [cells for cells in found if "---" not in cells[0]] == expected


def test_a_row_is_a_plan(monkeypatch):
    shape = replace(
        ARCHITECTURES["llama-3.2-1b"], layers=2, hidden=64, intermediate=64, vocabulary=96
    )
    monkeypatch.setattr("ppo_lightning.estimate.docs.ARCHITECTURES", {"tiny": shape})
    run, predictor = planned_run(64, STRATEGIES[4]), SketchEstimator(shape)
    found = plan(run, predictor, HARDWARE["h100"])
    row = table("tiny", [found]).splitlines()[-1].strip("| ").split(" | ")
    assert row[:2] == ["64", "fsdp"]
    assert float(row[2]) == pytest.approx(found.memory.peak.total / 2**30, abs=0.06)
    assert row[3:5] == [found.memory.peak.name, "yes"]
    # 32 responses of 512 tokens for each of 64 GPUs.
    rate = 64 * 32 * 512 / found.seconds.total
    assert int(row[7].replace(",", "")) == pytest.approx(rate, abs=1)
    small = plan(run, predictor, hardware_of(["memory=1e6"]))
    assert " | no | " in table("tiny", [small])


def test_tables_are_put_between_the_marks(tmp_path, monkeypatch, capsysbinary):
    monkeypatch.setattr("ppo_lightning.estimate.docs.tables", lambda: "new \\1\n")
    file = tmp_path / "page.md"
    file.write_text(f"a\n{BEGIN}\nold\n{END}\nb\n", encoding="utf-8")
    for _ in range(2):
        main([str(file)])
        assert read_text(file) == f"a\n{BEGIN}\n\nnew \\1\n\n{END}\nb\n"
    main([])
    assert capsysbinary.readouterr().out == b"new \\1\n"
    with pytest.raises(ConfigError, match="plan: begin"):
        with_tables("no marks", "x")
