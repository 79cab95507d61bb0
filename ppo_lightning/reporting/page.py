"""An examination as one self-contained page: no network, no script, everything escaped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from ppo_lightning import __version__
from ppo_lightning.diagnostics import HANDBOOK, Diagnosis, headline
from ppo_lightning.errors import ConfigError
from ppo_lightning.reporting.distributions import length_map, score_map
from ppo_lightning.reporting.examination import Examination
from ppo_lightning.reporting.figures import (
    Chart,
    HeatMap,
    Table,
    charts,
    entropy_by_position,
    frontier,
    quantile_bands,
    table_of,
)
from ppo_lightning.reporting.plots import (
    draw_chart,
    draw_heat_map,
    draw_timeline,
    require_matplotlib,
)
from ppo_lightning.reporting.record import report_record
from ppo_lightning.reporting.settings import CONFIG, changed_settings, read_config
from ppo_lightning.reporting.text import limits_of_sight, row_of, span_of
from ppo_lightning.reporting.texts import before_after, extremes, rollbacks
from ppo_lightning.reporting.timeline import thinned, timeline

_SECTIONS = (
    ("verdict", "Verdict"),
    ("illnesses", "Illnesses"),
    ("timeline", "Timeline"),
    ("distributions", "Distributions"),
    ("kl-and-reward", "KL and reward"),
    ("texts", "Texts"),
    ("settings", "Settings"),
)
_MOST_HAPPENINGS = 200


def report_html(examination: Examination) -> str:
    """Return the page.

    Raises:
        ConfigError: A package of the extra ``report`` is not installed.
    """
    template = _template()
    require_matplotlib()
    folder = examination.run.folder
    page: str = template.render(
        **_verdict(examination),
        **_timeline(examination),
        **_plots(examination, folder),
        **_texts(folder),
        **_settings(folder),
        sections=_SECTIONS,
        style=_file("report.css"),
        record=report_record(examination),
        version=__version__,
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # halves of surrogate pairs have none


def _template() -> Any:
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ConfigError(
            "`--html` needs jinja2, which is not installed: `pip install 'ppo-lightning[report]'`."
        ) from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["code"] = _code
    return environment.from_string(_file("report.html"))


def _code(text: str) -> Any:
    """Show what stands in back-ticks as code; the rest is text."""
    from markupsafe import Markup

    shown = Markup()
    for i, part in enumerate(text.split("`")):
        shown += Markup("<code>{}</code>").format(part) if i % 2 else part
    return shown


def _file(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------- the head


def _verdict(examination: Examination) -> dict[str, Any]:
    run = examination.run
    first, last = run.rows[0].iteration, run.rows[-1].iteration
    facts = [
        ("Log", str(run.path)),
        ("Read as", run.kind),
        ("Iterations", f"{len(run.rows)}, from {first} to {last}"),
        ("Severity", examination.severity or "healthy"),
    ]
    return {
        "verdict": headline(examination.diagnoses),
        "severity": examination.severity or "healthy",
        "name": _name(run.path),
        "facts": facts,
        "remarks": [*run.notes, *limits_of_sight(examination)],
        "illnesses": [_illness(examination, d) for d in examination.diagnoses],
    }


def _name(path: Path) -> str:
    """Name a run by its folder, and by the file where that has a name of its own."""
    path = Path(os.path.abspath(path))  # also of `..`
    folder = path if path.is_dir() else path.parent
    own = "" if path.is_dir() or path.stem == "metrics" else f"/{path.name}"
    return f"{folder.parent.name}/{folder.name}{own}".lstrip("/")


def _illness(examination: Examination, diagnosis: Diagnosis) -> dict[str, Any]:
    card = HANDBOOK.get(diagnosis.illness)
    treated = card is not None and diagnosis.companion_of is None
    now = row_of(examination, diagnosis)
    return {
        "name": diagnosis.illness,
        "title": diagnosis.illness if card is None else card.title,
        "severity": diagnosis.severity,
        "span": span_of(diagnosis),
        "form": diagnosis.form,
        "cause": diagnosis.companion_of,
        "evidence": [str(evidence) for evidence in diagnosis.evidence],
        "causes": card.causes if card is not None and treated else (),
        "remedies": [r.text(now) for r in card.remedies] if card is not None and treated else [],
        "source": "" if card is None else card.source,
    }


# ---------------------------------------------------------------------- plots


def _timeline(examination: Examination) -> dict[str, Any]:
    found = timeline(examination)
    if not found:
        text = "Nothing was seen, and the run changed nothing itself."
        return {"timeline_svg": "", "timeline_text": text, "timeline_table": None, "marks": ""}
    shown = thinned(found, _MOST_HAPPENINGS)
    left = "" if len(shown) == len(found) else f"; {len(shown)} of {len(found)} shown"
    text = (
        "Bars are illnesses, from the first sign to the end: empty ones to watch, hatched ones "
        "ill, crossed ones critical. Diamonds are what the run changed itself."
    )
    table = Table(
        caption=f"What happened, by iteration{left}",
        head=["iteration", "what"],
        rows=[[str(happening.iteration), happening.text] for happening in shown],
    )
    return {
        "timeline_svg": draw_timeline(examination, text),
        "timeline_text": text,
        "timeline_table": table,
        "marks": "In the plots below, shaded stretches are those of illnesses that are more than "
        "to watch, a full line their first sign, dotted ones what the run changed.",
    }


def _plots(examination: Examination, folder: Path) -> dict[str, Any]:
    run = examination.run
    shown = partial(_shown, examination)
    scores, lengths = score_map(folder), length_map(folder)
    positions = entropy_by_position(run)
    found = [scores or quantile_bands(run), lengths, positions]
    without = []
    if scores is None:
        without.append(
            "Histograms of the scores were not kept beside this log; the plots of their quantiles "
            "or of mean and spread stand in for them, where these were measured."
        )
    if lengths is None:
        without.append("Histograms of the lengths were not kept beside this log.")
    if positions is None:
        without.append("Entropy by position in the response was not measured.")
    bought = frontier(run)
    return {
        "charts": [shown(chart) for chart in charts(run)],
        "distributions": [shown(plot) for plot in found if plot is not None],
        "without": without,
        "frontier": None if bought is None else shown(bought),
    }


def _shown(examination: Examination, plot: Chart | HeatMap) -> dict[str, Any]:
    if isinstance(plot, HeatMap):
        svg = draw_heat_map(plot, examination)
    else:
        svg = draw_chart(plot, examination)
    return {
        "key": plot.key,
        "title": plot.title,
        "text": plot.text,
        "svg": svg,
        "table": table_of(plot),
    }


# ---------------------------------------------------------------------- texts and settings


def _texts(folder: Path) -> dict[str, Any]:
    return {
        "extremes": extremes(folder),
        "before_after": before_after(folder),
        "rollbacks": rollbacks(folder),
    }


def _settings(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    if config is None:
        return {"settings": None, "no_settings": f"There is no {CONFIG} beside this log."}
    changed: Sequence[Any] = changed_settings(config)
    table = Table(
        caption=f"From {CONFIG}",
        head=["setting", "in this run", "default"],
        rows=[[setting.key, setting.value, setting.default] for setting in changed],
    )
    return {"settings": table if changed else None, "no_settings": "All are the defaults."}
