"""What the recipes share: steps that are done once, runs of the command line, intervals, tables.

A recipe is a row of steps. Each leaves its result in a file of its own in the recipe's folder, and
a step whose file is there, made of the same ingredients, is not taken again (``Steps``). A run of
``ppo-lightning fit`` that was cut off goes on from its last checkpoint (``fit``). Both recipes
(``reviews.py``, ``chat.py``) and their row of steps (``recipe.py``) use this file; it knows none.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from ppo_lightning.functional import bootstrap_interval
from ppo_lightning.io import read_json, read_jsonl, read_text, write_json_atomic, write_text_atomic

ROOT = Path(__file__).resolve().parents[2]

CONFIGS = ROOT / "configs" / "recipes"

Result = dict[str, Any]


class Steps:
    """Take the steps of a recipe in order; pass over those that are done.

    ``<folder>/<name>.json`` holds a step's result, with what it was made of. Where that has
    changed, and so where the result of a step before it has, the recipe ends and says what to do:
    figures of two different runs are never mixed, and nothing is deleted.

    Args:
        folder: Of the recipe.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told: set[str] = set()  # steps whose result is known to be there
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, name: str, make: Callable[[], Result], *, of: Any) -> Result:
        """Return the result of a step, made now or by an earlier call.

        Args:
            name: Also of its file.
            make: Does the work; returns what JSON can hold.
            of: What the result depends on, as JSON can hold it; a file or folder is named by
                ``digest``.
        """
        file, made_of = self.folder / f"{name}.json", plain(of)
        kept = read_json(file) if file.exists() else None
        begun = self.folder / f"{name}.begun.json"
        known = kept["of"] if kept else read_json(begun) if begun.exists() else made_of
        if known != made_of:
            changed = sorted(k for k in {*known, *made_of} if known.get(k) != made_of.get(k))
            sys.exit(
                f"{self.folder}: the step `{name}` was begun with other {' and '.join(changed)}. "
                f"Choose another folder with `--out`, or delete {self.folder / name}* and what "
                "comes after it."
            )
        if kept:
            if name not in self._told:
                print(f"{name}: done before, in {kept['seconds']:.0f} s", flush=True)
            self._told.add(name)
            return dict(kept["result"])
        write_json_atomic(begun, made_of)
        print(f"{name}: begins", flush=True)
        began = time.perf_counter()
        result = plain(make())
        seconds = time.perf_counter() - began
        write_json_atomic(file, {"of": made_of, "result": result, "seconds": seconds})
        begun.unlink()
        self._told.add(name)
        print(f"{name}: {seconds:.0f} s", flush=True)
        return dict(result)

    def seconds(self, name: str) -> float:
        """Wall time of a step that is done; of its last part, if it was cut off."""
        return float(read_json(self.folder / f"{name}.json")["seconds"])


def plain(value: Any) -> Any:
    """Return what JSON would give back: paths as text, tuples as lists."""
    return json.loads(json.dumps(value, default=str))


def digest(*paths: Path) -> str:
    """Name the content of files: other content, other name. Of YAML the comments do not count."""
    found = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        if path.suffix == ".yaml":
            content = json.dumps(yaml.safe_load(content)).encode()
        found.update(content)
    return found.hexdigest()[:16]


def fit(config: Path, folder: Path, options: Sequence[str] = (), *, seed: int = 0) -> Path:
    """Run ``ppo-lightning fit`` in a process of its own, or go on with a run that was cut off.

    Args:
        config: YAML file.
        folder: Of the run, for all its parts.
        options: More of the command line; they come last and win.
        seed: Of everything.

    Returns:
        The folder. Its ``model`` is what the run has left.
    """
    logger = "--trainer.logger"
    command(
        *("fit", "--config", config, "--seed_everything", seed),
        *("--trainer.default_root_dir", folder),
        *(logger, "lightning.pytorch.loggers.TensorBoardLogger"),
        *(f"{logger}.save_dir", folder.parent, f"{logger}.name", ""),
        *(f"{logger}.version", folder.name, "--ckpt_path", "last"),
        *options,
    )
    return folder


def validate(config: Path, folder: Path, options: Sequence[str] = ()) -> dict[str, float]:
    """Return what ``ppo-lightning validate`` finds of the model that a run will begin with."""
    logger = "--trainer.logger"
    command(
        *("validate", "--config", config, *options),
        *(logger, "lightning.pytorch.loggers.CSVLogger", f"{logger}.save_dir", folder.parent),
        *(f"{logger}.name", "", f"{logger}.version", folder.name),
    )
    (row,) = csv.DictReader(io.StringIO(read_text(folder / "metrics.csv")))
    return {name: float(value) for name, value in row.items() if value}


def command(*arguments: object, allowed: Collection[int] = (0,)) -> None:
    """Run ``ppo-lightning`` of this checkout; where it fails it has said why, so end like it.

    Args:
        arguments: Of the command line.
        allowed: Exit codes that are no failure.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "ppo_lightning.cli.main", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    if done.returncode not in allowed:
        sys.exit(done.returncode)


def last_values(folder: Path, prefix: str) -> dict[str, float]:
    """Return the newest of each metric of a run with names that begin so, and the first beside."""
    found: dict[str, float] = {}
    for _, row in read_jsonl(folder / "metrics.jsonl"):
        for name, value in row.items():
            if name.startswith(prefix) and value is not None:
                found.setdefault(f"first {name}", value)
                found[name] = value
    return found


def mean_with_interval(values: Sequence[float]) -> dict[str, float]:
    """Return the mean of independent numbers and its 95 % interval: ``mean``, ``low``, ``high``."""
    low, high = bootstrap_interval(values)
    return {"mean": fmean(values), "low": low, "high": high, "count": len(values)}


def wins(good: Iterable[float], bad: Iterable[float]) -> list[float]:
    """Whether each good text scores above its bad one: 1, 0, or a half where they are equal."""
    return [(a > b) + 0.5 * (a == b) for a, b in zip(good, bad, strict=True)]


def shown(change: Mapping[str, float]) -> str:
    """Write a change as ``before → after (interval of the gain)``."""
    ends = f"{change['before']:.2f} → {change['after']:.2f}"
    return f"{ends} ({change['low']:+.3f} to {change['high']:+.3f})"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay rows out as a Markdown table; line ends and bars in cells are made harmless."""
    lines = [_row(head), _row(["---"] * len(head)), *map(_row, rows)]
    return "\n".join(lines)


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(" ".join(str(c).split()).replace("|", "\\|") for c in cells) + " |"


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write one object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    return path


def parser_of(text: str | None, *, out: Path) -> argparse.ArgumentParser:
    """Return the options that every recipe has."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="minutes instead of an hour")
    parser.add_argument("--seed", type=int, nargs="+", default=None, help="of PPO")
    parser.add_argument("--out", type=Path, default=None, help=f"default: {out}, {out}-small")
    return parser
