"""Metrics that callbacks watch: a name that the run does not log is refused before it starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ppo_lightning.data import MixturePrompts, SplitPrompts
from ppo_lightning.errors import ConfigError, nearest
from ppo_lightning.metrics import POSITIONS, IterationStats, metric_specs, section_specs
from ppo_lightning.modules.slices import group_name

_LIGHTNINGS_OWN = ("epoch", "step")
_MANY = 6
_KNOWN = ("lightning.", "ppo_lightning.")


def check_monitors(module: Any) -> None:
    """Refuse a ``monitor`` of EarlyStopping, ModelCheckpoint and the like that is never logged.

    Lightning says so only at the end of the first iteration. Nothing is refused where a class of
    the user's own, module or callback, may log more.

    Args:
        module: A module of this package, attached to its trainer.

    Raises:
        ConfigError: Names the callback, what it watches, and what there is.
    """
    callbacks = module.trainer.callbacks
    if not all(type(part).__module__.startswith(_KNOWN) for part in (module, *callbacks)):
        return
    names = [*logged_names(module)]
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if monitor is None or monitor in (*names, *_LIGHTNINGS_OWN):
            continue
        if getattr(callback, "strict", True):
            data = getattr(module.trainer, "datamodule", None)
            setting = getattr(data, "held_out_setting", "set `data.init_args.val_prompts`")
            raise ConfigError(_message(type(callback).__name__, monitor, names, setting))


def logged_names(module: Any) -> Iterator[str]:
    """Yield the names that a run may log; some depend on its settings.

    Args:
        module: A ``PPOModule`` attached to its trainer.
    """
    if (record := getattr(module, "stats_class", None)) is not None:
        yield from _supervised_names(record, getattr(module.trainer, "datamodule", None))
        return
    yield from (spec.name for spec in metric_specs(IterationStats).values())
    held_out = getattr(getattr(module.trainer, "datamodule", None), "val_prompts", None)
    for field, section in section_specs(IterationStats).items():
        if section.prefix.startswith("val/") and held_out is None:
            continue
        for key in _keys(field, module) if section.is_mapping else ("",):
            prefix = section.prefix.format(name=key)
            yield from (f"{prefix}/{name}" for name in _names(section.record, module))


def _keys(field: str, module: Any) -> Iterable[str]:
    """Names that a mapping of ``IterationStats`` may have."""
    if field == "components":
        return module.reward_pipeline.names  # type: ignore[no-any-return]
    if field == "entropy_at":
        return POSITIONS
    prompts = getattr(getattr(module.trainer, "datamodule", None), "prompts", None)
    while isinstance(prompts, SplitPrompts):
        prompts = prompts.source
    return map(group_name, prompts.names) if isinstance(prompts, MixturePrompts) else ()


def _supervised_names(record: type, data: Any) -> Iterator[str]:
    held_out = getattr(data, "has_held_out", True)
    for spec in metric_specs(record).values():
        if held_out or not spec.name.startswith("val/"):
            yield spec.name


def _names(record: type, module: Any) -> Iterator[str]:
    for name in (spec.name for spec in metric_specs(record).values()):
        if module.gold is not None or not name.startswith("gold"):
            yield name


def _message(callback: str, monitor: str, names: list[str], setting: str) -> str:
    near = nearest(monitor, names)
    hint = f"; did you mean `{near}`?" if near else "."
    if monitor.startswith("val") and not any(name.startswith("val/") for name in names):
        hint = f"; nothing is held out: {setting}."
    head = monitor.partition("/")[0]
    alike = [name for name in names if name.partition("/")[0] == head]
    listed = ", ".join((alike or names)[:_MANY])
    return (
        f"{callback} watches `monitor: {monitor}`, which this run does not log{hint} There are "
        f"{listed} and others: docs/metrics.md has them all."
    )
