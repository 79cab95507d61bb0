"""The recipes' scripts as users call them, in their small setting."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.named import ROOT


def run_small(name: str, folder: Path) -> str:
    """Run a recipe, or go on with it; returns what it printed.

    Args:
        name: ``reviews`` or ``chat``.
        folder: Of everything that it writes.
    """
    script = ROOT / "experiments" / "recipes" / f"{name}.py"
    command = [sys.executable, str(script), "--small", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def require_packages(names: Iterable[str]) -> None:
    """Insist on the packages that carry a recipe's texts and models."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    assert not missing, f"not installed: {missing}; `make recipes` and `make test-all` do it"
