"""Put known faults into copies of the code, one at a time, and see the tests find them.

``make mutate`` runs all of ``tests/helpers/mutations``; ``make mutate ARGS="-k T36"`` those whose
trap, file or test has that text in it. Everything happens in private copies in a temporary folder;
the working tree is only read. It fails if a fault is not found, or does not fit the code any more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import re
import shutil
import signal
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
# Imported once, by the process that the others are forked from; never the code under test.
PRELOADED = ["torch", "lightning.pytorch", "transformers", "peft"]
TIMEOUT_SECONDS = 3600  # far beyond any test's own: a guard, not a measurement
# A test that is red for one of these says nothing about the fault: the replacement is at fault.
BROKEN = re.compile(r"\b(NameError|SyntaxError|IndentationError|ImportError)\b")
NOT_THE_COPY = 99


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

    def pytest(self, tests: Sequence[str]) -> tuple[int, str]:
        """Run tests of the copy until the first that fails: exit code and output.

        Raises:
            RuntimeError: It would not be the copy that is tested.
        """
        report = self.root / "report.txt"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        worker = context.Process(target=_pytest, args=(str(self.root), str(report), list(tests)))
        worker.start()
        worker.join(TIMEOUT_SECONDS)
        if worker.exitcode is None:
            worker.kill()
            return -1, f"no end after {TIMEOUT_SECONDS} s"
        text = report.read_text(encoding="utf-8", errors="replace")
        if worker.exitcode == NOT_THE_COPY:
            raise RuntimeError(f"the copy would not be imported: {text}")
        return worker.exitcode, text

    def run(self, mutation: Mutation) -> Outcome:
        """Put the fault in, run its tests, take it out."""
        file, start = self.root / mutation.file, time.perf_counter()
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        try:
            verdict, detail = _judged(*self.pytest(mutation.tests))
        finally:
            file.write_text(text, encoding="utf-8")
        return Outcome(mutation, verdict, time.perf_counter() - start, detail)


def _pytest(root: str, report: str, tests: list[str]) -> None:
    """Run pytest in a process of its own that knows the copy only."""
    output = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    # No byte code: a mutant of the same size, written in the same second, would run the old.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    for name in [m for m in sys.modules if m.partition(".")[0] in ("tests", "ppo_lightning")]:
        del sys.modules[name]
    # The environment may lie in the checkout, whose own code must not be found.
    paths = [(p, Path(p).resolve()) for p in sys.path if p]
    outside = [
        p
        for p, place in paths
        if not place.is_relative_to(ROOT) or "site-packages" in place.relative_to(ROOT).parts
    ]
    sys.path[:] = [root, *outside]
    import ppo_lightning
    import tests as copied

    places = [ppo_lightning.__file__, *copied.__path__]
    if not all(Path(str(place)).is_relative_to(root) for place in places):
        print(places)
        sys.exit(NOT_THE_COPY)
    import pytest

    # Plugins that came in with the preloaded ones are no concern of the tests.
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    sys.exit(int(pytest.main([*options, "--rootdir", root, *tests])))


def _judged(code: int, text: str) -> tuple[str, str]:
    """Read pytest's exit code: 0 is green, 1 red, anything else neither."""
    reasons = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    detail = next(iter(reasons), "")
    if code == 0:
        return "NOT FOUND", ""
    if code != 1 or BROKEN.search(detail):
        return "BROKEN", detail or text.strip()[-200:]
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

    def job(task: Mutation) -> Outcome:
        space = free.get()
        try:
            return space.run(task)
        finally:
            free.put(space)

    _require_green(free.queue[0], mutations)
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(job, mutations):
            print(_row(outcome), flush=True)
            outcomes.append(outcome)
    return outcomes


def _require_green(space: Workspace, mutations: Sequence[Mutation]) -> None:
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    print(f"{len(mutations)} faults; first their {len(tests)} tests without any …", flush=True)
    code, text = space.pytest(tests)
    if code:
        raise SystemExit(f"red without any fault:\n{text[-5000:]}")


def _row(outcome: Outcome) -> str:
    place = outcome.mutation.file.removeprefix("ppo_lightning/")
    head = f"{outcome.mutation.trap:<4} {place:<30} {outcome.verdict:<10} {outcome.seconds:4.0f} s"
    return f"{head}  {outcome.detail[:80]}"


def main() -> int:
    """Return 0 where every fault was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", metavar="TEXT", help="only those with TEXT in them")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    parser.add_argument("--list", action="store_true", help="show them and do nothing")
    options = parser.parse_args()
    named = [(m, f"{m.trap} {m.file} {' '.join(m.tests)}") for m in MUTATIONS]
    chosen = [m for m, name in named if options.k.lower() in name.lower()]
    faults = [problem for m in chosen if (problem := misfit(m, ROOT))]
    if faults or not chosen:
        print("\n".join(faults) or f"nothing has {options.k!r} in it")
        return 2
    if options.list:
        print("\n".join(name for m, name in named if m in chosen))
        return 0
    return _report(chosen, jobs=max(1, options.jobs))


def _report(chosen: Sequence[Mutation], *, jobs: int) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the copies would stay
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # read at import
    folder = Path(tempfile.mkdtemp(prefix="ppo-lightning-mutants-"))
    try:
        outcomes = run_all(chosen, folder, jobs=jobs)
    finally:
        for worker in multiprocessing.active_children():
            worker.kill()
        shutil.rmtree(folder, ignore_errors=True)
    missed = [outcome for outcome in outcomes if outcome.verdict != "found"]
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
