"""Throughput of several processes over that of one, in alternation, on the same global batch.

    python experiments/scaling/ranks.py --size M --mode variable --rounds 5
    python experiments/scaling/ranks.py --strategy fsdp --ranks 2 --rounds 3

Each process has one thread and a core of its own (``sched_setaffinity``). A round is one run with a
single process and one with several; the first iteration of a run is a warm-up. Printed is, for each
round, the ratio of the wall time of an iteration, and the median with its range; ``--out`` gets a
JSON line for each run. Meant for a quiet machine: anything else takes a core from one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.speed import ppo
from experiments.speed.sizes import SIZES


def main() -> None:
    """Run the rounds."""
    given = parser().parse_args()
    if given.worker:
        work(given)
        return
    ratios = []
    for number in range(given.rounds):
        alone, together = (launch(given, ranks) for ranks in (1, given.ranks))
        ratios.append(alone["s_per_iter"] / together["s_per_iter"])
        print(f"round {number}: {ratios[-1]:.3f}", json.dumps([alone, together]), flush=True)
        if given.out:
            with open(given.out, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(run) + "\n" for run in (alone, together))
    print(
        f"{given.ranks} processes over one, {given.size} {given.mode}, {given.strategy}: "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def launch(given: Any, ranks: int) -> dict[str, Any]:
    """Start the processes of a run; returns the first one's line."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    names = ("size", "mode", "iters", "strategy", "precision")
    options = [text for name in names for text in (f"--{name}", str(getattr(given, name)))]
    command = [sys.executable, __file__, "--worker", "--ranks", str(ranks), *options]
    workers = [
        subprocess.Popen(
            command,
            env={**os.environ, **_torchrun(rank, ranks, port), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed, _ = workers[0].communicate()
    if any(worker.wait() for worker in workers):
        raise SystemExit("a process failed; its error is above.")
    line: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return line


def _torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives a process."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": port}
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    texts = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "ranks"}
    return {name: str(value) for name, value in (numbers | sizes).items()} | texts


def work(given: Any) -> None:
    """Be one process of a run."""
    import torch

    from ppo_lightning.modules import FSDP2Strategy

    os.sched_setaffinity(0, {int(os.environ["RANK"])})
    torch.set_num_threads(1)
    ppo.quieten()
    clock, size = ppo.Clock(), SIZES[given.size]
    several = FSDP2Strategy() if given.strategy == "fsdp" else given.strategy
    options = ppo.options(mode=given.mode, iters=given.iters, precision=given.precision)
    with tempfile.TemporaryDirectory() as folder:
        ppo.run(
            size,
            options,
            Path(folder),
            clock,
            devices=given.ranks,
            strategy=several if given.ranks > 1 else "auto",
        )
    used = clock.iterations[1:]
    stages = ("gen", "fwd", "update", "total")
    medians = {name: statistics.median(row[name] for row in used) for name in stages}
    print(
        json.dumps(
            {
                "ranks": given.ranks,
                "s_per_iter": round(medians["total"], 4),
                "stages": {name: round(value, 4) for name, value in medians.items()},
                "tokens": sum(row["tokens"] for row in used),
                "load1": os.getloadavg()[0],
            }
        ),
        flush=True,
    )


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--size", choices=list(SIZES), default="M", help="of the models")
    made.add_argument("--mode", choices=["fixed", "variable"], default="variable", help="lengths")
    made.add_argument("--ranks", type=int, default=2, help="processes beside the single one")
    made.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp", help="of several")
    made.add_argument("--precision", default="32-true", help="of the Trainer")
    made.add_argument("--iters", type=int, default=4, help="of a run; the first is not counted")
    made.add_argument("--rounds", type=int, default=5, help="runs of each kind")
    made.add_argument("--out", help="file that gets a JSON line for each run")
    made.add_argument("--worker", action="store_true", help="used for the processes of a run")
    return made


if __name__ == "__main__":
    main()
