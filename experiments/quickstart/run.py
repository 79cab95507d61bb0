"""Train a small real language model with PPO and say what has changed.

    python experiments/quickstart/run.py                  # one run, under ten minutes on two cores
    python experiments/quickstart/run.py --seed 0 1 2     # and a table of the three
    python experiments/quickstart/run.py -- --trainer.max_epochs 4    # options of `fit`

Each run is ``ppo-lightning fit --config ppo-lightning:quickstart`` in a process of its own, so that
its peak memory is its own too. A run whose summary is there is not repeated, one that was cut off
goes on from its last checkpoint (its time is then that of the last part). Both hold for the same
config and options only, which are kept in the run's folder; others need another ``--out``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppo_lightning.cli.config_files import prepare_arguments
from ppo_lightning.errors import ConfigError, DataError
from ppo_lightning.io import read_json, read_text, write_json_atomic, write_text_atomic

ROOT = Path(__file__).resolve().parents[2]

SUMMARY = "summary.json"

Changes = Mapping[str, Mapping[str, float]]

CRITERIA: Mapping[str, Callable[[Changes], bool]] = {
    "proxy gains at least 0.25": lambda c: c["proxy reward"]["gain"] >= 0.25,
    "proxy gain's interval is above 0.1": lambda c: c["proxy reward"]["low"] > 0.1,
    "judge's gain's interval is above 0": lambda c: c["gold reward"]["low"] > 0,
    "KL below 10 nats": lambda c: c["KL to reference, nats"]["after"] < 10,
    "log p of the reference within 1 nat": lambda c: c["log p_ref, nats per token"]["gain"] >= -1,
    "repeated bigrams within 0.05": lambda c: c["repeated bigrams"]["gain"] <= 0.05,
    "distinct openings at least half": lambda c: (
        c["distinct openings"]["after"] >= c["distinct openings"]["before"] / 2
    ),
}
"""What a run must show."""

COLUMNS = (
    ("proxy", "proxy reward"),
    ("judge", "gold reward"),
    ("KL, nats", "KL to reference, nats"),
    ("entropy", "entropy, nats per token"),
    ("length", "length, tokens"),
)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--config", default="ppo-lightning:quickstart")
    parser.add_argument("options", nargs="*", help="after `--`: options of `ppo-lightning fit`")
    return parser.parse_args()


def train(out: Path, seed: int, config: str, options: Sequence[str]) -> Path:
    """Run one seed, unless it is done; return its folder."""
    folder = out / f"seed_{seed}"
    check_same_run(folder, {"config": config_text(config), "options": list(options)})
    if (folder / SUMMARY).exists():
        print(f"seed {seed}: already done, not repeated: {folder}")
        return folder
    logger = "--trainer.logger"
    command = [
        *(sys.executable, "-m", "ppo_lightning.cli.main", "fit", "--config", config),
        *("--seed_everything", str(seed)),
        *(logger, "lightning.pytorch.loggers.TensorBoardLogger"),
        *(f"{logger}.save_dir", str(out), f"{logger}.name", "", f"{logger}.version", folder.name),
        *options,
    ]
    checkpoint = folder / "checkpoints" / "last.ckpt"
    if checkpoint.exists():
        print(f"seed {seed}: goes on from {checkpoint}")
        command += ["--ckpt_path", str(checkpoint)]
    began = time.perf_counter()
    fit(command)
    if not (folder / SUMMARY).exists():
        sys.exit(
            f"seed {seed}: the run has left no {SUMMARY} in {folder}: nothing was compared, or the "
            "options turned its table off. To run it anew, delete the folder."
        )
    print(f"\nseed {seed}: {time.perf_counter() - began:.0f} s from start to end, in {folder}\n")
    return folder


def fit(command: Sequence[str]) -> None:
    """Run a command that finds this checkout; where it fails it has said why, so end like it."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    if done.returncode:
        sys.exit(done.returncode)


def check_same_run(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Keep what a run is made of in its folder; refuse a folder with a run of something else."""
    kept, begun = folder / "command.json", any(folder.glob("checkpoints/*.ckpt"))
    if not begun and not (folder / SUMMARY).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(kept, wanted)
        return
    found = read_json(kept) if kept.exists() else {}
    others = [key for key, value in wanted.items() if found.get(key) != value]
    if others:
        sys.exit(
            f"{folder} holds a run with other {' and other '.join(others)}, which is neither shown "
            "nor continued in the place of this one. Choose another folder with `--out`, or delete "
            "that one."
        )


def config_text(config: str) -> str:
    """Return what a config says: a file, a shipped one by its name, or the text itself."""
    _, files = prepare_arguments(["--config", config])
    return "".join(map(read_text, files)) or config


def report(summaries: Mapping[int, Mapping[str, Any]]) -> str:
    """Lay all seeds out as one Markdown table, and say which criteria fail."""
    names = [name for name, _ in COLUMNS]
    lines = [
        f"| seed | {' | '.join(names)} | memory, GiB | wall, s | processor, s | criteria |",
        "|" + " --- |" * (len(names) + 5),
    ]
    for seed, summary in summaries.items():
        cells = [_cell(summary["changes"].get(key)) for _, key in COLUMNS]
        cost = (
            f"{summary['memory_gib']:.2f}",
            f"{summary['seconds']:.0f}",
            f"{summary['cpu_seconds']:.0f}",
        )
        missed = [name for name, holds in CRITERIA.items() if not _holds(holds, summary["changes"])]
        verdict = "all met" if not missed else "missed: " + "; ".join(missed)
        lines.append(f"| {' | '.join([str(seed), *cells, *cost, verdict])} |")
    return "\n".join(lines)


def _holds(criterion: Callable[[Changes], bool], changes: Changes) -> bool:
    try:
        return criterion(changes)
    except KeyError:  # not measured, so not shown
        return False


def _cell(change: Mapping[str, float] | None) -> str:
    if change is None:
        return ""
    ends = f"{change['before']:.2f} → {change['after']:.2f}"
    return f"{ends} ({change['low']:+.2f} to {change['high']:+.2f})"


def main() -> None:
    """Run all seeds and print their table."""
    given = parse()
    try:
        config_text(given.config)
    except (ConfigError, DataError) as error:
        sys.exit(str(error))
    summaries = {
        seed: read_json(train(given.out, seed, given.config, given.options) / SUMMARY)
        for seed in given.seed
    }
    table = report(summaries)
    print(f"Before → after (95 % interval of the gain)\n\n{table}")
    write_text_atomic(given.out / "table.md", table + "\n")


if __name__ == "__main__":
    main()
