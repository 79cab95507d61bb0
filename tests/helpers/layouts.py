"""Runs that change their layout between two iterations: strategy and number of processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.testing import assert_close

from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import merged_ids

Layouts = Mapping[str, Callable[[], tuple[Any, int]]]
"""By name: what makes a strategy, and the number of processes."""


def check_change(
    go_on: Callable[..., Any],
    layouts: Layouts,
    model_dir: Path,
    folder: Path,
    *,
    first: str,
    second: str,
    variant: str,
    atol: float,
) -> None:
    """Demand the same weights, the same next responses, and the result of never having changed.

    Args:
        go_on: Called with model, folder, layout, iterations and variant; trains up to so many from
            the file that is there, and returns the weights that it began with, the ids that were
            sampled, and the weights at the end.
        layouts: Those that are known.
        model_dir: Of the model.
        folder: Empty.
        first: Layout of two iterations.
        second: Layout of the third.
        variant: Handed on.
        atol: Most that a weight may differ.
    """

    def run(where: str, layout: str, iterations: int) -> list[Any]:
        _, ranks = layouts[layout]()
        return run_on_ranks(go_on, ranks, model_dir, folder / where, layout, iterations, variant)

    made = run("first", first, 2)
    shutil.copytree(folder / "first", folder / "other")
    stayed, changed = run("first", first, 3), run("other", second, 3)
    for weights, _, _ in changed:
        assert all((weights[name] == made[0][2][name]).all() for name in weights)
    assert merged_ids(changed) == merged_ids(stayed)
    for name, value in stayed[0][2].items():
        found, wanted = torch.tensor(changed[0][2][name]), torch.tensor(value)
        assert_close(found, wanted, rtol=0, atol=atol, msg=name)
