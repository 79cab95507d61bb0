"""Train on the exactly solvable problems, and say how near the optimum the runs come.

    python experiments/optimum/run.py                 # all runs, about ten minutes on one core
    python experiments/optimum/run.py --beta 0.3 --problem 0 --seed 0

Results are appended to ``results.jsonl`` in the output folder; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import mean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.helpers.optimum import Outcome, solve

PROBLEMS, BETAS, SEEDS = (0, 1), (0.1, 0.3, 1.0), (0, 1, 2)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--problem", type=int, nargs="*", default=PROBLEMS)
    parser.add_argument("--beta", type=float, nargs="*", default=BETAS)
    parser.add_argument("--seed", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("runs/optimum"))
    return parser.parse_args()


def read(file: Path) -> list[Outcome]:
    """Outcomes of earlier calls."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def table(outcomes: list[Outcome]) -> str:
    """One row for each problem and β, as Markdown."""
    rows = [
        "| β | problem | score, mean | score, each seed | critic's EV | CPU s, longest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for beta, problem in sorted({(o.beta, o.problem) for o in outcomes}):
        group = [o for o in outcomes if (o.beta, o.problem) == (beta, problem)]
        each = " ".join(f"{o.score:.3f}" for o in sorted(group, key=lambda o: o.seed))
        explained = mean(o.explained_variance for o in group)
        longest = max(o.cpu_seconds for o in group)
        score = mean(o.score for o in group)
        rows.append(
            f"| {beta} | {problem} | {score:.3f} | {each} | {explained:.3f} | {longest:.1f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Run what is missing, and print the table."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    arguments = parse()
    file = arguments.out / "results.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    done = {(o.problem, o.beta, o.seed) for o in read(file)}
    for problem, beta, seed in product(arguments.problem, arguments.beta, arguments.seed):
        if (problem, beta, seed) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcome = solve(Path(folder), problem=problem, beta=beta, seed=seed)
        with file.open("a") as handle:
            handle.write(json.dumps(asdict(outcome)) + "\n")
        print(outcome, flush=True)
    print(table(read(file)))


if __name__ == "__main__":
    main()
