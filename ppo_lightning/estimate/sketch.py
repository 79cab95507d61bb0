"""Runs of published architectures: passes of a few blocks, and the rest by the rule of three."""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from ppo_lightning.estimate.architectures import Architecture
from ppo_lightning.estimate.memory import Estimate, Estimator
from ppo_lightning.estimate.run import Run
from ppo_lightning.estimate.sharding import on_one_rank
from ppo_lightning.estimate.sizes import Sizes, combined
from ppo_lightning.estimate.stages import StagePeak

DEPTHS = (3, 4)
"""Blocks of the models that are tried. A first block holds less than those behind it, and a last
one computes fewer tokens: there must be one between them."""


class SketchEstimator:
    """Predicts runs whose policy is an architecture, whatever their ``policy.path`` says.

    All that a pass keeps is of one block, or outside of them, so it grows by equal amounts from
    block to block in the middle: two shallow models tell that of a deep one.

    Args:
        architecture: Of the policy; critic and reference follow it unless they have a path, and
            are then counted as that is, also under tensor parallel.
    """

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self._folder = Path(mkdtemp(prefix="ppo-lightning-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._estimator = Estimator()

    def __call__(self, run: Run) -> Estimate:
        """Predict the memory of one rank; see ``Estimator``."""
        low, high = (self._estimator.whole(self._of_depth(run, depth)) for depth in DEPTHS)
        stages = [self._deeper(*pair) for pair in zip(low.stages, high.stages, strict=True)]
        if run.shares_gradients:
            stages = list(on_one_rank(stages, self.sizes(run), run))
        return Estimate(stages=tuple(stages), device=run.device)

    def sizes(self, run: Run) -> Sizes:
        """Measure the networks of a run, as each rank computes them."""
        found = (self._estimator.sizes(self._of_depth(run, depth)) for depth in DEPTHS)
        deep: Sizes = combined(self._at_depth, *found)
        return deep

    def _of_depth(self, run: Run, depth: int) -> Run:
        shape = replace(self.architecture.on_one_of(run.strategy.tensor), layers=depth)
        folder = self._folder / f"{depth}-{run.strategy.tensor}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(shape.settings()), encoding="utf-8")
        return replace(run, policy=replace(run.policy, path=str(folder)))

    def _deeper(self, low: StagePeak, high: StagePeak) -> StagePeak:
        names = dict.fromkeys([*low.parts, *high.parts])
        parts = {n: self._at_depth(low.parts.get(n, 0), high.parts.get(n, 0)) for n in names}
        return StagePeak(name=low.name, parts=parts)

    def _at_depth(self, low: int, high: int) -> int:
        first, second = DEPTHS
        return low + (high - low) * (self.architecture.layers - first) // (second - first)
