"""The page of all settings for the documentation: ``python -m ppo_lightning.configs.docs``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ppo_lightning.configs.buffer import BufferConfig
from ppo_lightning.configs.guards import GuardConfig
from ppo_lightning.configs.kl import KLConfig
from ppo_lightning.configs.models import CriticConfig, LoraConfig, PolicyConfig, ReferenceConfig
from ppo_lightning.configs.optim import GroupConfig, OptimizerConfig
from ppo_lightning.configs.ppo import PPOConfig
from ppo_lightning.configs.ptx import PTXConfig
from ppo_lightning.configs.reward_model import BackboneConfig, PreferenceConfig, ReadingConfig
from ppo_lightning.configs.rewards import Constraint, RewardProcessing, WeightSchedule
from ppo_lightning.configs.sampling import SamplingConfig
from ppo_lightning.configs.staleness import StalenessConfig
from ppo_lightning.configs.validation import ValidationConfig

SECTIONS: tuple[tuple[str, type, str], ...] = (
    ("model.init_args.policy", PolicyConfig, ""),
    ("model.init_args.policy.lora", LoraConfig, "Null trains all weights."),
    ("model.init_args.critic_model", CriticConfig, ""),
    ("model.init_args.reference", ReferenceConfig, ""),
    ("model.init_args.sampling", SamplingConfig, ""),
    ("model.init_args.ppo", PPOConfig, ""),
    ("model.init_args.kl", KLConfig, ""),
    (
        "model.init_args.actor",
        GroupConfig,
        "`model.init_args.critic` has the same keys; the default `lr` of the critic is `5e-06`.",
    ),
    ("model.init_args.optimizer", OptimizerConfig, ""),
    ("model.init_args.rewards[].weight", WeightSchedule, "Or a number."),
    (
        "model.init_args.rewards[].constraint",
        Constraint,
        "Null, the default, takes the weight.",
    ),
    ("model.init_args.reward_processing", RewardProcessing, ""),
    ("model.init_args.validation", ValidationConfig, ""),
    ("model.init_args.guards", GuardConfig, ""),
    ("model.init_args.staleness", StalenessConfig, ""),
    ("model.init_args.ptx", PTXConfig, "Null, the default, is PPO alone."),
    ("data.init_args.buffer", BufferConfig, ""),
    ("model.init_args.backbone", BackboneConfig, "Of `RewardModule`."),
    ("model.init_args.reading", ReadingConfig, "Of `RewardModule`."),
    ("model.init_args.preference", PreferenceConfig, "Of `RewardModule`."),
)
"""(where the section stands in a config, its class, a remark)"""

_INTRODUCTION = """\
# Configuration

Made from the code by `python -m ppo_lightning.configs.docs > docs/configuration.md`; change it
there.

Every section is a frozen dataclass that checks its own values. In Python it is built by name,
`PPOConfig(clip_range=0.1)`; in YAML it stands under the key given with it. A key that is not set
has the default below; what is called None here is `null` in YAML.

`ppo-lightning fit --config my.yaml --print_config` prints a whole config with all values. One value
can be set on the command line, without `init_args`: `--model.ppo.clip_range 0.1`.

Unless a section says otherwise it is of [`PPOModule`](reference/modules.md) and
[`RolloutDataModule`](reference/rollout.md), where the arguments that are no sections are listed
too, such as `rewards`, `gold` and `engine`, or `prompts` and `chat` of the data. `SFTModule` and
`RewardModule` share `policy`, `optimizer` and the learning rates' section, called `actor` in the
one and `group` in the other. `trainer` is Lightning's own `Trainer`.
"""

_HEADER = """\
| setting | type | default | what it is |
| --- | --- | --- | --- |
"""

_NAMES = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    NoneType: "null",
    Any: "anything",
}

_ARGUMENT = re.compile(r"    (\w+): (.*)")


def settings_markdown() -> str:
    """Return the page of all settings, as Markdown."""
    return "\n".join([_INTRODUCTION, *(_section(*section) for section in SECTIONS)])


def argument_docs(record: type) -> dict[str, str]:
    """Return what a class's docstring says of each argument, on one line each.

    Args:
        record: A class with a docstring of Google's form.
    """
    _, _, part = inspect.cleandoc(record.__doc__ or "").partition("Args:\n")
    found: dict[str, str] = {}
    name = ""
    for line in part.splitlines():
        if line and not line.startswith("    "):
            break  # the next section
        if match := _ARGUMENT.fullmatch(line):
            name = match[1]
            found[name] = match[2]
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found


def _section(place: str, record: type, remark: str) -> str:
    summary = inspect.cleandoc(record.__doc__ or "").split("\n\nArgs:")[0]
    docs, hints = argument_docs(record), get_type_hints(record)
    rows = "".join(
        _row([f"`{f.name}`", type_text(hints[f.name]), _default(f), docs[f.name]])
        for f in fields(record)
    )
    text = "\n\n".join(part for part in (summary, f"`{record.__name__}`. {remark}".strip()) if part)
    return f"## `{place}`\n\n{text}\n\n{_HEADER}{rows}"


def _row(cells: Iterable[str]) -> str:
    escaped = (cell.replace("``", "`").replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |\n"


def type_text(hint: Any) -> str:
    """Say in words what a setting may be.

    Args:
        hint: Annotation of the field, resolved.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in parts)
    if origin in (Union, UnionType):
        return " or ".join(type_text(part) for part in parts)
    if origin is tuple:
        return f"list of {len(parts)}: {', '.join(type_text(part) for part in parts)}"
    if origin is Sequence:
        what = type_text(parts[0])
        return f"list of {what}" if what.endswith("s") else f"list of {what}s"
    if origin in (Mapping, dict):
        return "keys with values"
    return "section" if is_dataclass(hint) else _NAMES[hint]


def _default(entry: Field[Any]) -> str:
    """Return the default as it would be written in YAML."""
    if entry.default_factory is not MISSING:
        return f"`{_plain(entry.default_factory())}`"
    return "required" if entry.default is MISSING else f"`{_plain(entry.default)}`"


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return f"{value:g}" if isinstance(value, float) and 0 < value < 1e-3 else str(value)


if __name__ == "__main__":
    sys.stdout.buffer.write(settings_markdown().encode("utf-8"))
