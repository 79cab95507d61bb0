"""Held-out prompts: answered by the policy and by the reference, and scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ppo_lightning.configs import SamplingConfig, ValidationConfig
from ppo_lightning.distributed import all_reduce_sum, from_first_peer, gather_objects
from ppo_lightning.functional import (
    combine_keys,
    distinct_openings,
    moments,
    repeated_ngram_fraction,
)
from ppo_lightning.metrics import AnswerStats, metric_specs
from ppo_lightning.models import ActorCritic, ReferencePolicy
from ppo_lightning.rewards import Reward, RewardPipeline, scores_of
from ppo_lightning.rollout import RolloutEngine, StopRules, completions_of, score_in_parts
from ppo_lightning.types import Message, PromptBatch, Rollout, Sequences

Writer = Literal["policy", "reference"]
Mode = Literal["greedy", "sampled"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer to a held-out prompt.

    Args:
        number: Number of the prompt.
        writer: Who answered.
        mode: How the tokens were chosen.
        prompt: The prompt as given.
        response: The answer's text.
        score: Weighted sum of the reward components, before any processing.
        components: Each component's own score.
        gold: Score of the independent judge, if there is one.
        kl_ref: log π − log π_ref, summed over the answer; nats. Of the policy's answers only.
        ref_logprob: log π_ref, mean over the answer's tokens; nats.
        entropy: Of the writer's distributions, mean over the answer's tokens; nats.
        num_tokens: Tokens of the answer, end token included.
        truncated: Whether it stopped at the length limit.
        repeated_bigrams: Share of its bigrams that it had used before.
        response_ids: Its token ids.
        messages: The chat that was answered; None for a plain prompt.
    """

    number: int
    writer: Writer
    mode: Mode
    prompt: str
    response: str
    score: float
    components: Mapping[str, float] = field(default_factory=dict)
    gold: float | None = None
    kl_ref: float | None = None
    ref_logprob: float
    entropy: float
    num_tokens: int
    truncated: bool
    repeated_bigrams: float
    response_ids: tuple[int, ...] = ()
    messages: tuple[Message, ...] | None = None

    def to(self, *_: Any, **__: Any) -> Answer:
        """Return itself: it holds no tensors, and Lightning moves what ``predict_step`` returns."""
        return self


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Answers held-out prompts and scores the answers.

    Args:
        networks: Actor and critic.
        reference: Frozen reference.
        engine: Decodes the answers.
        rewards: The proxy.
        gold: The independent judge.
        tokenizer: Decodes ids.
        stops: When an answer ends.
        sampling: Settings of the answers.
        max_tokens: Budget of a scoring pass, padding included; None takes the default.
        precision: Context of a forward pass in the run's precision.
    """

    networks: ActorCritic
    reference: ReferencePolicy
    engine: RolloutEngine
    rewards: RewardPipeline
    gold: Reward | None
    tokenizer: Any
    stops: StopRules
    sampling: SamplingConfig
    max_tokens: int | None
    precision: Callable[[], AbstractContextManager[None]]

    def answers(
        self, prompts: PromptBatch, *, writer: Writer, config: ValidationConfig
    ) -> list[Answer]:
        """Answer every prompt greedily (if asked for) and ``num_samples`` times by chance.

        The sampled answers use the same random numbers every time.

        Args:
            prompts: One row for each prompt.
            writer: Who answers.
            config: How.
        """
        found = self._answer(prompts, writer, "greedy") if config.greedy else []
        for sample in range(config.num_samples):
            keys = combine_keys(sample, prompts.keys)
            found += self._answer(replace(prompts, keys=keys), writer, "sampled")
        return found

    def _answer(self, prompts: PromptBatch, writer: Writer, mode: Mode) -> list[Answer]:
        with torch.no_grad(), self.precision():
            rollout = self._generate(prompts, writer, greedy=mode == "greedy")
            scores = self._token_scores(rollout.sequences, writer)
        completions = completions_of(rollout, self.tokenizer)
        components = self.rewards.components(completions)
        score = self.rewards.weighted_sum(components).tolist()
        gold: Sequence[float | None] = [None] * len(score)
        if self.gold is not None:
            judge = partial(scores_of, self.gold, "gold", completions)
            gold = from_first_peer(lambda: judge().cpu()).tolist()
        per_token = _row_sums(rollout, scores)
        return [
            Answer(
                number=int(prompts.indices[row]),
                writer=writer,
                mode=mode,
                prompt=completions.prompts[row],
                response=completions.responses[row],
                score=score[row],
                components={name: float(values[row]) for name, values in components.items()},
                gold=gold[row],
                kl_ref=per_token["kl_ref"][row] if writer == "policy" else None,
                ref_logprob=per_token["ref_logprob"][row],
                entropy=per_token["entropy"][row],
                num_tokens=len(completions.response_ids[row]),
                truncated=completions.truncated[row],
                repeated_bigrams=repeated_ngram_fraction(completions.response_ids[row], 2),
                response_ids=tuple(completions.response_ids[row]),
                messages=completions.messages[row],
            )
            for row in range(len(score))
        ]

    def _generate(self, prompts: PromptBatch, writer: Writer, *, greedy: bool) -> Rollout:
        def run(model: nn.Module, prompts: PromptBatch) -> Rollout:
            return self.engine.generate(
                model,
                prompts,
                sampling=self.sampling,
                stops=self.stops,
                policy_version=0,
                greedy=greedy,
            )

        if writer == "policy":
            return run(self.networks.actor, prompts)
        with self.reference.causal_lm() as model:
            found = run(model, prompts.to(self.reference.device))
        return found.to(prompts.prompt_ids.device)

    def _token_scores(self, sequences: Sequences, writer: Writer) -> dict[str, Tensor]:
        """Writer's log-probs and entropy, and the reference's log-probs. ``[B, R]`` each."""
        temperature = self.sampling.temperature

        def score(part: Sequences) -> dict[str, Tensor | None]:
            theirs = self.reference.logprobs(part, temperature=temperature, entropy=True)
            ours = theirs
            if writer == "policy":
                ours = self.networks(part, temperature=temperature, values=False)
            return {
                "logprobs": ours.logprobs,
                "entropy": ours.entropy,
                "ref_logprobs": theirs.logprobs,
            }

        return score_in_parts(
            sequences, score, max_tokens=self.max_tokens, packed=self.networks.packs(sequences)
        )


def _row_sums(rollout: Rollout, scores: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """KL of each answer, and its means over tokens."""
    lengths = rollout.response_mask.sum(1).clamp(min=1)
    table = {
        "kl_ref": (scores["logprobs"] - scores["ref_logprobs"]).sum(1),
        "ref_logprob": scores["ref_logprobs"].sum(1) / lengths,
        "entropy": scores["entropy"].sum(1) / lengths,
    }
    return {name: values.tolist() for name, values in table.items()}


def summarise(answers: Iterable[Answer], device: torch.device) -> dict[str, Any]:
    """Reduce all ranks' answers, apart for each way of answering.

    Args:
        answers: This rank's.
        device: Of the process group.

    Returns:
        ``AnswerStats`` by field of ``IterationStats``: ``val_greedy``, ``val_sampled`` (the
        policy's) and ``val_reference`` (sampled where there are samples), as far as there are
        such answers.
    """
    parts: dict[str, list[Answer]] = {"val_greedy": [], "val_sampled": [], "val_reference": []}
    answers = list(answers)
    sampled = any(answer.mode == "sampled" for answer in answers)
    for answer in answers:
        if answer.writer == "policy":
            parts[f"val_{answer.mode}"].append(answer)
        elif (answer.mode == "sampled") == sampled:
            parts["val_reference"].append(answer)
    found = {name: _means(part, device) for name, part in parts.items()}
    return {name: AnswerStats(**means) for name, means in found.items() if means}


def answers_log(prefix: str, found: Mapping[str, AnswerStats]) -> dict[str, float]:
    """Logged names and values, such as ``<prefix>/greedy/score``."""
    return {
        f"{prefix}/{way.removeprefix('val_')}/{spec.name}": value
        for way, stats in found.items()
        for attribute, spec in metric_specs(AnswerStats).items()
        if (value := getattr(stats, attribute)) is not None
    }


def _means(answers: Sequence[Answer], device: torch.device) -> dict[str, float]:
    """Means over all ranks of each number; those that were not measured are left out.

    Scores that are not finite occur where the reward may drop responses; they are left out as well.
    """
    count, tokens = float(len(answers)), float(sum(a.num_tokens for a in answers))
    openings = distinct_openings(gather_objects([a.response_ids for a in answers]))
    scored = [a.score for a in answers if math.isfinite(a.score)]
    judged = [a.gold for a in answers if a.gold is not None]
    measured = [a.kl_ref for a in answers if a.kl_ref is not None]
    totals = {
        "score": (sum(scored), len(scored)),
        "gold": (sum(judged), len(judged)),
        "kl_ref": (sum(measured), len(measured)),
        "response_length": (tokens, count),
        "truncated_share": (sum(a.truncated for a in answers), count),
        "repeated_bigrams": (sum(a.repeated_bigrams for a in answers), count),
        "distinct_openings": (openings * count, count),
        "entropy": (sum(a.entropy * a.num_tokens for a in answers), tokens),
        "ref_logprob_per_token": (sum(a.ref_logprob * a.num_tokens for a in answers), tokens),
    }
    table = torch.tensor(list(totals.values()), dtype=torch.float64, device=device)
    reduced = zip(totals, all_reduce_sum(table).tolist(), strict=True)
    means = {name: total / size for name, (total, size) in reduced if size}
    gold = moments(torch.tensor(judged, dtype=torch.float64, device=device), reduce=all_reduce_sum)
    return means | ({"gold_error": math.sqrt(gold.var / gold.count)} if gold.count else {})
