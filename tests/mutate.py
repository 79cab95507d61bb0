"""Put known faults into copies of the code, one at a time, and see the tests find them.

``make mutate`` runs all of ``tests/helpers/mutations``; ``make mutate ARGS="-k T36"`` those whose
trap, file or test has that text in it. Everything happens in private copies in a temporary folder;
the working tree is only read. It fails if a fault is not found, or does not fit the code any more.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers.mutations import MUTATIONS, Mutation, misfit  # noqa: E402 (found by the path)

COPIED = ("ppo_lightning", "tests", "configs", "docs", "pyproject.toml")
TIMEOUT_SECONDS = 3600  # far beyond any test's own: a guard, not a measurement
# A test that is red for one of these says nothing about the fault: the replacement is at fault.
BROKEN = re.compile(r"\b(NameError|SyntaxError|IndentationError|ImportError)\b")


@dataclass(frozen=True)
class Outcome:
    """What became of one fault.

    Args:
        mutation: The fault.
        verdict: ``found``, ``NOT FOUND`` or ``BROKEN``.
        seconds: It took.
        detail: First line of pytest's explanation.
    """

    mutation: Mutation
    verdict: str
    seconds: float
    detail: str


class Workspace:
    """A private copy of the tree, in a folder made for it alone."""

    def __init__(self, folder: Path) -> None:
        self.root = folder.resolve()
        if self.root == ROOT or ROOT in self.root.parents or self.root in ROOT.parents:
            raise RuntimeError(f"{self.root} and the working tree {ROOT} lie in one another.")
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
        for name in COPIED:
            source, target = ROOT / name, self.root / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=ignored)
            elif source.is_file():
                shutil.copy2(source, target)
        self._check_import()

    def _check_import(self) -> None:
        """Make sure that it is the copy that tests would import."""
        code = "import ppo_lightning, tests; print(ppo_lightning.__file__, *tests.__path__)"
        done = self._python("-c", code)
        places = done.stdout.split()
        if len(places) != 2 or not all(Path(p).is_relative_to(self.root) for p in places):
            raise RuntimeError(f"the copy would not be imported: {done.stdout}{done.stderr}")

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # No byte code: a mutant of the same size, written in the same second, would run the old.
        settings = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env={**os.environ, **settings, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )

    def pytest(self, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run tests of the copy until the first that fails."""
        options = ("-x", "-q", "-p", "no:cacheprovider", "--no-header")
        return self._python("-m", "pytest", *options, *tests)

    def run(self, mutation: Mutation) -> Outcome:
        """Put the fault in, run its tests, take it out."""
        file, start = self.root / mutation.file, time.perf_counter()
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        try:
            done = self.pytest(mutation.tests)
            verdict, detail = _judged(done)
        except subprocess.TimeoutExpired:
            verdict, detail = "BROKEN", f"no end after {TIMEOUT_SECONDS} s"
        finally:
            file.write_text(text, encoding="utf-8")
        return Outcome(mutation, verdict, time.perf_counter() - start, detail)


def _judged(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Read pytest's exit code: 0 is green, 1 red, anything else neither."""
    reasons = [line[1:].strip() for line in done.stdout.splitlines() if line.startswith("E  ")]
    detail = next(iter(reasons), "")
    if done.returncode == 0:
        return "NOT FOUND", ""
    if done.returncode != 1 or BROKEN.search(detail):
        return "BROKEN", detail or done.stdout.strip()[-200:] or done.stderr.strip()[-200:]
    return "found", detail


def run_all(mutations: Sequence[Mutation], folder: Path, *, jobs: int) -> list[Outcome]:
    """Try every fault, each job in a copy of its own.

    Raises:
        SystemExit: The tests are red without any fault.
    """
    free: queue.Queue[Workspace] = queue.Queue()
    for number in range(jobs):
        (folder / str(number)).mkdir()
        free.put(Workspace(folder / str(number)))

    def job(task: Mutation | None) -> Outcome | None:
        space = free.get()
        try:
            return space.run(task) if task else _green(space, mutations)
        finally:
            free.put(space)

    job(None)
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(job, mutations):
            assert outcome is not None
            print(_row(outcome), flush=True)
            outcomes.append(outcome)
    return outcomes


def _green(space: Workspace, mutations: Sequence[Mutation]) -> None:
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    print(f"{len(mutations)} faults; first their {len(tests)} tests without any …", flush=True)
    done = space.pytest(tests)
    if done.returncode:
        raise SystemExit(f"red without any fault:\n{done.stdout[-5000:]}{done.stderr[-2000:]}")


def _row(outcome: Outcome) -> str:
    place = outcome.mutation.file.removeprefix("ppo_lightning/")
    head = f"{outcome.mutation.trap:<8} {place:<34} {outcome.verdict:<10} {outcome.seconds:4.0f} s"
    return f"{head}  {outcome.detail[:80]}"


def main() -> int:
    """Return 0 where every fault was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", metavar="TEXT", help="only those with TEXT in them")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    parser.add_argument("--list", action="store_true", help="show them and do nothing")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if options.k.lower() in f"{m.trap} {m.file} {m.tests}".lower()]
    faults = [problem for m in chosen if (problem := misfit(m, ROOT))]
    if faults or not chosen:
        print("\n".join(faults) or f"nothing has {options.k!r} in it")
        return 2
    if options.list:
        print("\n".join(f"{m.trap:<8} {m.file}: {' '.join(m.tests)}" for m in chosen))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the copies would stay
    folder = Path(tempfile.mkdtemp(prefix="ppo-lightning-mutants-"))
    try:
        outcomes = run_all(chosen, folder, jobs=max(1, options.jobs))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    missed = [outcome for outcome in outcomes if outcome.verdict != "found"]
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
