"""The record of one iteration: what was measured, typed, under its one name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ppo_lightning.metrics.resources import RunStats, TimeStats
from ppo_lightning.metrics.rollout import ComponentStats, RolloutStats
from ppo_lightning.metrics.schema import SectionSpec, metric_specs, section, section_specs
from ppo_lightning.metrics.slices import GroupStats, PositionStats
from ppo_lightning.metrics.staleness import StalenessStats
from ppo_lightning.metrics.update import UpdateStats
from ppo_lightning.metrics.validation import AnswerStats

ITERATION = metric_specs(RunStats)["iteration"].name


@dataclass(frozen=True, kw_only=True)
class IterationStats(RolloutStats, StalenessStats, UpdateStats, TimeStats, RunStats):
    """All that was measured in one iteration, over all ranks; what callbacks read.

    A number is None when it was not measured. The bases hold the metrics, one field each, with
    unit, aggregation and formula. Validation joins later by ``dataclasses.replace``.

    Args:
        components: Reward components by name.
        entropy_at: Entropy by the places in a response, see ``POSITIONS``.
        groups: Parts of a mixture of prompts, by name; those with the most responses.
        val_greedy: Held-out prompts answered with the likeliest tokens.
        val_sampled: Held-out prompts answered by sampling.
        val_reference: Held-out prompts answered by the reference.
    """

    components: Mapping[str, ComponentStats] = field(
        default_factory=dict,
        metadata=section("rollout/reward/{name}", ComponentStats, "Each reward component"),
    )
    entropy_at: Mapping[str, PositionStats] = field(
        default_factory=dict,
        metadata=section("rollout/entropy_at/{name}", PositionStats, "By place in the response"),
    )
    groups: Mapping[str, GroupStats] = field(
        default_factory=dict,
        metadata=section("rollout/group/{name}", GroupStats, "By group of prompts"),
    )
    val_greedy: AnswerStats | None = field(
        default=None, metadata=section("val/greedy", AnswerStats, "Validation, greedy")
    )
    val_sampled: AnswerStats | None = field(
        default=None, metadata=section("val/sampled", AnswerStats, "Validation, sampled")
    )
    val_reference: AnswerStats | None = field(
        default=None, metadata=section("val/reference", AnswerStats, "Validation, reference")
    )

    def to_log(self) -> dict[str, float]:
        """Return what was measured by logged name, the iteration's number first."""
        logged = dict(_measured(self))
        for prefix, record in self._sections():
            logged |= {f"{prefix}/{name}": value for name, value in _measured(record)}
        return logged

    @classmethod
    def from_log(cls, row: Mapping[str, float]) -> IterationStats:
        """Return the record of which ``row`` is the log.

        Names that are unknown are left out: a file may hold metrics that were added later, or a
        user's own.

        Raises:
            KeyError: The number of the iteration is missing.
        """
        found: dict[str, Any] = {
            attribute: _read_all(spec, row) if spec.is_mapping else _read(spec, spec.prefix, row)
            for attribute, spec in section_specs(cls).items()
        }
        numbers = _fields(cls, row) | {"iteration": int(row[ITERATION])}
        return cls(**numbers, **found)

    def _sections(self) -> Iterator[tuple[str, Any]]:
        for attribute, spec in section_specs(type(self)).items():
            value = getattr(self, attribute)
            if isinstance(value, Mapping):
                yield from ((spec.prefix.format(name=name), part) for name, part in value.items())
            elif value is not None:
                yield spec.prefix, value


def _measured(record: Any) -> Iterator[tuple[str, float]]:
    """Yield the logged names and values of a record's metrics that were measured."""
    for attribute, spec in metric_specs(type(record)).items():
        value = getattr(record, attribute)
        if value is not None:
            yield spec.name, float(value)


def _fields(record: type, row: Mapping[str, float], prefix: str = "") -> dict[str, Any]:
    """Return the values of a record's fields that ``row`` holds."""
    names = {key: prefix + spec.name for key, spec in metric_specs(record).items()}
    return {key: row[name] for key, name in names.items() if name in row}


def _read(spec: SectionSpec, prefix: str, row: Mapping[str, float]) -> Any:
    found = _fields(spec.record, row, f"{prefix}/")
    return spec.record(**found) if found else None


def _read_all(spec: SectionSpec, row: Mapping[str, float]) -> dict[str, Any]:
    """Return the records of a mapping of which ``row`` holds a metric, by their keys."""
    head = spec.prefix.format(name="")
    names = dict.fromkeys(
        key.removeprefix(head).rpartition("/")[0] for key in row if key.startswith(head)
    )
    read = {name: _read(spec, f"{head}{name}", row) for name in names}
    return {name: stats for name, stats in read.items() if stats is not None}
