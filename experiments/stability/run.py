"""Sabotage tiny runs, with and without the mechanism against it, and lay the results out.

    python experiments/stability/run.py                       # all runs, resumable
    python experiments/stability/run.py --only hacking --seeds 0
    python experiments/stability/run.py --list

Each finished run is a line of ``results.jsonl`` in the output folder, and is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.stability.outcome import Outcome, quiet, run
from experiments.stability.scenarios import SCENARIOS
from experiments.stability.table import table
from ppo_lightning.io import write_text_atomic


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--list", action="store_true", help="list the runs and end")
    parser.add_argument("--out", type=Path, default=Path("runs/stability"))
    return parser.parse_args()


def read(file: Path) -> list[Outcome]:
    """Return the outcomes of earlier calls."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def main() -> None:
    """Run what is missing, print the table and write it."""
    given = parse()
    wanted = [
        (name, variant, seed)
        for name in given.only
        for variant in SCENARIOS[name].variants
        for seed in given.seeds
    ]
    wanted.sort(key=lambda key: key[1] == "all")  # what the bounds are for comes first
    file = given.out / "results.jsonl"
    done = {(o.scenario, o.variant, o.seed) for o in read(file)}
    missing = [key for key in wanted if key not in done]
    if given.list:
        for key in wanted:
            print("done   " if key in done else "missing", *key)
        return
    quiet()
    given.out.mkdir(parents=True, exist_ok=True)
    for number, (name, variant, seed) in enumerate(missing, start=1):
        outcome = run(name, variant, seed)
        with file.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(asdict(outcome)) + "\n")
        print(f"[{number}/{len(missing)}] {outcome.line()}", flush=True)
    text = table(read(file))
    print(f"\n{text}")
    write_text_atomic(given.out / "table.md", text + "\n")


if __name__ == "__main__":
    main()
