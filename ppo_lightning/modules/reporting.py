"""From what an iteration did to ``IterationStats``: totals on every rank, reduced once."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.distributed import (
    all_reduce_max,
    all_reduce_sum,
    gather_objects,
    num_replicas,
    world_size,
)
from ppo_lightning.functional import (
    distinct_ngrams,
    distinct_openings,
    explained_variance,
    group_spread,
    opening_share,
)
from ppo_lightning.metrics import ComponentStats, IterationStats, Sums, deviation, quotient
from ppo_lightning.modules.collection import Collected
from ppo_lightning.modules.decision import StepReport
from ppo_lightning.modules.device_time import idle_share
from ppo_lightning.modules.objective import SUMS, Terms
from ppo_lightning.modules.passes import Part
from ppo_lightning.modules.reward_stats import (
    Share,
    component_stats,
    component_sums,
    component_totals,
    score_distribution,
    shares_of,
)
from ppo_lightning.modules.slices import (
    SUMS_BY_POSITION,
    ResponseRow,
    group_stats,
    position_stats,
    position_totals,
    response_rows,
)
from ppo_lightning.modules.stages import STAGES, StageClock
from ppo_lightning.modules.staleness import (
    MAXIMA,
    SUMS_OF_AGE,
    staleness_fields,
    staleness_totals,
)
from ppo_lightning.types import MiniBatch

_TEXTS = ("repeated_bigrams", "distinct_1", "distinct_2", "opening_share", "distinct_openings")
_PER_RESPONSE = (
    "responses",
    "sampled",
    "length",
    "score",
    "score_squared",
    "raw_score",
    "raw_squared",
    "score_clipped",
    "reward",
    "kl_ref",
    "truncated",
    "dropped",
    "unscored",
    "nonfinite",
    *_TEXTS,
)
_PER_TOKEN = (
    "tokens",
    "entropy",
    "nll",
    "mismatch",
    "behaviour_kl",
    "value",
    "return",
    "advantage",
    "advantage_squared",
)
_TOKEN_MEANS = {
    "entropy": "entropy",
    "sampled_nll": "nll",
    "sampler_mismatch": "mismatch",
    "behaviour_kl": "behaviour_kl",
    "value_mean": "value",
    "return_mean": "return",
}
_STEPS = (
    "steps",
    "actor_steps",
    "critic_steps",
    "actor_moves",
    "grad_norm_actor",
    "grad_norm_critic",
    "skipped_nonfinite",
)


class IterationLedger:
    """What one iteration did, as totals on this rank.

    Args:
        components: Names of the reward components.
    """

    def __init__(self, components: tuple[str, ...]) -> None:
        self.components = components
        self.rollout = Sums(
            (
                *_PER_RESPONSE,
                *_PER_TOKEN,
                *SUMS_BY_POSITION,
                *SUMS_OF_AGE,
                *component_sums(components),
            ),
            maxima=("score_max", "length_max", "advantage_abs_max", *MAXIMA),
            minima=("score_min",),
        )
        self.update = Sums(
            (*SUMS, *_STEPS), maxima=("ratio_max", "norm_actor_max", "norm_critic_max")
        )
        self.prompts: dict[str, float | None] = {}
        self.shares: dict[str, Share] = {}
        self.reset(torch.device("cpu"))

    def reset(self, device: torch.device) -> None:
        """Forget the iteration before."""
        self.rollout.to(device).reset()
        self.update.to(device).reset()
        self.responses: list[ResponseRow] = []  # of all ranks
        self.explained_variance: float | None = None
        self.first_ratio_error: float | None = None
        self.kl_old_last: float | None = None
        self.kl_stopped = self.kl_capped = False
        self.score_spread: float | None = None
        self.policy_version = 0
        self.temperature: float | None = None
        self.sampled_tokens = self.updated_tokens = 0.0
        self.learning_rates: dict[str, float] = {}
        self._steps: list[tuple[Part, Terms, StepReport]] = []

    def add_rollout(self, collected: Collected, kl_coef: float) -> None:
        """Add the buffer.

        Args:
            collected: Buffer and measurements.
            kl_coef: β in the rewards of the buffer.
        """
        self.policy_version = collected.rollout.policy_version
        self.temperature = collected.rollout.temperature
        self.score_spread = collected.result.spread
        self.prompts = prompt_stats(collected)
        self.rollout.add(**_response_totals(collected, kl_coef))
        own = response_rows(collected)
        self.responses = gather_objects(own)
        texts = zip(collected.completions.response_ids, collected.kept.tolist(), strict=True)
        self.rollout.add(**_text_totals([ids for ids, kept in texts if kept], own))
        self.rollout.add(**_token_totals(collected), **position_totals(collected))
        self.rollout.add(**staleness_totals(collected))
        self.shares = shares_of(collected.result)
        self.rollout.add(**component_totals(collected, self.shares))
        variance = explained_variance(
            collected.experience.old_values,
            collected.experience.returns,
            collected.shaped.mask,
            reduce=all_reduce_sum,
        )
        self.explained_variance = float(variance)

    def add_step(
        self, part: Part, terms: Terms, report: StepReport, groups: list[dict[str, Any]]
    ) -> None:
        """Add one minibatch whose forward pass was made.

        Args:
            part: What it trained.
            terms: Sums over its tokens on this rank.
            report: What was decided.
            groups: The optimiser's, for the rates in force.
        """
        self.learning_rates |= {g["name"]: g["lr"] for g in groups if part in ("both", g["name"])}
        self.kl_stopped |= report.decision == "kl_stop"
        self.kl_capped |= report.decision == "kl_cap"
        if part != "critic":
            if report.first_error is not None:
                self.first_ratio_error = report.first_error
            self.kl_old_last = report.kl_old
        self._steps.append((part, terms, report))

    def _update_totals(self) -> dict[str, float]:
        """Add the steps up, and reduce over ranks; once an iteration, to keep the steps lean."""
        finite = [step for step in self._steps if step[2].decision != "nonfinite"]
        self.update.reset()
        self.update.add(skipped_nonfinite=len(self._steps) - len(finite))
        if finite:
            sums = torch.stack([terms.sums for _, terms, _ in finite]).sum(0)
            actor = [report.actor_norm for part, _, report in finite if part != "critic"]
            critic = [report.critic_norm for part, _, report in finite if part != "actor"]
            self.update.add(
                **dict(zip(SUMS, sums.unbind(), strict=True)),
                grad_norm_actor=sum(actor),
                grad_norm_critic=sum(critic),
                actor_steps=len(actor),
                critic_steps=len(critic),
                steps=sum(report.decision == "step" for *_, report in finite),
                actor_moves=sum(r.decision == "step" for part, _, r in finite if part != "critic"),
            )
            if actor:
                ratios = [terms.ratio_max for part, terms, _ in finite if part != "critic"]
                self.update.add(norm_actor_max=max(actor), ratio_max=torch.stack(ratios).max())
            if critic:
                self.update.add(norm_critic_max=max(critic))
        return self.update.compute()

    def stats(self, batch: MiniBatch, *, num_skipped: int) -> IterationStats:
        """Reduce the totals over all ranks.

        Args:
            batch: The last minibatch of the iteration.
            num_skipped: Planned steps that a stop left out.
        """
        rollout, totals = self.rollout_stats(), self._update_totals()
        self.sampled_tokens = rollout.pop("sampled")
        self.updated_tokens = max(totals["tokens"], totals["value_tokens"])
        update = self._update_stats(batch, totals) | {"steps_skipped_kl": float(num_skipped)}
        return IterationStats(iteration=batch.experience.iteration, **rollout, **update)

    def time_stats(self, clock: StageClock, *, device: torch.device) -> dict[str, Any]:
        """Fields of ``IterationStats`` about time and memory, of the slowest and largest rank.

        Args:
            clock: Of this rank.
            device: Of this rank.
        """
        own = {
            **{f"{stage}_seconds": clock.seconds.get(stage, 0.0) for stage in STAGES},
            **{f"{stage}_idle_share": _idle(clock, stage) for stage in STAGES},
            "total": clock.elapsed,
            "waiting_share": clock.waited / clock.elapsed,
            "memory_gib": memory_gib(device),
        }
        numbers = torch.tensor(list(own.values()), dtype=torch.float64, device=device)
        largest = dict(zip(own, all_reduce_max(numbers).tolist(), strict=True))
        slowest = {s: t for s in STAGES if (t := largest[f"{s}_seconds"])}
        idle = {f"{s}_idle_share": largest[f"{s}_idle_share"] for s in slowest}
        times = time_fields(
            slowest,
            total=largest["total"],
            rollout_tokens=self.sampled_tokens,
            update_tokens=self.updated_tokens,
        )
        rest = {name: largest[name] for name in ("waiting_share", "memory_gib")}
        if world_size() == 1:
            rest.pop("waiting_share")
        return {**times, **{k: v for k, v in idle.items() if v >= 0}, **rest}

    def rollout_stats(self) -> dict[str, Any]:
        """Fields of ``IterationStats`` about the buffer, over all ranks."""
        totals = self.rollout.compute()
        each = {
            "score_mean": "score",
            "raw_score_mean": "raw_score",
            "score_clipped_share": "score_clipped",
            "reward_mean": "reward",
            "kl_ref": "kl_ref",
            "truncated_share": "truncated",
            "response_length_mean": "length",
            **dict(zip(_TEXTS, _TEXTS, strict=True)),
        }
        found: dict[str, Any] = {k: quotient(totals, v, "responses") for k, v in each.items()}
        found |= {k: quotient(totals, v, "tokens") for k, v in _TOKEN_MEANS.items()}
        return found | {
            "kl_ref_per_token": quotient(totals, "kl_ref", "length"),
            "score_std": deviation(totals, "score", "score_squared", "responses"),
            "raw_score_std": deviation(totals, "raw_score", "raw_squared", "responses"),
            "advantage_std": deviation(totals, "advantage", "advantage_squared", "tokens"),
            "response_length_max": totals.get("length_max"),
            **{k: totals.get(k) for k in ("score_min", "score_max", "advantage_abs_max")},
            "dropped_responses": totals["dropped"],
            "unscored_responses": totals["unscored"],
            "num_responses": totals["responses"] + totals["dropped"],
            "num_tokens": totals["tokens"],
            "sampled": totals["sampled"],
            "explained_variance": self.explained_variance,
            "policy_version": float(self.policy_version),
            "temperature": self.temperature,
            "score_spread": self.score_spread,
            "nonfinite_responses": totals["nonfinite"],
            **staleness_fields(totals),
            **self.prompts,
            **score_distribution(self.responses),
            "components": self._component_stats(totals),
            "entropy_at": position_stats(totals),
            "groups": group_stats(self.responses),
        }

    def _component_stats(self, totals: Mapping[str, float]) -> dict[str, ComponentStats]:
        return {n: component_stats(totals, n, self.shares.get(n)) for n in self.components}

    def _update_stats(self, batch: MiniBatch, totals: Mapping[str, float]) -> dict[str, Any]:
        """Fields of ``IterationStats`` about the update, over all ranks."""
        token = {
            "policy_loss": "policy_loss",
            "update_entropy": "entropy",
            "kl_old": "kl_old",
            "clip_fraction": "outside",
            "clip_active_fraction": "clip_active",
            "dual_clip_fraction": "dual_clipped",
            "kl_loss": "kl_loss",
            "ratio_mean": "ratio",
            "ratio_beyond_2": "ratio_beyond_2",
        }
        ranks = num_replicas()  # every rank counts the same steps
        taken, skipped = totals["steps"] / ranks, totals["skipped_nonfinite"] / ranks
        found: dict[str, Any] = {k: quotient(totals, v, "tokens") for k, v in token.items()}
        return found | {
            "value_loss": quotient(totals, "value_loss", "value_tokens"),
            "value_clip_fraction": quotient(totals, "value_clipped", "value_tokens"),
            "clip_fraction_positive": quotient(totals, "outside_positive", "positive"),
            "clip_fraction_negative": quotient(totals, "outside_negative", "negative"),
            "ptx_loss": quotient(totals, "ptx_loss", "ptx_tokens"),
            "kl_ref_update": quotient(totals, "kl_ref", "sequences"),
            "log_ratio_clamped": totals["ratio_clamped"],
            "ratio_max": totals.get("ratio_max"),
            "grad_norm_actor": quotient(totals, "grad_norm_actor", "actor_steps"),
            "grad_norm_critic": quotient(totals, "grad_norm_critic", "critic_steps"),
            "grad_norm_actor_max": totals.get("norm_actor_max"),
            "grad_norm_critic_max": totals.get("norm_critic_max"),
            "lr_actor": self.learning_rates.get("actor"),
            "lr_critic": self.learning_rates.get("critic"),
            "kl_old_last": self.kl_old_last,
            "kl_stopped": float(self.kl_stopped),
            "kl_capped": float(self.kl_capped),
            "first_ratio_error": self.first_ratio_error,
            "steps_taken": taken,
            "actor_steps": totals["actor_moves"] / ranks,
            "steps_skipped_nonfinite": skipped,
            "epochs_done": taken / (batch.num_steps / batch.num_epochs),
        }


def _response_totals(collected: Collected, kl_coef: float) -> dict[str, Tensor | float]:
    """Sums over the responses that are in the buffer."""
    result, rollout = collected.result, collected.rollout
    device = rollout.response_ids.device
    kept = collected.kept
    lengths = rollout.response_mask.sum(1)
    score, raw = result.totals.to(device).double(), result.raw.to(device).double()
    networks = collected.networks
    log_ratio = (networks.logprobs - networks.ref_logprobs).double().sum(1)
    penalty = kl_coef * networks.kl.double().sum(1)
    totals: dict[str, Tensor | float] = {
        "responses": kept.sum(),
        "sampled": lengths.sum(),
        "length": lengths[kept].sum(),
        "dropped": (~kept).sum(),
        "unscored": (result.dropped.to(device) & (lengths > 0)).sum(),
        "nonfinite": collected.nonfinite.sum(),
        "score": score[kept].sum(),
        "score_squared": score[kept].square().sum(),
        "raw_score": raw[kept].sum(),
        "raw_squared": raw[kept].square().sum(),
        "score_clipped": result.clipped.to(device)[kept].sum(),
        "reward": (score - penalty)[kept].sum(),
        "kl_ref": log_ratio[kept].sum(),
        "truncated": rollout.truncated[kept].sum(),
    }
    if bool(kept.any()):
        totals |= {"score_max": score[kept].max(), "score_min": score[kept].min()}
        totals |= {"length_max": lengths[kept].max()}
    return totals


def prompt_stats(collected: Collected) -> dict[str, float | None]:
    """Spread of the raw scores within prompts, over all ranks; nothing where each has one."""
    scores, groups = collected.result.raw, collected.rollout.prompts.groups
    compared, flat, spread = group_spread(
        scores.to(groups.device), groups, collected.kept, reduce=all_reduce_sum
    )
    if compared == 0:
        return {}
    return {"prompt_score_std": spread, "flat_prompt_share": flat / compared}


def _text_totals(response_ids: Any, rows: Sequence[ResponseRow]) -> dict[str, float]:
    """Repetition and variety; what compares responses sees those of all ranks."""
    count, everyone = len(response_ids), gather_objects(response_ids)
    return {
        "repeated_bigrams": sum(row.repeated_bigrams for row in rows),
        "distinct_1": distinct_ngrams(everyone, 1) * count,
        "distinct_2": distinct_ngrams(everyone, 2) * count,
        "opening_share": opening_share(everyone) * count,
        "distinct_openings": distinct_openings(everyone) * count,
    }


def _token_totals(collected: Collected) -> dict[str, Tensor | float]:
    """Sums over the valid tokens of the buffer."""
    mask, networks = collected.shaped.mask, collected.networks
    raw = collected.shaped.raw_advantages
    sampler_excess = collected.rollout.sampler_logprobs - networks.logprobs
    columns = {
        "entropy": networks.entropy,
        "nll": -networks.logprobs,
        "mismatch": sampler_excess.abs(),
        "behaviour_kl": sampler_excess,
        "value": networks.values,
        "return": collected.experience.returns,
        "advantage": raw,
        "advantage_squared": raw.square(),
    }
    table = torch.stack([column.double() for column in columns.values()])
    sums = table.masked_fill(~mask, 0).sum((1, 2))
    totals: dict[str, Tensor | float] = dict(zip(columns, sums.unbind(), strict=True))
    return totals | {
        "tokens": mask.sum(),
        "advantage_abs_max": raw.masked_fill(~mask, 0).abs().max(),
    }


def _idle(clock: StageClock, stage: str) -> float:
    """Share of a stage in which this rank's device was idle; -1 where it is not known."""
    if stage not in clock.busy:
        return -1.0
    return idle_share(clock.busy[stage], clock.seconds[stage])


def time_fields(
    seconds: Mapping[str, float], *, total: float, rollout_tokens: float, update_tokens: float
) -> dict[str, Any]:
    """Fields of ``IterationStats`` about time, of the slowest rank.

    Args:
        seconds: By stage.
        total: Of the iteration so far.
        rollout_tokens: Sampled, all ranks.
        update_tokens: Response tokens that the update worked on, all ranks.
    """
    known: dict[str, Any] = {f"{name}_seconds": spent for name, spent in seconds.items()}
    busy = sum(spent for name, spent in seconds.items() if name != "reward")
    known |= {"iteration_seconds": total, "device_idle_share": max(0.0, 1 - busy / total)}
    if seconds.get("rollout"):
        known["rollout_tokens_per_second"] = rollout_tokens / seconds["rollout"]
    if seconds.get("update"):
        known["update_tokens_per_second"] = update_tokens / seconds["update"]
    return known


def memory_gib(device: torch.device) -> float:
    """Peak memory of the device, or of the process on a CPU; of this rank."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


_SECTIONS = ("rollout/", "update/", "time/", "run/")


def log_iteration(trainer: Any, values: Mapping[str, float], *, iteration: int) -> None:
    """Hand an iteration's numbers to all loggers, and to callbacks that monitor one of them.

    Straight to them, as the numbers are reduced already: ``self.log`` would keep, reduce and copy
    each of some seventy, which took a tenth of an iteration of a tiny model.

    Args:
        trainer: The run's.
        values: By logged name.
        iteration: The x axis of all loggers.
    """
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=iteration)
        logger.save()
    monitored = trainer.callback_metrics
    for name in [name for name in monitored if name.startswith(_SECTIONS)]:
        if name not in values:  # not measured this time: no callback may act on an older value
            del monitored[name]
    monitored.update({k: torch.tensor(value) for k, value in values.items()})
