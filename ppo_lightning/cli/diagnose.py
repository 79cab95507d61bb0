"""``ppo-lightning diagnose``: what a run suffers from, by its log."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_lightning.cli.arguments import Arguments
from ppo_lightning.errors import ConfigError, DataError, first_line, nearest

if TYPE_CHECKING:
    from ppo_lightning.diagnostics import Rule, RuleLimits
    from ppo_lightning.reporting import ColumnMap, Examination

_LIMITS = "limits."
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    options = Arguments(
        prog="ppo-lightning diagnose",
        description="Read the log of a PPO run, of this project or another framework, and name its "
        "illnesses with evidence, likely causes and remedies. Exit code 0: healthy, or something "
        "to watch; 3: ill; 4: critical; 2: there is nothing that can be judged.",
    )
    options.add_argument(
        "path",
        help="folder of a run, or its metrics.jsonl, CSV, JSONL or TensorBoard event file",
    )
    _add_columns(options)
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument(
        "--html", metavar="FILE", help="write a page with plots and texts as well (extra `report`)"
    )
    options.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="ILLNESS",
        help="do not look for it; may be given again",
    )
    options.add_argument(
        "--rules",
        action="append",
        default=[],
        metavar="CLASS_PATH",
        help="a rule of your own, a subclass of ppo_lightning.diagnostics.Rule; may be given again",
    )
    _add_limits(options)
    return options


def _add_columns(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--columns",
        metavar="NAME|FILE",
        help="what the columns mean: trl, openrlhf, verl, plain, or a YAML file of `theirs: "
        "rollout/kl_ref`; found out by their names if not given",
    )
    options.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="THEIRS=NAME",
        help="one column more, such as `kl=rollout/kl_ref`; may be given again",
    )


def _add_limits(options: argparse.ArgumentParser) -> None:
    from ppo_lightning.diagnostics import RuleLimits

    group = options.add_argument_group("thresholds, see docs/troubleshooting.md")
    for field in fields(RuleLimits):
        kind = type(field.default)
        group.add_argument(
            f"--{_LIMITS}{field.name}", type=kind, metavar="VALUE", help=f"default {field.default}"
        )


def main(arguments: Sequence[str]) -> int:
    """Run the command; see ``parser`` for its options."""
    given = parser().parse_args(arguments)
    found = _examined(given)
    if given.html is not None:
        _write_page(found, Path(given.html))
    if given.json:
        from ppo_lightning.reporting import report_record

        print(_printable(json.dumps(report_record(found), ensure_ascii=False)))
    else:
        from ppo_lightning.reporting import report_text

        print(_printable(report_text(found)))
        if given.html is not None:
            print(_printable(f"\npage: {given.html}"))
    return found.exit_code


def _printable(text: str) -> str:
    """Replace what has no UTF-8, as in odd names of files, and what a terminal would obey."""
    known = text.encode("utf-8", "replace").decode("utf-8")
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", known)


def _examined(given: argparse.Namespace) -> Examination:
    from ppo_lightning.diagnostics import rules_with
    from ppo_lightning.reporting import examine, load_run

    own = [_rule(path) for path in given.rules]
    rules = rules_with(own, given.ignore, option="`--ignore`")
    limits = _limits(given)
    columns, spare = _columns(given)
    run = load_run(Path(given.path), columns=columns, pairs=_pairs(given.column), spare=spare)
    return examine(run, rules=rules, limits=limits, ignored=given.ignore)


def _limits(given: argparse.Namespace) -> RuleLimits:
    from ppo_lightning.diagnostics import RuleLimits

    names = [field.name for field in fields(RuleLimits)]
    values = {name: getattr(given, _LIMITS + name) for name in names}
    try:
        return RuleLimits(**{name: value for name, value in values.items() if value is not None})
    except ValueError as error:
        raise ConfigError(f"`--limits`: {error}") from error


# ---------------------------------------------------------------------- columns


def _columns(given: argparse.Namespace) -> tuple[ColumnMap | None, dict[str, str]]:
    """Return a known map, if one is named, or the columns of a file."""
    from ppo_lightning.reporting import MAPS

    name = given.columns
    if name is None or name in MAPS:
        return (None if name is None else MAPS[name]), {}
    if not Path(name).is_file():
        near = nearest(name, MAPS)
        meant = f" Did you mean `{near}`?" if near else ""
        raise ConfigError(
            f"`--columns {name}`: give one of {', '.join(MAPS)}, or a YAML file.{meant}"
        )
    return None, _column_file(Path(name))


def _pairs(given: Sequence[str]) -> dict[str, str]:
    """Return the user's own columns."""
    pairs: dict[str, str] = {}
    for theirs, name in map(_pair, given):
        if theirs in pairs:
            raise ConfigError(f"`--column {theirs}=…` is given twice; leave one out.")
        pairs[theirs] = name
    return pairs


def _pair(text: str) -> tuple[str, str]:
    theirs, sign, name = text.rpartition("=")
    if not (theirs and sign and name):
        raise ConfigError(f"`--column {text}`: write it as THEIRS=NAME, such as kl=rollout/kl_ref.")
    return theirs, name


def _column_file(path: Path) -> dict[str, str]:
    import yaml

    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"is not YAML: {first_line(error)}.", path=path) from error
    if not isinstance(content, Mapping) or not content:
        raise DataError("must hold a mapping of their column to a name of this project.", path=path)
    return {str(theirs): str(name) for theirs, name in content.items()}


# ---------------------------------------------------------------------- rules


def _rule(path: str) -> Rule:
    """Make a rule of the user's own."""
    from ppo_lightning.diagnostics import Rule

    module, _, name = path.rpartition(".")
    try:
        kind = getattr(import_module(module), name)
    except Exception as error:  # the user's module runs here, and may raise anything
        raise ConfigError(
            f"`--rules {path}` cannot be imported: {first_line(error)}. Give `module.Class`, of a "
            "module that Python finds (PYTHONPATH)."
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Rule)):
        raise ConfigError(
            f"`--rules {path}` is no rule: derive it from `ppo_lightning.diagnostics.Rule`."
        )
    try:
        return kind()
    except Exception as error:
        raise ConfigError(
            f"`--rules {path}` cannot be made without arguments: {first_line(error)}."
        ) from error


# ---------------------------------------------------------------------- the page


def _write_page(found: Examination, path: Path) -> None:
    from ppo_lightning.io import write_text_atomic
    from ppo_lightning.reporting import report_html

    if path.is_dir():
        raise ConfigError(f"`--html {path}` is a folder: give the name of a file in it.")
    if path.exists() and path.samefile(found.run.path):
        raise ConfigError(f"`--html {path}` is the log itself: give another name.")
    if path.exists() and not path.is_file():  # as a device, whose place a file would take
        raise ConfigError(f"`--html {path}` is no ordinary file: give another name.")
    write_text_atomic(path, report_html(found))
