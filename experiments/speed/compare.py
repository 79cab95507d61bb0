"""This project and a peer on the same work, in alternation; prints ratios with their spread.

    python experiments/speed/compare.py --peer "python trl_ppo.py" --out runs/speed/compare.jsonl
    python experiments/speed/compare.py --peer "…" --sizes M --modes variable --variants bf16 shared

``--peer`` is a command that takes ``--size --mode --iters --threads`` and prints one JSON line with
the keys that ``ppo.py`` prints. Each run is a process of its own. Its line goes to ``--out`` at
once, and a run that is there already is not made again: the script can be stopped and called anew.
Variants of this project are compared with the peer as it is. Ratios are the peer's time over ours,
of an iteration and of a token (of prompts and responses), since lengths are random: wall time on
two threads on a quiet machine, else processor time of one thread. Rounds of ours differ in the
seed, so that their lengths average out; the peer has one, so that the range over rounds is not
all of its spread. Runs are known by their names alone: after a change of the code, name another
``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.speed import rows
from experiments.speed.rows import Run
from experiments.speed.sizes import SIZES

ROOT = Path(__file__).resolve().parents[2]
OURS = f"{sys.executable} {Path(__file__).with_name('ppo.py')}"

VARIANTS = {
    "fp32": (),
    "bf16": ("--precision", "bf16-mixed"),
    "shared": ("--shared",),
    "bf16 sampler": ("--precision", "bf16-mixed", "--sampler-dtype", "bfloat16"),
    "lora": ("--lora",),
    "padded": ("--padded",),
}
"""Options of ``ppo.py``."""

ITERATIONS = {"S": 4, "M": 4, "L": 3}
"""The first is a warm-up."""


def planned(given: Any) -> Iterator[Run]:
    """All runs, those that are compared beside each other."""
    for size in given.sizes:
        for mode in given.modes:
            for number in range(given.rounds):
                for who in ("peer", *given.variants):
                    yield Run(who, size, mode, number, given.threads)


def make(run: Run, peer: str) -> dict[str, Any]:
    """Do the work once."""
    begin = peer if run.who == "peer" else OURS
    command = [
        *shlex.split(begin),
        *("--size", run.size, "--mode", run.mode, "--iters", str(ITERATIONS[run.size])),
        *("--threads", str(run.threads)),
        *(() if run.who == "peer" else VARIANTS[run.who]),
    ]
    if run.who != "peer":
        command += ["--seed", str(run.round)]
    env = os.environ | {"OMP_NUM_THREADS": str(run.threads)}
    finished = subprocess.run(command, env=env, capture_output=True, text=True)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    if finished.returncode or not lines:
        sys.exit(f"{shlex.join(command)} failed:\n{finished.stderr[-2000:]}")
    return dict(json.loads(lines[-1]))


def seconds(result: dict[str, Any], threads: int) -> float:
    """Time of an iteration: wall time, or of one thread the processor's."""
    key = "s_per_iter" if threads > 1 else "cpu_s_per_iter"
    return float(result[key]["total"])


def per_token(result: dict[str, Any], threads: int) -> float:
    """Time of a token, of prompts and responses: of all iterations, as far as they are told."""
    mean = result["response_tokens_per_iter"] / result["response_tokens_per_s"]
    return (mean if threads > 1 else seconds(result, threads)) / tokens(result)


def ratios(runs: dict[Run, dict[str, Any]], given: Any) -> Iterator[str]:
    """Say how many times as long the peer takes, for each size, mode and variant."""
    for size in given.sizes:
        for mode in given.modes:
            for who in given.variants:
                pairs = [
                    (runs[peer], runs[own])
                    for number in range(given.rounds)
                    if (peer := Run("peer", size, mode, number, given.threads)) in runs
                    and (own := Run(who, size, mode, number, given.threads)) in runs
                ]
                if pairs:
                    yield _line(f"{size} {mode} {who}", pairs, given.threads)


def _line(name: str, pairs: Sequence[tuple[Any, Any]], threads: int) -> str:
    whole = [seconds(peer, threads) / seconds(own, threads) for peer, own in pairs]
    token = [per_token(peer, threads) / per_token(own, threads) for peer, own in pairs]
    return f"{name}: an iteration {_median(whole)}, a token {_median(token)}, {len(pairs)} rounds"


def _median(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def tokens(result: dict[str, Any]) -> float:
    """Tokens of an iteration's prompts and responses."""
    prompts = result["rollout"] * SIZES[result["size"]].prompt_len
    return float(result["response_tokens_per_iter"] + prompts)


def main() -> None:
    """Make the runs that are missing, and print the ratios."""
    given = parser().parse_args()
    known = rows.complete(given.out, Run, planned(given), lambda run: make(run, given.peer))
    print("\n".join(ratios(known, given)))


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument(
        "--peer", required=True, help="command; what it must take and print stands above"
    )
    made.add_argument("--sizes", nargs="+", choices=list(ITERATIONS), default=list(ITERATIONS))
    made.add_argument("--modes", nargs="+", default=["variable", "fixed"])
    made.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["fp32"])
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--out", type=Path, default=ROOT / "runs" / "speed" / "compare.jsonl")
    return made


if __name__ == "__main__":
    main()
