"""Show tiny runs, healthy and ill, to the doctor: does it name the illness, and does it help?

    python experiments/diagnosis/run.py                         # all runs, two at a time, resumable
    python experiments/diagnosis/run.py --only hacking --seeds 0 --processes 1

Each finished run is a line of ``results.jsonl`` in the output folder, and is not run again. Rows of
every run are kept beside it, so that rules can be tried on them without running anything.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.diagnosis.scenarios import CASES, OTHER_LENGTH, OTHER_WORLDS, Case, in_world
from experiments.stability.outcome import LAST, Fitted, fit, quiet
from experiments.stability.overlay import Overlay
from ppo_lightning.callbacks import CheckpointRollback, Doctor
from ppo_lightning.io import as_jsonl, finite, write_text_atomic
from ppo_lightning.metrics import IterationStats

ITERATIONS = 40
HEALTHY_SEEDS = 10
GOES_BACK_ON = ["nonfinite_update", "policy_collapse", "entropy_collapse"]
OTHER_SEED = 100
"""From which on runs are of other worlds."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to.

    Args:
        case: Its name.
        policy: Of the doctor.
        seed: Of the run.
        top: Leading diagnosis of the whole run; "healthy" if nothing is above ``watch``.
        above_watch: How many illnesses are above ``watch`` at any time, companions left out.
        first_right: First iteration in which a right diagnosis leads; None if there is none.
        first_any: First iteration in which anything leads.
        gold: Mean of the gold score over the last iterations; None where it is not finite.
        kl: The same of KL to the reference.
        iterations: That were made.
        ended: Name of the error that ended it, or "".
        actions: What the doctor turned, in the order.
    """

    case: str
    policy: str
    seed: int
    top: str
    above_watch: int
    first_right: int | None
    first_any: int | None
    gold: float | None
    kl: float | None
    iterations: int
    ended: str
    actions: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        """What no other result has."""
        return self.case, self.policy, self.seed


class Leads(Doctor):
    """A doctor that remembers what led in each iteration."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.leads: list[tuple[int, str]] = []

    def on_train_epoch_end(self, trainer: object, pl_module: object) -> None:
        """Examine, and note the leading illness."""
        super().on_train_epoch_end(trainer, pl_module)  # type: ignore[arg-type]
        found = self.diagnoses
        if found and found[0].severity != "watch":
            self.leads.append((pl_module.iteration_stats.iteration, found[0].illness))  # type: ignore[attr-defined]


def run(name: str, policy: str, seed: int, folder: Path, iterations: int = ITERATIONS) -> Result:
    """Make one run, and keep its rows in ``folder``."""
    quiet()
    case, doctor = CASES[name], Leads(policy=policy, report="none")
    callbacks: list[object] = [doctor]
    if policy == "act":
        doctor.report = "critical"
        callbacks.append(CheckpointRollback(illnesses=GOES_BACK_ON, hold_iterations=10))
    overlays = [case.overlay]
    if seed >= OTHER_SEED:
        longer = [OTHER_LENGTH] if name == "length" else []
        overlays = [*in_world(case.overlay, seed // 100), *longer]
    overlays.append(Overlay(callbacks=lambda: callbacks))  # type: ignore[arg-type,return-value]
    with tempfile.TemporaryDirectory() as place:
        made = fit(Path(place), overlays, seed=seed, iterations=iterations)
    rows = as_jsonl(finite(stats.to_log()) for stats in made.stats)
    write_text_atomic(folder / "rows" / f"{name}.{policy}.{seed}.jsonl", rows)
    return _result(name, policy, seed, case, doctor, made)


def _result(name: str, policy: str, seed: int, case: Case, doctor: Leads, made: Fitted) -> Result:
    above = [d for d in doctor.examiner.summary() if d.severity != "watch"]
    right = [i for i, illness in doctor.leads if illness in case.accepted]
    turned = [e for e in made.module.controls.journal if e["source"] == "Doctor"]
    return Result(
        case=name,
        policy=policy,
        seed=seed,
        top=above[0].illness if above else "healthy",
        above_watch=len(above),
        first_right=min(right, default=None),
        first_any=min((i for i, _ in doctor.leads), default=None),
        gold=_end(made.stats, "gold"),
        kl=_end(made.stats, "kl_ref"),
        iterations=len(made.stats),
        ended=made.ended,
        actions=tuple(
            f"{e['iteration']}: {e['dial']} {e['before']:.3g} → {e['after']:.3g}"
            for e in turned
            if not str(e["dial"]).startswith("illness") and e["after"] is not None
        ),
    )


def _end(stats: list[IterationStats] | object, name: str) -> float | None:
    values = [getattr(s.val_sampled, name) for s in stats if s.val_sampled is not None]  # type: ignore[attr-defined]
    found = finite({"": mean(values[-LAST:])})[""] if values else None
    return None if found is None else round(float(found), 3)


def read(file: Path) -> list[Result]:
    """Return the results of earlier calls."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = map(json.loads, lines)
    return [Result(**(row | {"actions": tuple(row["actions"])})) for row in rows]


def planned(given: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield all runs: few seeds of the known world, more of healthy runs; and the other worlds."""
    for number, name in enumerate(CASES):
        if name not in given.only:
            continue
        healthy = name == "healthy"
        seeds = given.seeds or [*range(HEALTHY_SEEDS if healthy else 3)]
        for seed in seeds:
            yield from ((name, policy, seed) for policy in given.policies)
        if given.seeds or "observe" not in given.policies:
            continue
        others = range(6) if healthy else [6 + number]
        for world in OTHER_WORLDS:
            yield from ((name, "observe", 100 * world + other) for other in others)


def main() -> None:
    """Run what is missing."""
    given = parser().parse_args()
    file = given.out / "results.jsonl"
    given.out.mkdir(parents=True, exist_ok=True)
    done = {result.key for result in read(file)}
    missing = [key for key in planned(given) if key not in done]
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(run, *key, given.out, given.iterations) for key in missing]
        for number, finished in enumerate(as_completed(runs), start=1):
            result = finished.result()
            with file.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")
            print(f"[{number}/{len(missing)}] {result}", flush=True)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    made.add_argument("--seeds", type=int, nargs="+", default=None, help="of all that is run")
    made.add_argument(
        "--policies", nargs="+", choices=["observe", "act"], default=["observe", "act"]
    )
    made.add_argument("--iterations", type=int, default=ITERATIONS)
    made.add_argument("--processes", type=int, default=2, help="runs at a time")
    made.add_argument("--out", type=Path, default=Path("runs/diagnosis"))
    return made


if __name__ == "__main__":
    main()
