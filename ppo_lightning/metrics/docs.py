"""The table of metrics for the documentation: ``python -m ppo_lightning.metrics.docs``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from ppo_lightning.metrics.resources import RunStats, TimeStats
from ppo_lightning.metrics.reward_model import RewardModelStats
from ppo_lightning.metrics.rollout import RolloutStats
from ppo_lightning.metrics.schema import (
    SCHEMA_VERSION,
    MetricSpec,
    Range,
    SectionSpec,
    metric_specs,
    section_specs,
)
from ppo_lightning.metrics.sft import SFTStats
from ppo_lightning.metrics.slices import MOST_GROUPS, POSITIONS
from ppo_lightning.metrics.staleness import StalenessStats
from ppo_lightning.metrics.stats import ITERATION, IterationStats
from ppo_lightning.metrics.supervised import STEP, StepStats
from ppo_lightning.metrics.update import UpdateStats
from ppo_lightning.metrics.validation import AnswerStats

_INTRODUCTION = f"""\
# Metrics

Made from the code by `python -m ppo_lightning.metrics.docs > docs/metrics.md`; change it there.
Schema version {SCHEMA_VERSION}.

Every iteration gives one number under each name, over all ranks. `metrics.jsonl` in the run's
folder holds them, a line an iteration; TensorBoard and other loggers show the same. The x axis is
always the iteration, `{ITERATION}`, counted from 0. Callbacks read them as fields of
`IterationStats` (second column); a field is `None`, and its name is not logged, where nothing was
measured.

Natural logarithms: KL and entropy are in nats. *Tokens* are the policy's own response tokens, end
token included. Means and ratios are a total divided by a total, so that every token or response
weighs alike, whatever minibatch or rank it was in; deviations are pooled and of the population.
Means of the update run over the minibatches whose forward pass was made, the one at which the
update stopped included; a minibatch whose loss or gradient was not finite is in none of them, nor
are those after a stop.
*state* is a value in force, or at one moment. Healthy ranges were measured on small models or are
customary: starting points, not laws.
"""

_SUPERVISED = f"""\
## Supervised runs

`SFTModule` and `RewardModule` write a row every `trainer.log_every_n_steps` optimiser steps, and
one after each validation; their x axis is `{STEP}`. Rows are read as records of the class named
below, whose numbers stand beside those that both have.

"""

_NAMES = {
    "components": "`<name>` is that of the reward component.",
    "entropy_at": "`<name>` tells the places in the response, counted from 0: "
    f"`{'`, `'.join(POSITIONS[:5])}` and on, each bin twice as wide as the last, up to "
    f"`{POSITIONS[-1]}`. Tokens of others between the policy's own count as places.",
    "groups": "`<name>` is that of the part of `MixturePrompts` that the prompt was drawn from, "
    "with `_` in the place of what is not a letter, a digit or one of `_.-`; the "
    f"{MOST_GROUPS} with the most responses. There are none without a mixture.",
}

_HEADER = """\
| name | field | unit | aggregation | what it is | healthy |
| --- | --- | --- | --- | --- | --- |
"""


def metrics_markdown() -> str:
    """Return the page of all metrics, as Markdown."""
    parts = [_INTRODUCTION]
    for title, record in (
        ("Rollout", RolloutStats),
        ("Age of the responses", StalenessStats),
        ("Update", UpdateStats),
        ("Time", TimeStats),
        ("Run", RunStats),
    ):
        parts.append(_table(title, metric_specs(record)))
    sections = section_specs(IterationStats)
    parts[2:2] = [_mapping(field, s) for field, s in sections.items() if s.is_mapping]
    answers = [(field, s) for field, s in sections.items() if s.record is AnswerStats]
    prefixes = ", ".join(f"`{s.prefix}/` (`{field}`)" for field, s in answers)
    table = _table("Validation", metric_specs(AnswerStats), "val/<answers>/")
    parts.append(f"{table}\n`<answers>` is one of {prefixes}.\n")
    parts.append(_SUPERVISED + _table("Both", metric_specs(StepStats), level=3))
    parts += [_table(f"`{r.__name__}`", _own(r), level=3) for r in (SFTStats, RewardModelStats)]
    return "\n".join(parts)


def _mapping(field: str, spec: SectionSpec) -> str:
    """Table of a section of which there may be several, by name."""
    prefix = spec.prefix.format(name="<name>")
    table = _table(spec.title, metric_specs(spec.record), f"{prefix}/")
    return f"{table}\n{_NAMES[field]} Callbacks: `stats.{field}`, by name.\n"


def _own(record: type[StepStats]) -> dict[str, MetricSpec]:
    """Metrics that a record adds to those of every supervised run, or describes anew."""
    shared = metric_specs(StepStats)
    return {name: spec for name, spec in metric_specs(record).items() if shared.get(name) != spec}


def _table(title: str, specs: Mapping[str, MetricSpec], prefix: str = "", *, level: int = 2) -> str:
    rows = "".join(_row([f"`{prefix}{s.name}`", f"`{f}`", *_cells(s)]) for f, s in specs.items())
    return f"{'#' * level} {title}\n\n{_HEADER}{rows}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _cells(spec: MetricSpec) -> list[str]:
    healthy = [_range(spec.healthy)] if spec.healthy is not None else []
    notes = [spec.note] if spec.note else []
    return [spec.unit, spec.aggregation, spec.formula, "; ".join(healthy + notes)]


def _range(bounds: Range) -> str:
    low, high = bounds
    if low is not None and low == high:
        return f"{low:g}"
    if low is None or high is None:
        return f"at most {high:g}" if high is not None else f"at least {low:g}"
    return f"{low:g} to {high:g}"


if __name__ == "__main__":
    sys.stdout.buffer.write(metrics_markdown().encode("utf-8"))
