"""Memory over many iterations: resident size after each, and the slope of its second half.

    python experiments/speed/slope.py                                # 200 iterations
    python experiments/speed/slope.py --size S --out runs/speed/slope.jsonl
    python experiments/speed/slope.py --bare                         # no logger, no checkpoints

A fit with TensorBoard, ``metrics.jsonl`` and a checkpoint every 20 iterations. Lengths vary from
iteration to iteration, as they do in use. The exit code is 1 if the slope exceeds ``--limit``. Some
of what a process holds is the allocator's: ``--trim`` has it given back before every reading, and
counts the objects of Python as well, so that a leak can be told from fragments.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from experiments.speed import ppo
from experiments.speed.sizes import SIZES, Size

TINY = Size(
    vocab=512, hidden=64, layers=2, heads=2, inter=128, rollout=32, response_len=32, epochs=2
)
SIZE = {"tiny": TINY, **SIZES}
SAVED = 20
"""Iterations between two checkpoints."""


class Memory(pl.Callback):
    """Resident size of the process after each iteration, in MiB.

    Args:
        trim: Collect garbage and let the allocator give back what is free, before each reading.
    """

    def __init__(self, trim: bool) -> None:
        self.trim = trim
        self.rows: list[dict[str, float]] = []

    def on_iteration_end(self, trainer: Any, module: Any, stats: Any) -> None:
        """Read the memory; called by the module, after all that an iteration logs."""
        row: dict[str, float] = {"iteration": stats.iteration}
        if self.trim:
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            row["objects"] = len(gc.get_objects())
        self.rows.append(row | {"rss_mib": ppo.memory("VmRSS"), "tokens": stats.num_tokens})


def slope(values: Sequence[float]) -> float:
    """Least squares over the second half, in units of ``values`` for each step."""
    half = np.asarray(values[len(values) // 2 :], dtype=float)
    return float(np.polyfit(np.arange(len(half)), half, 1)[0]) if len(half) > 1 else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the run; returns the exit code."""
    given = parser().parse_args(arguments)
    torch.set_num_threads(given.threads)
    ppo.quieten()
    memory = Memory(given.trim)
    with tempfile.TemporaryDirectory() as folder:
        listeners = [memory] if given.bare else [memory, ModelCheckpoint(every_n_epochs=SAVED)]
        ppo.run(
            SIZE[given.size],
            ppo.options(iters=given.iters),
            Path(folder),
            *listeners,
            logger=not given.bare,
            enable_checkpointing=not given.bare,
        )
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row) + "\n" for row in memory.rows]
        given.out.write_text("".join(lines), encoding="utf-8")
    result = report(given, memory.rows)
    print(json.dumps(result), flush=True)
    return 0 if result["mib_per_iteration"] <= given.limit else 1


def report(given: Any, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Say what was seen."""
    sizes = [row["rss_mib"] for row in rows]
    result: dict[str, Any] = {
        "size": given.size,
        "iterations": len(rows),
        "bare": given.bare,
        "trim": given.trim,
        "first_mib": round(sizes[0], 1),
        "middle_mib": round(sizes[len(sizes) // 2], 1),
        "last_mib": round(sizes[-1], 1),
        "mib_per_iteration": round(slope(sizes), 4),
        "limit": given.limit,
    }
    if given.trim:
        result["objects_per_iteration"] = round(slope([row["objects"] for row in rows]), 2)
    return result


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--size", choices=list(SIZE), default="tiny")
    made.add_argument("--iters", type=int, default=200)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--limit", type=float, default=0.1, help="most MiB an iteration")
    made.add_argument("--bare", action="store_true", help="no logger, no checkpoints")
    made.add_argument("--trim", action="store_true", help="without what the allocator keeps")
    made.add_argument("--out", type=Path, default=None, help="a line for each iteration")
    return made


if __name__ == "__main__":
    sys.exit(main())
