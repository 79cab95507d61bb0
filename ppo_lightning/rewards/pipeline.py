"""From responses to the scores that PPO sees: weighted sum, penalties, normalisation, clipping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.configs import RewardProcessing
from ppo_lightning.configs.checks import require
from ppo_lightning.errors import RewardError
from ppo_lightning.functional import (
    Reduce,
    clip_scores,
    identity,
    overlong_penalties,
    score_after_penalties,
)
from ppo_lightning.rewards.base import RewardTerm
from ppo_lightning.rewards.normalizer import ScoreNormalizer
from ppo_lightning.rewards.scores import blamed_on, scores_of
from ppo_lightning.rewards.texts import quoted
from ppo_lightning.types import Completions


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Scores of one batch, on the device that the pipeline was set up with.

    Args:
        scores: After everything; 0 where dropped. ``[B]`` float32.
        raw: Weighted sum before penalties and all else; NaN where dropped. ``[B]`` float32.
        components: What each component said; NaN where it said nothing usable. ``[B]`` float32
            each, by name.
        weights: Factor of each component in the sum, by name.
        dropped: Responses without a usable score, which take no part in the update. ``[B]`` bool.
        clipped: Scores that the clip changed. ``[B]`` bool.
        spread: σ that scores were divided by, for β_eff = β · σ; 0 if they had none, and all became
            0. None without normalisation, where nothing counted, and for ``group``, which has many.
    """

    scores: Tensor
    raw: Tensor
    components: Mapping[str, Tensor]
    weights: Mapping[str, float]
    dropped: Tensor
    clipped: Tensor
    spread: float | None = None


class RewardPipeline:
    """Scores responses with the components of a run.

    Args:
        terms: The components and their weights; names differ.
        processing: What happens to their weighted sum, in the order penalties, normalise, clip.

    Raises:
        ValueError: There is no component, or two share a name.
    """

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        processing: RewardProcessing = RewardProcessing(),  # noqa: B008 (frozen)
    ) -> None:
        repeated = [name for name, n in Counter(term.name for term in terms).items() if n > 1]
        require(len(terms) > 0, "`rewards` must name one component at least, got none.")
        require(not repeated, f"`rewards` must have names of their own, got {repeated} twice.")
        self.terms = tuple(terms)
        self.processing = processing
        self.normalizer = ScoreNormalizer(processing)
        self._device = torch.device("cpu")

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each component in the sum, by name."""
        return {term.name: term.weight for term in self.terms}

    def setup(self, device: torch.device) -> None:
        """Load what the components need.

        Args:
            device: Of the run's models, and of the results: ``reduce`` may work there only.
        """
        self._device = torch.device(device)
        for term in self.terms:
            with blamed_on(term.name):
                term.component.setup(self._device)

    def fingerprints(self) -> dict[str, str]:
        """Digests of the components that have loaded weights, by name."""
        found = {term.name: term.component.fingerprint() for term in self.terms}
        return {name: digest for name, digest in found.items() if digest}

    def close(self) -> None:
        """Let the components go of what they loaded."""
        for term in self.terms:
            term.component.close()

    def components(self, completions: Completions) -> dict[str, Tensor]:
        """Ask every component.

        Args:
            completions: B responses.

        Returns:
            ``[B]`` float32 for each, by name, unweighted.

        Raises:
            RewardError: A component failed or its answer is no list of scores.
        """
        return {
            term.name: scores_of(
                term.component,
                term.name,
                completions,
                on_nonfinite=self.processing.on_nonfinite if term.weight else "drop",
            ).to(self._device)
            for term in self.terms
        }

    def weighted_sum(self, components: Mapping[str, Tensor]) -> Tensor:
        """Add up what the components said.

        Args:
            components: ``[B]`` float for each, by name.

        Returns:
            ``[B]`` float32.
        """
        # In float64: a weight such as 0.1 then rounds once, and no order of summands matters.
        # Weight 0 only watches: such a component's NaN must not get in.
        parts = [
            term.weight * components[term.name].double()
            if term.weight
            else torch.zeros_like(components[term.name], dtype=torch.float64)
            for term in self.terms
        ]
        return torch.stack(parts).sum(0).float()

    def state_dict(self) -> dict[str, Any]:
        """Return what scores of later batches depend on, as plain containers."""
        return {"normalizer": self.normalizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; what an older one lacks starts anew."""
        self.normalizer.load_state_dict(state.get("normalizer", {}))

    def __call__(
        self, completions: Completions, *, groups: Tensor | None = None, reduce: Reduce = identity
    ) -> RewardResult:
        """Score a batch of the run. It moves the normaliser on; ``components`` does not.

        Args:
            completions: This rank's share: B responses, maybe none.
            groups: Number of the prompt that each answers, from 0 and the same on all ranks;
                needed for ``normalize: group``. ``[B]`` long.
            reduce: Adds a vector over all ranks, for normalisation over the whole batch. Every
                rank calls it equally often.

        Raises:
            RewardError: A component failed, its answer is no list of scores, or the weighted sum
                is too large for float32 (and such responses are not to be dropped).
            ValueError: ``normalize: group`` without ``groups``.
        """
        components = self.components(completions)
        raw = self.weighted_sum(components)
        dropped = ~raw.isfinite()
        if self.processing.on_nonfinite == "error" and bool(dropped.any()):
            raise _overflow(raw, dropped, completions)
        # A response without any token is no action of the policy: it counts in no statistic.
        written = [len(ids) > 0 for ids in completions.response_ids]
        counted = torch.tensor(written, dtype=torch.bool, device=raw.device) & ~dropped
        shaped = self.normalizer(self._penalised(raw, completions), counted, groups, reduce)
        scores = self._clipped(shaped)
        return RewardResult(
            scores=scores.masked_fill(dropped, 0),
            raw=raw.masked_fill(dropped, torch.nan),
            components=components,
            weights=self.weights,
            dropped=dropped,
            clipped=(scores != shaped) & ~dropped,
            spread=self.normalizer.spread,
        )

    def _penalised(self, raw: Tensor, completions: Completions) -> Tensor:
        truncated = torch.tensor(list(completions.truncated), dtype=torch.bool, device=raw.device)
        scores = score_after_penalties(
            raw,
            ended_with_eos=~truncated,
            missing_eos_penalty=self.processing.missing_eos_penalty,
        )
        if self.processing.overlong_tokens is None:
            return scores
        lengths = torch.tensor([len(ids) for ids in completions.response_ids], device=raw.device)
        start, end = self.processing.overlong_tokens
        penalty = self.processing.overlong_penalty
        return scores - overlong_penalties(lengths, start=start, end=end, penalty=penalty)

    def _clipped(self, scores: Tensor) -> Tensor:
        bound = self.processing.clip
        return scores if bound is None else clip_scores(scores, -bound, bound)


def _overflow(raw: Tensor, dropped: Tensor, completions: Completions) -> RewardError:
    first = int(dropped.nonzero()[0])
    return RewardError(
        f"the weighted sum of the rewards is {raw[first].item()}, too large for float32. "
        f"{quoted(completions, first)} Lower the weights or bound the components.",
        sample=first,
    )
