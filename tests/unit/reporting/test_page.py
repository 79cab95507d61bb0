"""The page: what is on it, for readers, screen readers and other programs; nothing runs."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from ppo_lightning.diagnostics import RULES, Episode, RuleLimits
from ppo_lightning.reporting import Spell, examine, load_run, report_html
from ppo_lightning.reporting.plots import draw_timeline, merged
from tests.helpers.report_runs import HOSTILE, change, far_row, full_run, healthy_row, write_metrics

pytest.importorskip("matplotlib", reason="plots are drawn with matplotlib")

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags with their attributes in order, and the text below each heading and script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts = [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append((tag, len(self.tags) - 1))

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1][0] == tag, f"</{tag}> closes <{self.open[-1][0]}>"
        self.open.pop()

    def handle_data(self, data):
        for _, at in self.open:
            self.texts[at] = self.texts.get(at, "") + data

    def text(self, tag):
        return [self.texts.get(i, "").strip() for i, (t, _) in enumerate(self.tags) if t == tag]

    def all(self, tag):
        return [attributes for t, attributes in self.tags if t == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return full_run(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def text(folder):
    return report_html(examine(load_run(folder), rules=RULES))


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_page_is_well_formed_with_names_that_are_unique(page):
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        for name in ("aria-labelledby", "href", "xlink:href"):
            for target in attributes.get(name, "").split():
                if name == "aria-labelledby" or target.startswith("#"):
                    assert target.removeprefix("#") in ids, target


def test_nothing_is_fetched_and_nothing_runs(page, text):
    addresses = re.findall(r'(?:href|src|url)\s*[=(]\s*["\']?([^"\')\s>]+)', text)
    assert all(a.startswith(("#", "data:image/png")) for a in addresses if a != "x"), addresses
    assert [a.get("type") for a in page.all("script")] == ["application/json"]
    policy = next(a["content"] for a in page.all("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none'")
    assert "script-src" not in policy
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    assert "@import" not in text


def test_texts_are_shown_as_they_are(page):
    shown = [line for line in page.text("pre") if "document.title" in line]
    assert shown
    assert all(HOSTILE.strip() in line for line in shown)
    assert page.all("img") == []


def test_other_programs_find_the_whole_record(page, folder):
    record = json.loads(page.text("script")[0])
    assert record["severity"] == "ill"
    assert record["run"]["path"] == str(folder / "metrics.jsonl")


def test_what_a_log_names_is_escaped_wherever_it_stands(tmp_path):
    path = tmp_path / '<b onclick="x">.csv'
    names = 'iter,reward_mean,reward_std,kl_ref,"</script><script>alert(1)</script>"'
    path.write_text(f"{names}\n0,1,1,0,5\n1,1,1,0,5\n", encoding="utf-8")
    text = report_html(examine(load_run(path), rules=RULES))
    page = Page(text)
    assert len(page.all("script")) == 1
    assert page.all("b") == []
    assert json.loads(page.text("script")[0])["run"]["unknown_columns"] == [
        "</script><script>alert(1)</script>"
    ]


def test_headings_and_landmarks_are_in_order(page):
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert [len(page.all(tag)) for tag in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]
    assert page.all("html")[0]["lang"] == "en"
    assert page.all("a")[0] == {"class": "skip", "href": "#main"}
    assert page.text("title")[0].startswith("ill: ")


def test_every_plot_has_words_and_numbers_beside_it(page):
    pictures = [a for a in page.all("svg") if a.get("role") == "img"]
    assert len(pictures) >= 15
    assert len(page.all("figcaption")) == len(pictures)
    assert len(page.all("title")) == 1 + len(pictures)
    assert len(page.all("desc")) == len(pictures)
    assert len(page.all("summary")) == len(pictures)
    assert len(page.all("caption")) >= len(pictures)
    assert all(a.get("scope") in ("col", "row") for a in page.all("th"))
    scrolled = [a for a in page.all("div") if a.get("class") == "scroll"]
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in scrolled)


def test_text_in_plots_is_text_in_colours_of_the_page(page, text):
    words = page.text("text")
    assert "iteration" in words
    assert "nats per token" in words
    assert not re.search(r"#0101[0-9a-f]{2}", text)
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    assert used <= set(re.findall(r"--([\w-]+):", text))


SECTIONS = (
    ("Verdict", "Illnesses", "Timeline", "Distributions over time", "KL and reward", "Texts"),
    ("Scores", "KL to the reference", "Entropy", "Raw scores: distribution", "What KL has bought"),
    ("Lengths: distribution", "Entropy by position in the response", "Before and after"),
    ("Best held-out answers of iteration 59", "Worst held-out answers of iteration 59"),
    ("Rollback 1", "Settings that are not the defaults"),
)


def test_all_that_a_run_keeps_is_on_the_page(page):
    headings = {h for tag in ("h2", "h3") for h in page.text(tag)}
    assert headings >= {name for names in SECTIONS for name in names}
    cells = " ".join(page.text("td"))
    assert "AdaptiveKL: kl_coef 0.0005 → 0.002: KL is above its target" in cells
    assert "Doctor: actor_lr_factor 1 → 0.5" in cells


def test_a_bare_log_says_what_is_not_there(tmp_path):
    write_metrics(tmp_path, [healthy_row(i) for i in range(12)])
    page = Page(report_html(examine(load_run(tmp_path), rules=RULES)))
    words = " ".join(page.text("p"))
    for sentence in (
        "None was seen.",
        "Nothing was seen, and the run changed nothing itself.",
        "Histograms of the scores were not kept",
        "Entropy by position in the response was not measured.",
        "No texts are kept beside this log.",
        "There is no config.yaml beside this log.",
    ):
        assert sentence in words
    assert "Raw scores: quantiles" in page.text("h3")  # stands in for the histograms


def test_one_iteration_is_drawn_too(tmp_path):
    write_metrics(tmp_path, [healthy_row(0)])
    assert Page(report_html(examine(load_run(tmp_path), rules=RULES))).text("svg")


def test_names_and_texts_of_any_kind_are_drawn_and_written(tmp_path):
    entries = [change(1, name, 1.0, 2.0) for name in ("$x_$", "\u6e29\u5ea6", "<i>", "a\ud800b")]
    write_metrics(tmp_path, [healthy_row(i) for i in range(3)], {1: entries})
    text = report_html(examine(load_run(tmp_path), rules=RULES))
    assert "$x $" in Page(text).text("text")  # as all names there, without underscores
    assert text.encode("utf-8")


def test_absurd_numbers_and_gaps_are_drawn_without_a_warning(tmp_path):
    rows = [
        healthy_row(i, kl_ref=1e308 * (-1) ** i, value_loss=1e-300 if i else 1e90, lr_actor=0.0)
        for i in (0, 1, 10**12)
    ]
    write_metrics(tmp_path, rows)
    page = Page(report_html(examine(load_run(tmp_path), rules=RULES)))
    assert "Value loss" in page.text("h3")
    assert "KL to the reference" not in page.text("h3")


def test_a_long_run_makes_a_small_page(tmp_path):
    text = report_html(examine(load_run(full_run(tmp_path, 500)), rules=RULES))
    assert len(text.encode()) < 5_000_000
    assert "40 of 500 rows" in text


def test_what_comes_and_goes_is_drawn_as_far_as_it_is_seen(tmp_path):
    rows = [(healthy_row if i % 4 else far_row)(i) for i in range(2000)]
    entries = {i: [change(i, "kl_coef", 0.1, 0.2)] for i in range(2000)}
    write_metrics(tmp_path, rows, entries)
    passing = [replace(rule, lasting=None) for rule in RULES]
    limits = RuleLimits(kl_old=0.1)
    examination = examine(load_run(tmp_path), rules=passing, limits=limits)
    stretches = merged(examination.spells * 3, shortest=20)
    assert len(stretches) < 100
    assert {s.illness for s in stretches} == {s.episode.illness for s in examination.spells}
    timeline_svg = draw_timeline(examination, "x")
    assert timeline_svg.count("<use") < 300


def test_bars_of_one_illness_are_put_together_where_no_gap_is_seen():
    def spell(illness, since, last, severity="ill"):
        return Spell(episode=Episode(illness, since, last, severity), last=last)

    spells = [spell("a", 0, 5), spell("b", 2, 3), spell("a", 6, 7, "watch"), spell("a", 9, 12),
              spell("a", 10, 11), spell("a", 30, 31)]  # fmt: skip
    assert merged(spells, shortest=5) == [
        ("a", "ill", 0, 12), ("a", "ill", 30, 31), ("b", "ill", 2, 3), ("a", "watch", 6, 7),
    ]  # fmt: skip
    assert ("a", "ill", 0, 5) in merged(spells, shortest=0.5)


def test_a_run_is_named_by_its_folder_however_it_is_given(tmp_path, monkeypatch):
    folder = tmp_path / "outer" / "mine" / "checkpoints"
    folder.mkdir(parents=True)
    write_metrics(folder.parent, [healthy_row(0)])
    monkeypatch.chdir(folder)
    page = Page(report_html(examine(load_run(Path("..")), rules=RULES)))
    assert page.text("h1") == ["outer/mine"]


def test_the_same_run_makes_the_same_page(folder, text):
    assert report_html(examine(load_run(folder), rules=RULES)) == text


def test_text_stands_out_from_what_is_behind_it(text):
    """WCAG 2.2: 4.5 for text and 3 for lines, in light and in dark."""
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    for scheme in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", scheme))
        for name in ("ink", "muted", "link", "watch", "ill", "critical", "healthy"):
            assert contrast(colours[name], colours["page"]) >= 4.5, name
            assert contrast(colours[name], colours["panel"]) >= 4.5, name
        for name in ("line-1", "line-2", "line-3", "line-4", "action"):
            assert contrast(colours[name], colours["page"]) >= 3, name


def contrast(first, second):
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_pictures_are_made_of_what_runs_write(tmp_path):
    from ppo_lightning.functional import Histogram
    from ppo_lightning.metrics import POSITIONS, BufferHistograms, HistogramWriter, PositionStats
    from ppo_lightning.reporting.distributions import length_map, score_map
    from ppo_lightning.reporting.figures import entropy_by_position

    places = {name: PositionStats(mean=1.0) for name in (*POSITIONS[:3], POSITIONS[-1])}
    write_metrics(tmp_path, [healthy_row(i, entropy_at=places) for i in range(2)])
    writer = HistogramWriter(tmp_path / "histograms.jsonl")
    bins = Histogram(edges=(0.0, 1.0, 2.0), counts=(3, 1))
    for iteration in range(2):
        found = BufferHistograms(iteration=iteration, raw_score=bins, response_length=bins)
        writer.write(found)
    assert score_map(tmp_path).x == length_map(tmp_path).x == [0, 1]
    assert score_map(tmp_path).cells == [[0.75, 0.25]] * 2  # no finer than what was counted
    assert entropy_by_position(load_run(tmp_path)).edges == [0.0, 1.0, 2.0, 16384.0, 32768.0]
