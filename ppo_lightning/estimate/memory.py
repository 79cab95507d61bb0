"""Peak memory of each stage of a run, before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from ppo_lightning.estimate.networks import ELSEWHERE, Networks
from ppo_lightning.estimate.passes import chunks_of, judge, sample, score, update
from ppo_lightning.estimate.process import (
    MAPPED,
    MIXED,
    PLAIN,
    RECOMPUTED,
    HeapShares,
    process_bytes,
)
from ppo_lightning.estimate.run import Device, Run
from ppo_lightning.estimate.sharding import on_one_rank
from ppo_lightning.estimate.sizes import Sizes, sizes_of
from ppo_lightning.estimate.stages import STAGES, StagePeak
from ppo_lightning.estimate.tally import Blank, ByteTally


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory of a run.

    Args:
        stages: In the order of an iteration.
        device: What it is the memory of.
    """

    stages: tuple[StagePeak, ...]
    device: Device

    @property
    def peak(self) -> StagePeak:
        """The stage that takes the most."""
        return max(self.stages, key=lambda stage: stage.total)


class Estimator:
    """Predicts the memory of runs; what two of them have in common is counted once.

    The passes of a run itself are made, with tensors that have shapes and no contents.
    """

    def __init__(self) -> None:
        self._networks: dict[str, Networks] = {}
        self._passing: dict[tuple[str, str], Mapping[str, int]] = {}

    def __call__(self, run: Run) -> Estimate:
        """Predict the memory of a run on one rank.

        Args:
            run: At its largest.

        Returns:
            Tensors; on a CPU also what its process takes beside them and the imports.

        Raises:
            ModelError: A model that is named is not there, or of the wrong kind.
            ConfigError: The optimiser cannot be built.
        """
        stages: Iterable[StagePeak] = self.whole(run).stages
        if run.shares_gradients:
            stages = on_one_rank(stages, self.sizes(run), run)
        return Estimate(stages=tuple(stages), device=run.device)

    def whole(self, run: Run) -> Estimate:
        """Predict the memory of a rank that has the networks to itself.

        Where ranks share gradients, these are left out: they are there during a whole update, so
        that the most of all else is what counts.
        """
        tally, networks = ByteTally(), self._networks_of(run)
        networks.claim(tally)
        passing = {name: self._passing_of(name, run) for name in STAGES}
        lasting = {kind: size for kind, size in tally.now.items() if kind != ELSEWHERE}
        stages = _stages(run, lasting, passing, networks.vocabulary)
        return Estimate(stages=tuple(stages), device=run.device)

    def sizes(self, run: Run) -> Sizes:
        """Measure the networks of a run, as each rank computes them."""
        return sizes_of(self._networks_of(run))

    def _networks_of(self, run: Run) -> Networks:
        key = _key(run, _MODELS)
        if key not in self._networks:
            self._networks[key] = Networks.build(run, Blank())
        return self._networks[key]

    def _passing_of(self, stage: str, run: Run) -> Mapping[str, int]:
        """Tensors of a stage alone at its peak: bytes by what they are of."""
        if stage not in _PASSES:
            return {}
        make, settings = _PASSES[stage]
        key = stage, _key(run, settings)
        if key not in self._passing:
            networks = self._networks_of(run)
            aside = ("gradients",) if run.shares_gradients else ()
            tally = ByteTally(logits_width=networks.vocabulary, left_out=aside)
            networks.claim(tally)
            lasting = tally.now
            with tally, chunks_of(run.device):
                make(run, networks, tally)
            at_peak = Counter(tally.at_peak)
            at_peak.subtract(lasting)
            self._passing[key] = +at_peak
        return self._passing[key]


def estimate(run: Run) -> Estimate:
    """Predict the memory of one run; see ``Estimator``."""
    return Estimator()(run)


_MODELS = ("policy", "critic_model", "reference", "rewards", "optimizer", "device")
_SIZES = (
    "prompt_tokens",
    "sampling.max_new_tokens",
    "num_responses",
    "minibatch_rows",
    "buffer.num_minibatches",
    "buffer.responses_per_prompt",
    "buffer.shuffle",
    "precision",
    "device",
    "shares_gradients",
    "is_alone",
    "strategy.cuts_states",
    "takes_process",
)
_SCORING = ("policy", "critic_model", "reference", "ppo", "kl", *_SIZES)
_PASSES: Mapping[str, tuple[Callable[[Run, Networks, ByteTally], None], tuple[str, ...]]] = {
    "rollout": (sample, ("policy", "sampling", *_SIZES)),
    "reward": (judge, ("rewards", *_SIZES)),
    "scoring": (score, _SCORING),
    "update": (update, ("optimizer", *_SCORING)),
}
"""What each stage does, and the settings that its memory depends on."""


def _key(run: Run, settings: tuple[str, ...]) -> str:
    return repr([attrgetter(name)(run) for name in settings])


_WHOLE = ("KV cache", "frozen trunk")
"""Kinds of tensors that are made once in a stage and stay."""


def _stages(
    run: Run,
    lasting: Mapping[str, int],
    passing: Mapping[str, Mapping[str, int]],
    vocabulary: int,
) -> Iterator[StagePeak]:
    """Put together what lasts and what passes, and what a CPU's process takes beside it."""
    before = 0
    for name, parts in passing.items():
        # What comes all at once leaves no gaps before the stage has ended.
        own = sum(n for part, n in parts.items() if part not in _WHOLE)
        extra = {}
        if run.takes_process:
            extra = process_bytes(
                own,
                before,
                _heap_of(run, name),
                vocabulary=vocabulary,
                adapted=run.policy.lora is not None,
                computes=name != "load",
            )
        buffer = {"buffer": run.kept_bytes} if name in ("scoring", "update") else {}
        yield StagePeak(name=name, parts={**lasting, **parts, **buffer, **extra})
        before = max(before, sum(parts.values()))


def _heap_of(run: Run, stage: str) -> HeapShares:
    if run.mapped:
        return MAPPED
    settings = (run.policy.gradient_checkpointing, run.critic_model.gradient_checkpointing)
    if True in settings and stage == "update":
        return RECOMPUTED
    mixed = run.policy.lora is not None or run.mixed_dtype is not None
    return MIXED if mixed and stage != "reward" else PLAIN
