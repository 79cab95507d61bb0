import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from ppo_lightning.studies import BASE, Arm, Measured, State, compare
from ppo_lightning.studies.page import write_page
from ppo_lightning.studies.plots import curve_groups, mean_curve, plots_of

METRIC = "val/sampled/gold"
EVIL = '</title><script>alert("$x_1^{2$")</script> & <b'
DONE = State(status="finished", seconds=3.0)


def arm(name, **settings):
    return Arm(name=name, settings=settings, config={}, label=name)


def runs(*levels, problem=""):
    return [
        Measured(
            seed=seed,
            state=DONE,
            curve=() if level is None else ((0, level / 2), (2, level)),
            level=level,
            kl=None if level is None else 3 * level,
            health="healthy",
            problem=problem,
        )
        for seed, level in enumerate(levels)
    ]


def table(*rows, metric=METRIC):
    return compare([(arm(BASE), runs(0.5, 0.6)), *rows], metric, 2)


FULL = [
    (arm("clip_range = 0.1", clip_range=0.1), runs(0.6, 0.8)),
    (arm("coef = 0.1", coef=0.1), runs(0.4, None, problem="killed by SIGKILL")),
]


def page_of(comparison, tmp_path, title="Sweep of x"):
    assert write_page(tmp_path / "new/page.html", title, comparison)
    return (tmp_path / "new/page.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Collects tags and the text outside of pictures."""

    def __init__(self):
        super().__init__()
        self.tags, self.ids = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]


def read(page):
    reader = Reader()
    reader.feed(page)
    return reader


def named(reader, tag):
    return [attributes for name, attributes in reader.tags if name == tag]


def test_the_page_needs_nothing_else(tmp_path):
    page = page_of(table(*FULL), tmp_path)
    reader = read(page)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in reader.tags}
    for _, attributes in reader.tags:
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "action")
            assert name not in ("href", "xlink:href") or value.startswith("#")
    assert "url(http" not in page
    assert "@import" not in page
    [policy] = [meta for meta in named(reader, "meta") if "http-equiv" in meta]
    assert policy["content"].startswith("default-src 'none'")


def test_the_page_can_be_listened_to(tmp_path):
    reader = read(page_of(table(*FULL), tmp_path))
    assert named(reader, "html")[0]["lang"] == "en"
    assert named(reader, "caption")
    assert [cell["scope"] for cell in named(reader, "th")] == ["col"] * 9 + ["row"] * 3
    pictures = [one for one in named(reader, "div") if one.get("role") == "img"]
    assert len(pictures) == len(named(reader, "figcaption")) == len(named(reader, "svg")) == 3
    assert "clip_range = 0.1: 0.7" in pictures[0]["aria-label"]
    [region] = [one for one in named(reader, "div") if one.get("role") == "region"]
    assert (region["tabindex"], bool(region["aria-label"])) == ("0", True)
    assert all(one["tabindex"] == "0" for one in named(reader, "figure"))
    assert "display: block" not in page_of(table(*FULL), tmp_path)  # is no table to some readers


def test_names_in_pictures_are_those_of_one_picture_each(tmp_path):
    page = page_of(table(*FULL), tmp_path)
    ids = read(page).ids
    assert len(ids) == len(set(ids)) > 10
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', page))
    assert used
    assert used <= set(ids)


def test_pictures_are_whole_and_the_same_each_time(tmp_path):
    first, second = (plots_of(table(*FULL)) for _ in range(2))
    assert first == second
    for plot in first:
        ElementTree.fromstring(plot.svg)


@pytest.mark.filterwarnings("error")
def test_long_names_leave_room_for_the_picture(tmp_path):
    long = arm("x" * 400, **{"y" * 400: 1})
    page = page_of(table((long, runs(0.1, 0.3)), metric="z" * 400), tmp_path)
    assert page.count("<svg") == 3
    assert "x" * 400 in page


@pytest.mark.filterwarnings("error")
def test_texts_are_texts_everywhere(tmp_path):
    comparison = table((arm(EVIL, x=EVIL), runs(0.1, 0.3, problem=EVIL)), metric=EVIL)
    page = page_of(comparison, tmp_path, title=EVIL)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    reader = read(page)
    assert len(named(reader, "title")) == 1
    assert "b" not in {tag for tag, _ in reader.tags}


def test_runs_that_are_missing_are_named(tmp_path):
    page = page_of(table(*FULL), tmp_path)
    assert "<li>coef = 0.1, seed 1: killed by SIGKILL</li>" in page


def test_without_matplotlib_there_is_the_table_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    assert not write_page(tmp_path / "page.html", "x", table(*FULL))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "matplotlib is not installed" in page
    assert "<table>" in page
    assert "<svg" not in page


def test_a_sweep_in_which_nothing_has_finished_has_a_page(tmp_path):
    empty = compare([(arm(BASE), runs(None, problem="boom"))], METRIC, 2)
    assert "boom" in page_of(empty, tmp_path)
    assert plots_of(empty) == []


def test_each_setting_has_a_picture_of_its_curves():
    groups = curve_groups(table(*FULL))
    assert [(key, [row.arm.name for row in rows]) for key, rows in groups] == [
        ("clip_range", [BASE, "clip_range = 0.1"]),
        ("coef", [BASE, "coef = 0.1"]),
    ]


def test_of_many_arms_the_best_are_drawn():
    many = [(arm(f"a{n}", x=n, y=n), runs(n / 10, n / 10)) for n in range(12)]
    [(key, rows)] = curve_groups(table(*many))
    assert key == ""
    assert [row.arm.name for row in rows] == [BASE, *(f"a{n}" for n in range(4, 12))]


def test_a_mean_curve_is_of_the_runs_that_got_there():
    [row, *_] = table().rows
    short = row.runs[1]
    short = type(short)(**(vars(short) | {"curve": short.curve[:1]}))
    row = type(row)(**(vars(row) | {"runs": (row.runs[0], short)}))
    assert mean_curve(row) == [(0, 0.275), (2, 0.5)]
