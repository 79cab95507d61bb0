"""What is varied: ``key=0.1,0.2``, and for a search ``key=0.1..0.3`` or ``key=log:1e-6..1e-4``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ppo_lightning.errors import ConfigError

_LOG = "log:"
_RANGE = re.compile(r"(?P<log>log:)?(?P<low>[-+.\w]*)\.\.(?P<high>[-+.\w]*)")
_FORM = "`KEY=VALUE,VALUE`, as `model.init_args.ppo.clip_range=0.1,0.3`"
OWN_KEYS = {
    "seed_everything": "give seeds by `--seeds`",
    "ckpt_path": "a run that was cut off goes on by itself",
    "trainer.default_root_dir": "each run has a folder of its own below `--out`",
    "trainer.logger": "each run writes for TensorBoard into its own folder",
    "config": "vary single settings, or start a sweep for each config",
}
"""Settings that a sweep has in its own hands, and what to do instead of varying them."""


@dataclass(frozen=True)
class Variation:
    """A setting and the values that it takes in turn.

    Args:
        key: As it was written; ``init_args`` may be left out of it.
        values: Parsed as YAML; at least one, all different.
    """

    key: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        _check_key(self.key)
        if not self.values:
            raise ConfigError(f"`--vary {self.key}=` has no values; give them as {_FORM}.")
        texts = [written(value) for value in self.values]
        for text in texts:
            if texts.count(text) > 1:
                raise ConfigError(f"`--vary {self.key}`: the value {text} stands there twice.")


@dataclass(frozen=True)
class Range:
    """A setting and the range that a search looks for it in, ends included.

    Args:
        key: As it was written; ``init_args`` may be left out of it.
        low: Lower end; where both ends are whole numbers, so are the values.
        high: Upper end, above ``low``.
        log: Whether equal factors count alike, rather than equal differences.
    """

    key: str
    low: int | float
    high: int | float
    log: bool = False

    def __post_init__(self) -> None:
        _check_key(self.key)
        if not self.low < self.high:
            raise ConfigError(
                f"`--vary {self.key}={self}`: the lower end must be below the upper one."
            )
        if self.log and self.low <= 0:
            raise ConfigError(
                f"`--vary {self.key}={self}`: a range on a log scale must begin above 0."
            )

    def __str__(self) -> str:
        return f"{_LOG if self.log else ''}{written(self.low)}..{written(self.high)}"


def parse_vary(text: str) -> Variation | Range:
    """Read what was given to ``--vary``.

    Args:
        text: ``KEY=VALUES``. Values are parsed as YAML, with commas between them: a list is
            ``[1, 2]``, a part of one's own ``{class_path: module.Class}``.

    Raises:
        ConfigError: Not of this form, no values, a value twice, a range the wrong way round, or a
            setting that a sweep has in its own hands.
    """
    key, equals, values = text.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not key:
        raise ConfigError(f"`--vary {text}` cannot be read; give it as {_FORM}.")
    if found := _RANGE.fullmatch(values.strip()):
        low, high = (_number(found[end], text) for end in ("low", "high"))
        if isinstance(low, float) or isinstance(high, float):
            low, high = float(low), float(high)
        return Range(key, low, high, log=found["log"] is not None)
    return Variation(key, tuple(_parsed(values, text)))


def check_keys(varied: Sequence[Variation | Range], *, together: bool) -> None:
    """Refuse a setting that is varied twice.

    Args:
        varied: In the order given.
        together: Whether several are set at once (a grid, a search): then none may lie inside
            another.

    Raises:
        ConfigError: Names the setting.
    """
    if not varied:
        raise ConfigError(f"nothing is varied: give `--vary` with {_FORM}.")
    keys = [canonical(one.key) for one in varied]
    for place, (one, key) in enumerate(zip(varied, keys, strict=True)):
        if key in keys[:place]:
            raise ConfigError(
                f"`--vary {one.key}` is given twice; put all its values behind one `--vary`."
            )
        inside = [other for other in keys if other != key and key.startswith((f"{other}.",))]
        if together and inside:
            raise ConfigError(
                f"`--vary {one.key}` lies inside `{inside[0]}`, which is varied, too, and the two "
                "cannot be set together; vary one of them."
            )


def canonical(key: str) -> str:
    """Return a key without ``init_args``, which may be left out of it."""
    return ".".join(part for part in key.split(".") if part != "init_args")


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return names for settings: the last part of each key, or more where that is not enough.

    Args:
        keys: All different, also without ``init_args``.
    """
    parts = {key: canonical(key).split(".") for key in keys}
    names = {}
    for key, own in parts.items():
        others = [other for other in parts if other != key]
        depth = next(
            n
            for n in range(1, len(own) + 1)
            if n == len(own) or all(parts[other][-n:] != own[-n:] for other in others)
        )
        names[key] = ".".join(own[-depth:])
    return names


def written(value: Any) -> str:
    """Write a value as YAML on one line, as an option of the command line takes it.

    A text stands there as it is: around it, quotes would become a part of it.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(value, ensure_ascii=False, default=str)


def _check_key(key: str) -> None:
    instead = OWN_KEYS.get(canonical(key))
    if instead is not None:
        raise ConfigError(f"`--vary {key}`: a sweep sets it itself; {instead}.")
    if not all(key.split(".")):
        raise ConfigError(f"`--vary {key}`: a part of the key is empty.")


def _parsed(values: str, text: str) -> list[Any]:
    import yaml
    from jsonargparse import get_loader  # reads `1e-5` as a number, which YAML itself does not

    try:
        found = get_loader("yaml")(f"[{values}]")
    except yaml.YAMLError as error:
        raise ConfigError(
            f"`--vary {text}`: the values are no YAML; put texts with special characters in quotes."
        ) from error
    if not isinstance(found, list):
        raise ConfigError(f"`--vary {text}` cannot be read; give it as {_FORM}.")
    return found


def _number(text: str, whole: str) -> int | float:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if math.isfinite(number):
            return number
    raise ConfigError(f"`--vary {whole}`: the ends of a range must be numbers, got `{text}`.")
