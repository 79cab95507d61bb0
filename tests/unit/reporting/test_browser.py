"""The page in a real browser: it is drawn, and no text of a run can act in it."""

import re
import shutil
import subprocess

import pytest

from ppo_lightning.diagnostics import RULES
from ppo_lightning.reporting import examine, load_run, report_html
from tests.helpers.report_runs import full_run

pytest.importorskip("matplotlib", reason="plots are drawn with matplotlib")

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--window-size=1100,1400"),
)

pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = full_run(tmp_path_factory.mktemp("browser"))
    path = folder / "report.html"
    path.write_text(report_html(examine(load_run(folder), rules=RULES)), encoding="utf-8")
    return path


def browse(page, *options):
    profile = page.parent / "profile"
    command = [BROWSER, *OPTIONS, f"--user-data-dir={profile}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def test_no_text_of_a_run_acts(page):
    done = browse(page, "--dump-dom", "--enable-logging=stderr", "--v=0")
    assert re.search(r"<title>ill: [^<]+</title>", done.stdout)
    assert done.stdout.count("<script") == 1
    assert "CONSOLE" not in done.stderr


@pytest.mark.parametrize(("scheme", "background"), [(1, 255), (0, 21)], ids=["light", "dark"])
def test_it_is_drawn_in_the_readers_colours(page, scheme, background):
    from matplotlib.image import imread

    picture = page.parent / f"{scheme}.png"
    browse(page, f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={scheme}")
    pixels = imread(picture)[..., :3] * 255
    assert abs(pixels[2, 2, 0] - background) < 2  # the margin shows the page's colour
    drawn = abs(pixels[..., 0] - background) > 60
    assert 0.01 < drawn.mean() < 0.4
    assert drawn[700:].any()  # below the verdict too
