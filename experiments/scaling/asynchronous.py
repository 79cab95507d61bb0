"""Train on an exactly solvable problem with responses of older weights, and compare the scores.

    python experiments/scaling/asynchronous.py --group process    # AsyncEngine against the default
    python experiments/scaling/asynchronous.py --group lag        # forced lags, by what is done
    python experiments/scaling/asynchronous.py --table            # print what is there

Each finished run is a line of ``results.jsonl`` in the output folder, and is not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppo_lightning.configs import StalenessConfig
from ppo_lightning.metrics import read_metrics
from ppo_lightning.rollout import AsyncEngine
from tests.helpers.lagged import LaggedEngine
from tests.helpers.optimum import solve

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Two-sided 95 % quantiles of Student's t by number of differences."""

LAGS, SHARES, RULES = (1, 2, 4), (0.5, 1.0), ("correct", "use")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run.

    Args:
        variant: What was done; see ``variants``.
        problem: Seed of the problem.
        beta: KL coefficient.
        seed: Of the run.
        score: 0 is the reference, 1 the optimum.
        seconds: The fit took.
        lag: Mean over iterations of the mean lag of the buffer.
        importance: The same of the mean importance weight; None where nothing was corrected.
        capped: The same of the share at the cap.
    """

    variant: str
    problem: int
    beta: float
    seed: int
    score: float
    seconds: float
    lag: float
    importance: float | None
    capped: float | None


def variants(group: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Arguments of ``PPOModule`` by name; made anew for each run."""
    if group == "process":
        return {"synchronous": dict, "asynchronous": lambda: {"engine": AsyncEngine()}}
    # What is left after dropping is the same for every lag, and nothing if all are late.
    dropped = {"any lag, 50% late, drop": _lagged(1, 0.5, "drop")}
    return dropped | {
        f"lag {lag}, {share:.0%} late, {rule}": _lagged(lag, share, rule)
        for lag in LAGS
        for share in SHARES
        for rule in RULES
    }


def _lagged(lag: int, share: float, rule: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "engine": LaggedEngine(lag, share),
        "staleness": StalenessConfig(on_stale=rule),
    }


def run(
    variant: str,
    overrides: dict[str, Any],
    *,
    problem: int,
    beta: float,
    seed: int,
    **sizes: Any,
) -> Result:
    """Train once."""
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.perf_counter()
        outcome = solve(folder, problem=problem, beta=beta, seed=seed, **sizes, **overrides)
        seconds = time.perf_counter() - start
        stats = read_metrics(folder / "metrics.jsonl")
    return Result(
        variant=variant,
        problem=problem,
        beta=beta,
        seed=seed,
        score=outcome.score,
        seconds=seconds,
        lag=_mean([s.lag_mean for s in stats]) or 0.0,
        importance=_mean([s.importance_mean for s in stats]),
        capped=_mean([s.importance_capped_share for s in stats]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def read(file: Path) -> list[Result]:
    """Results of earlier calls."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def difference(results: Sequence[Result], variant: str, base: str) -> tuple[float, float, int]:
    """Mean difference of the scores to ``base``, run by run of one problem and seed.

    Returns:
        The mean, half the width of its 95 % interval (Student), and the number of pairs.
    """
    scores = {(r.variant, r.problem, r.seed): r.score for r in results}
    pairs = [
        scores[variant, problem, seed] - score
        for (name, problem, seed), score in scores.items()
        if name == base and (variant, problem, seed) in scores
    ]
    if len(pairs) not in T_95:
        return (mean(pairs) if pairs else float("nan")), float("nan"), len(pairs)
    return mean(pairs), T_95[len(pairs)] * stdev(pairs) / len(pairs) ** 0.5, len(pairs)


def table(results: Sequence[Result]) -> str:
    """One row for each variant, as Markdown."""
    rows = [
        "| variant | score, mean | each | less synchronous, 95 % | lag | weight | at the cap | s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for variant in dict.fromkeys(r.variant for r in results):
        group = sorted(
            (r for r in results if r.variant == variant), key=lambda r: (r.problem, r.seed)
        )
        off, half, count = difference(results, variant, "synchronous")
        spread = "" if half != half else f" ± {half:.3f}"  # one pair has none
        against = "—" if variant == "synchronous" else f"{off:+.3f}{spread} ({count})"
        numbers = [_mean([getattr(r, name) for r in group]) for name in ("importance", "capped")]
        weight, capped = ("—" if n is None else f"{n:.3f}" for n in numbers)
        each = " ".join(f"{r.score:.3f}" for r in group)
        rows.append(
            f"| {variant} | {mean(r.score for r in group):.3f} | {each} | {against} | "
            f"{mean(r.lag for r in group):.2f} | {weight} | {capped} | "
            f"{mean(r.seconds for r in group):.0f} |"
        )
    return "\n".join(rows)


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--group", choices=("process", "lag"), default="process")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="those with a text in them")
    parser.add_argument("--problem", type=int, nargs="+", default=[0])
    parser.add_argument("--beta", type=float, default=0.3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("runs/asynchronous"))
    parser.add_argument("--table", action="store_true", help="run nothing")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    asked = parse(given)
    file = asked.out / "results.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    wanted = variants(asked.group)
    if asked.only:
        wanted = {n: made for n, made in wanted.items() if any(text in n for text in asked.only)}
    sizes = {"iterations": asked.iterations, "rollouts": asked.rollouts}
    for seed in [] if asked.table else asked.seeds:
        for problem in asked.problem:
            for name, made in wanted.items():
                done = {(r.variant, r.problem, r.beta, r.seed) for r in read(file)}
                if (name, problem, asked.beta, seed) in done:
                    continue
                where = {"problem": problem, "beta": asked.beta, "seed": seed}
                result = run(name, made(), **where, **sizes)
                with file.open("a", encoding="utf-8") as handle:
                    handle.write(json.dumps(asdict(result)) + "\n")
                print(result, flush=True)
    print(table(read(file)))


if __name__ == "__main__":
    main()
