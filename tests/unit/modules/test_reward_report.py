"""The report on a reward model, by hand."""

import json
import math
import sys

import pytest

from ppo_lightning.modules.held_out_pairs import HeldOutPair
from ppo_lightning.modules.reward_report import (
    draw_reliability,
    report_markdown,
    reward_report,
    write_report,
)


def judged(number, chosen, rejected, *, margin=0.0, lengths=(4, 2)) -> HeldOutPair:
    texts = ("q", f"better | {number}", "worse\nof two lines")
    return HeldOutPair(number, chosen, rejected, margin, *lengths, f"pairs.jsonl:{number}", texts)


PAIRS = [
    judged(2, 1.0, 1.0, lengths=(1, 1)),
    judged(0, 3.0, 1.0),
    judged(3, 0.0, 4.0, lengths=(2, 5)),
    judged(1, 2.0, 1.0, margin=1.0),
]


def test_numbers_by_hand():
    report = reward_report(PAIRS, step=7)
    assert (report.step, report.num_pairs, report.accuracy, report.ties) == (7, 4, 2.5 / 4, 0.25)
    assert report.interval[0] < 2.5 / 4 < report.interval[1]
    sure = [math.log1p(math.exp(-lead)) for lead in (2.0, 0.0, 0.0, -4.0)]  # margin off
    assert report.loss == pytest.approx(sum(sure) / 4)
    assert (report.chosen.mean, report.rejected.mean, report.gap.mean) == (1.5, 1.75, -0.25)
    assert report.gap.std == pytest.approx(math.sqrt((2.25**2 + 1.25**2 + 0.25**2 + 3.75**2) / 4))
    assert report.gap.quantiles["0"] == -4.0
    assert report.gap.quantiles["0.5"] == 0.5
    assert report.gap.quantiles["1"] == 2.0
    assert report.length.accuracy_chosen_longer == 1.0
    assert report.length.accuracy_chosen_shorter == 0.0
    assert [entry["origin"][-2:] for entry in report.most_wrong] == [":3", ":2", ":1", ":0"]


def test_the_order_of_the_ranks_makes_no_difference():
    assert reward_report(PAIRS, step=1) == reward_report(PAIRS[::-1], step=1)


def test_files_hold_the_same_and_leave_out_what_is_no_number(tmp_path):
    report = reward_report(PAIRS, step=7)
    write_report(report, tmp_path / "new")
    content = json.loads((tmp_path / "new/reward_report.json").read_text(encoding="utf-8"))
    assert content["accuracy"] == report.accuracy
    assert content["bins"][5]["confidence"] is None  # an empty bin
    page = (tmp_path / "new/reward_report.md").read_text(encoding="utf-8")
    assert page == report_markdown(report)
    wrong = [line for line in page.splitlines() if line.startswith("| pairs.jsonl")]
    assert len(wrong) == 1  # pairs that are right or tied are not called wrong
    assert "better \\| 3 | worse of two lines" in wrong[0]


def test_scores_that_are_no_numbers_show_as_such():
    report = reward_report([judged(0, math.nan, 1.0), judged(1, 2.0, 1.0)], step=1)
    assert math.isnan(report.accuracy)
    assert math.isnan(report.interval[0])
    assert "nan" in report_markdown(report)


def test_the_picture_is_drawn_where_matplotlib_is_there(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="an extra")
    report = reward_report(PAIRS, step=1)
    assert draw_reliability(report, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw_reliability(report, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
