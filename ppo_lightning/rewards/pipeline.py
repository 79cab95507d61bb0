"""From responses to the scores that PPO sees: weighted sum, penalties, normalisation, clipping.

Rewards per token go beside it: weighted, and into PPO's rewards at their tokens as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ppo_lightning.configs import Constraint, RewardProcessing
from ppo_lightning.configs.checks import require
from ppo_lightning.distributed import from_first_peer
from ppo_lightning.errors import RewardError
from ppo_lightning.functional import (
    Reduce,
    clip_scores,
    identity,
    overlong_penalties,
    score_after_penalties,
)
from ppo_lightning.rewards.base import RewardTerm
from ppo_lightning.rewards.multipliers import Multipliers
from ppo_lightning.rewards.normalizer import ScoreNormalizer
from ppo_lightning.rewards.scores import Judgement, blamed_on, judged
from ppo_lightning.rewards.texts import quoted
from ppo_lightning.types import Completions


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Scores of one batch, on the device that the pipeline was set up with.

    Args:
        scores: After everything; 0 where dropped. ``[B]`` float32.
        raw: Weighted sum before penalties and all else, that of rewards per token included; NaN
            where dropped. ``[B]`` float32.
        components: What each component said, of rewards per token their sum; NaN where it said
            nothing usable. ``[B]`` float32 each, by name.
        weights: Factor of each component in the sum, by name; of a constraint λ with its sign.
        dropped: Responses without a usable score, which take no part in the update. ``[B]`` bool.
        clipped: Scores that the clip changed. ``[B]`` bool.
        spread: σ that scores were divided by, for β_eff = β · σ; 0 if they had none, and all became
            0. None without normalisation, where nothing counted, and for ``group``, which has many.
        token_rewards: Weighted sum of the rewards per token; 0 after a response's last token, and
            where dropped. None where no component gave any. ``[B, T]`` float32.
        constraints: What is held at a bound, by name: score less bound is what the factor is for.
        multipliers: λ of each constraint for this batch, by name.
    """

    scores: Tensor
    raw: Tensor
    components: Mapping[str, Tensor]
    weights: Mapping[str, float]
    dropped: Tensor
    clipped: Tensor
    spread: float | None = None
    token_rewards: Tensor | None = None
    constraints: Mapping[str, Constraint] = field(default_factory=dict)
    multipliers: Mapping[str, float] = field(default_factory=dict)

    @property
    def totals(self) -> Tensor:
        """All that a response earns before the KL penalty: score and rewards per token. ``[B]``."""
        tokens = self.token_rewards
        return self.scores if tokens is None else self.scores + tokens.sum(1)


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
        self.multipliers = Multipliers(terms)
        require(
            not processing.rescale_constraints or bool(self.multipliers.constraints),
            "`rescale_constraints` is for rewards with a `constraint`, and none has one.",
        )
        self._device = torch.device("cpu")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components."""
        return tuple(term.name for term in self.terms)

    def weights_at(self, iteration: int | None) -> dict[str, float]:
        """Return the factor of each component in the sum, by name.

        Args:
            iteration: Where schedules are; a constraint has the multiplier in force, with its sign.
                None takes what schedules end at, and leaves constraints out: how held-out answers
                are scored.
        """
        found = {term.name: term.weight_at(iteration) for term in self.terms}
        held = self.multipliers.weights()
        if iteration is None:
            return found | dict.fromkeys(held, 0.0)
        found |= held
        if not self.processing.rescale_constraints:
            return found
        scale = 1 + sum(self.multipliers.values.values())
        return {name: weight / scale for name, weight in found.items()}

    def setup(self, device: torch.device) -> None:
        """Load what the components need.

        Args:
            device: Of the run's models, and of the results: ``reduce`` may work there only.
        """
        self._device = torch.device(device)
        for term in self.terms:
            with blamed_on(term.name):
                term.component.setup(self._device)

    def sharded_networks(self) -> list[nn.Module]:
        """Networks of the components whose weights may lie in shards."""
        return [network for term in self.terms for network in term.component.sharded_networks()]

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
            ``[B]`` float32 for each, by name, unweighted; of rewards per token their sum.

        Raises:
            RewardError: A component failed or its answer is no list of scores.
        """
        counting = {name for name, weight in self.weights_at(None).items() if weight}
        found = self._judgements(completions, counting)
        return {name: judgement.scores for name, judgement in found.items()}

    def weighted_sum(self, components: Mapping[str, Tensor]) -> Tensor:
        """Add up what the components said of held-out answers.

        The same sum in every iteration, so that its values can be compared: with the weights that
        schedules end at, and without constraints.

        Args:
            components: ``[B]`` float for each, by name.

        Returns:
            ``[B]`` float32.
        """
        return self._sum(components, self.weights_at(None)).float()

    def _judgements(
        self, completions: Completions, counting: Collection[str]
    ) -> dict[str, Judgement]:
        """Ask every component; one that does not count may say nothing usable."""
        on_nonfinite = self.processing.on_nonfinite

        def ask(term: RewardTerm) -> Judgement:
            wanted = on_nonfinite if term.name in counting else "drop"
            found = judged(term.component, term.name, completions, on_nonfinite=wanted)
            return found.to(torch.device("cpu"))

        # Ranks that hold a model between them need the same scores, and one asking is enough.
        return {t.name: from_first_peer(partial(ask, t)).to(self._device) for t in self.terms}

    def _sum(self, parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
        """Weighted sum of some components, in float64.

        A weight such as 0.1 then rounds once, and no order of summands matters. Weight 0 only
        watches: such a component's NaN must not get in. Nor does that of a constraint whose λ is 0;
        it has dropped the response already, or stopped the run.
        """
        held = self.multipliers.constraints
        shares = [
            weights[name] * (part.double() - (held[name].bound if name in held else 0.0))
            if weights[name]
            else torch.zeros_like(part, dtype=torch.float64)
            for name, part in parts.items()
        ]
        return torch.stack(shares).sum(0)

    def state_dict(self) -> dict[str, Any]:
        """Return what scores of later batches depend on, as plain containers."""
        return {
            "normalizer": self.normalizer.state_dict(),
            "multipliers": self.multipliers.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; what an older one lacks starts anew."""
        self.normalizer.load_state_dict(state.get("normalizer", {}))
        self.multipliers.load_state_dict(state.get("multipliers", {}))

    def __call__(
        self,
        completions: Completions,
        *,
        groups: Tensor | None = None,
        reduce: Reduce = identity,
        iteration: int = 0,
    ) -> RewardResult:
        """Score a batch of the run. It moves normaliser and multipliers on; ``components`` doesn't.

        Args:
            completions: This rank's share: B responses, maybe none.
            groups: Number of the prompt that each answers, from 0 and the same on all ranks;
                needed for ``normalize: group``. ``[B]`` long.
            reduce: Adds a vector over all ranks, for normalisation over the whole batch. Every
                rank calls it equally often.
            iteration: Number of the iteration, for weights that follow a schedule.

        Raises:
            RewardError: A component failed, its answer is no list of scores, or the weighted sum
                is too large for float32 (and such responses are not to be dropped).
            ValueError: ``normalize: group`` without ``groups``.
        """
        weights, multipliers = self.weights_at(iteration), self.multipliers.values
        counting = {name for name in weights if weights[name] or name in multipliers}
        judgements = self._judgements(completions, counting)
        components = {name: said.scores for name, said in judgements.items()}
        tokens = self._token_sum(judgements, weights)
        raw, whole = self._raw(judgements, weights)
        dropped = self._dropped(raw, whole, components, tokens)
        if self.processing.on_nonfinite == "error" and bool(dropped.any()):
            raise _overflow(raw, dropped, completions)
        # A response without any token is no action of the policy: it counts in no statistic.
        written = [len(ids) > 0 for ids in completions.response_ids]
        counted = torch.tensor(written, dtype=torch.bool, device=raw.device) & ~dropped
        shaped = self.normalizer(self._penalised(whole, completions), counted, groups, reduce)
        scores = self._clipped(shaped)
        self.multipliers.adapt(components, counted, reduce)
        return RewardResult(
            scores=scores.masked_fill(dropped, 0),
            raw=raw.masked_fill(dropped, torch.nan),
            components=components,
            weights=weights,
            dropped=dropped,
            clipped=(scores != shaped) & ~dropped,
            spread=self.normalizer.spread,
            token_rewards=None if tokens is None else tokens.masked_fill(dropped[:, None], 0),
            constraints=self.multipliers.constraints,
            multipliers=multipliers,
        )

    def _raw(
        self, judgements: Mapping[str, Judgement], weights: Mapping[str, float]
    ) -> tuple[Tensor, Tensor]:
        """Weighted sum of all components, and of those that score whole responses. ``[B]`` each."""
        everyone = {name: said.scores for name, said in judgements.items()}
        raw = self._sum(everyone, weights).float()
        placed = self._placed(judgements)
        rest = {name: scores for name, scores in everyone.items() if name not in placed}
        if len(rest) == len(everyone):
            return raw, raw
        return raw, self._sum(rest, weights).float() if rest else torch.zeros_like(raw)

    def _placed(self, judgements: Mapping[str, Judgement]) -> dict[str, Tensor]:
        """Rewards per token, by component; a constraint is about the sum, for the last token."""
        held = self.multipliers.constraints
        return {
            name: said.tokens
            for name, said in judgements.items()
            if said.tokens is not None and name not in held
        }

    def _token_sum(
        self, judgements: Mapping[str, Judgement], weights: Mapping[str, float]
    ) -> Tensor | None:
        placed = self._placed(judgements)
        return self._sum(placed, weights).float() if placed else None

    def _dropped(
        self, raw: Tensor, whole: Tensor, components: Mapping[str, Tensor], tokens: Tensor | None
    ) -> Tensor:
        """Responses without a usable score. ``[B]`` bool."""
        usable = raw.isfinite() & whole.isfinite()  # a part may be too large, and its sum not
        for name in self.multipliers.constraints:
            usable = usable & components[name].isfinite()
        return ~usable if tokens is None else ~(usable & tokens.isfinite().all(1))

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
