"""What a metric is: its logged name, unit, aggregation, formula in words, and healthy range.

A metric is written once, as a field of one of this room's records; the logs, ``metrics.jsonl`` and
the table in the documentation are made from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

SCHEMA_VERSION = 1
"""Of ``metrics.jsonl``: raised when a name goes, or its meaning changes; not when one is added."""

Range = tuple[float | None, float | None]

Aggregation = Literal[
    "mean over tokens",
    "mean over responses",
    "mean over steps",
    "mean over prompts",
    "mean over examples",
    "deviation over tokens",
    "deviation over responses",
    "largest",
    "smallest",
    "total",
    "ratio of totals",
    "all responses together",
    "all tokens together",
    "state",
]
"""How one number is made of many, always over all ranks: means and ratios divide a total by a
total, deviations are pooled (population), ``state`` is a value in force or at a moment."""

_METRIC = "metric"
_SECTION = "section"


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One row of the table of metrics.

    Args:
        name: Logged name (``rollout/kl_ref``); below its section's prefix where it has one.
        unit: Of the number.
        aggregation: How it is put together; see ``Aggregation``.
        formula: What is computed, in words.
        healthy: Lowest and highest value of a run in good health, either may be None; None where
            no fixed range holds.
        note: What the range does not say.
    """

    name: str
    unit: str
    aggregation: Aggregation
    formula: str
    healthy: Range | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class SectionSpec:
    """Metrics of one kind under a prefix, such as those of one way to answer.

    Args:
        prefix: Prefix of the logged names; ``{name}`` stands for the keys of a mapping.
        record: The class whose fields are the metrics.
        title: Of the section in the documentation.
    """

    prefix: str
    record: type
    title: str

    @property
    def is_mapping(self) -> bool:
        """Whether there may be several, by name."""
        return "{name}" in self.prefix


def metric(
    name: str,
    unit: str,
    aggregation: Aggregation,
    formula: str,
    *,
    healthy: Range | None = None,
    note: str = "",
    required: bool = False,
) -> Any:
    """Make a record's field for a metric.

    It is a ``float | None`` that is None when not measured, unless ``required``. The other
    arguments are those of ``MetricSpec``.
    """
    spec = MetricSpec(
        name=name,
        unit=unit,
        aggregation=aggregation,
        formula=formula,
        healthy=healthy,
        note=note,
    )
    metadata = {_METRIC: spec}
    return field(metadata=metadata) if required else field(default=None, metadata=metadata)


def section(prefix: str, record: type, title: str) -> dict[str, SectionSpec]:
    """Make the ``metadata`` of a record's field for a section."""
    return {_SECTION: SectionSpec(prefix=prefix, record=record, title=title)}


def metric_specs(record: type) -> dict[str, MetricSpec]:
    """Return the metrics of a record by field name, in order."""
    return _specs(record, _METRIC)


def section_specs(record: type) -> dict[str, SectionSpec]:
    """Return the sections of a record by field name, in order."""
    return _specs(record, _SECTION)


def _specs(record: type, kind: str) -> dict[str, Any]:
    return {f.name: f.metadata[kind] for f in fields(record) if kind in f.metadata}
