"""Which function of the package answers which key of the golden files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ppo_lightning import functional as F

# Conventions that the package does not have. The population variance is used everywhere.
NOT_COMPUTED = {
    "reward_zscore": {"std_sample", "zscore_sample"},
    "whiten": {"var_sample", "sample_shift_mean", "sample_keep_mean"},
    "whiten_shards": {"var_sample", "sample_shift_mean_per_shard"},
    # Holes are no steps here; the other form lets γ and λ count them.
    "gae_gap": {"advantages_zero", "returns_zero"},
}


@dataclass
class Case:
    """A golden case at one precision; remembers which expected keys were compared."""

    inputs: dict[str, Any]
    expected: dict[str, Any]
    dtype: torch.dtype
    rtol: float
    atol: float
    compared: set[str] = field(default_factory=set)

    def tensor(self, key: str) -> Tensor:
        return self.as_tensor(self.inputs[key])

    def as_tensor(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=self.dtype)

    @property
    def mask(self) -> Tensor:
        return torch.tensor(self.inputs["mask"]).bool()

    def expect(self, key: str, actual: Any, mask: Tensor | None = None) -> None:
        self.compared.add(key)
        self.near(actual, self.expected[key], mask, key)

    def near(self, actual: Any, expected: Any, mask: Tensor | None = None, key: str = "") -> None:
        if isinstance(actual, Tensor):
            actual = actual.tolist()
        if isinstance(expected, list):
            assert len(actual) == len(expected), key
            for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
                self.near(a, e, None if mask is None else mask[k], f"{key}[{k}]")
        elif mask is None or bool(mask):
            if expected is None:
                assert math.isnan(actual), key
            else:
                bound = self.atol + self.rtol * abs(expected)
                assert abs(actual - expected) <= bound, f"{key}: {actual} is not {expected}"


CHECKS: dict[str, Callable[[Case], None]] = {}


def check(function: Callable[[Case], None]) -> Callable[[Case], None]:
    CHECKS[function.__name__] = function
    return function


@check
def response_mask(case: Case) -> None:
    ids = torch.tensor(case.inputs["response_ids"])
    eos = case.inputs["eos_token_ids"]
    mask = F.response_mask(ids, eos)
    last = F.last_index(mask)
    case.expect("mask", mask)
    case.expect("last_index", last)
    case.expect("length", mask.sum(-1))
    case.expect("ended_with_eos", [int(row[k]) in eos for row, k in zip(ids, last, strict=True)])
    assert torch.equal(F.mask_from_lengths(mask.sum(-1), ids.shape[1]), mask)


@check
def logprobs(case: Case) -> None:
    ids, mask = (torch.tensor(case.inputs[k]) for k in ("input_ids", "response_mask"))
    mask = mask[:, 1:].bool()
    temperature = case.inputs["temperature"]
    logits = case.tensor("logits")
    scored = F.shifted_logprobs(logits, ids, temperature=temperature)
    again, _ = F.logprobs_and_entropy(logits[:, :-1], ids[:, 1:], temperature=temperature)
    case.expect("mask_shifted", mask)
    case.expect("logprobs_shifted", scored, mask)
    case.expect("logprobs_shifted", again, mask)
    case.expect("sequence_logprob", F.masked_sum(scored, mask, -1))


@check
def entropy(case: Case) -> None:
    logits, temperature = case.tensor("logits"), case.inputs["temperature"]
    computed = F.entropy_from_logits(logits, temperature=temperature)
    ids = torch.zeros(logits.shape[:-1], dtype=torch.long)
    _, again = F.logprobs_and_entropy(logits, ids, temperature=temperature)
    case.expect("entropy", computed, case.mask)
    case.expect("entropy", again, case.mask)
    case.expect("token_mean", F.aggregate(computed, case.mask, mode="token"))
    case.expect("sequence_mean", F.aggregate(computed, case.mask, mode="sequence"))


@check
def kl_penalty(case: Case) -> None:
    new, ref, mask = case.tensor("logprobs"), case.tensor("ref_logprobs"), case.mask
    for estimator in ("k1", "k2", "k3", "abs"):
        kl = F.kl_estimate(new, ref, estimator=estimator)
        case.expect(estimator, kl, mask)
        case.expect(f"{estimator}_token_mean", F.masked_mean(kl, mask))
        case.expect(f"{estimator}_sequence_sum", F.masked_sum(kl, mask, -1))
    if "log_ratio_clamp" in case.inputs:
        clamp = case.inputs["log_ratio_clamp"]
        clamped = F.kl_estimate(new, ref, estimator="k3", log_ratio_clamp=clamp)
        case.expect("k3_log_ratio_clamped", clamped, mask)


@check
def kl_full(case: Case) -> None:
    logits, ref = case.tensor("logits"), case.tensor("ref_logits")
    kl = F.full_kl(logits, ref, temperature=case.inputs["temperature"])
    case.expect("kl", kl, case.mask)
    case.expect("token_mean", F.masked_mean(kl, case.mask))


@check
def token_rewards(case: Case) -> None:
    inputs, mask, scores = case.inputs, case.mask, case.tensor("scores")
    if "missing_eos_penalty" in inputs:
        scores = F.score_after_penalties(
            scores,
            ended_with_eos=torch.tensor(inputs["ended_with_eos"]).bool(),
            missing_eos_penalty=inputs["missing_eos_penalty"],
        )
    scores = F.clip_scores(scores, *inputs.get("score_clip", (None, None)))
    kl = F.kl_estimate(
        case.tensor("logprobs"), case.tensor("ref_logprobs"), estimator=inputs["kl_estimator"]
    )
    rewards = F.token_rewards(scores, kl, mask, kl_coef=inputs["beta"])
    kl_part = F.token_rewards(torch.zeros_like(scores), kl, mask, kl_coef=inputs["beta"])
    at_last = F.token_rewards(scores, kl, mask, kl_coef=inputs["beta"], placement="last")
    case.expect("score_used", scores)
    case.expect("last_index", F.last_index(mask))
    case.expect("kl_rewards", kl_part, mask)
    case.expect("rewards", rewards, mask)
    case.expect("reward_sum", rewards.sum(-1))
    case.expect("reward_sum", at_last.sum(-1))


@check
def reward_zscore(case: Case) -> None:
    scores, eps = case.tensor("scores"), case.inputs["eps"]
    pool = F.moments(scores)
    normal = F.zscore(scores, eps=eps)
    case.expect("mean", pool.mean)
    case.expect("std_population", math.sqrt(pool.var))
    case.expect("zscore_population", normal)
    if "clip" in case.inputs:
        clip = case.inputs["clip"]
        clipped = F.clip_scores(scores, *clip)
        case.expect("zscore_population_then_clip", F.clip_scores(normal, *clip))
        case.expect("clip_only", clipped)
        case.expect("clip_then_zscore_population", F.zscore(clipped, eps=eps))


@check
def reward_running(case: Case) -> None:
    state, steps = F.Moments(), case.expected["steps"]
    case.compared.add("steps")
    for batch, step in zip(case.inputs["batches"], steps, strict=True):
        scores = case.as_tensor(batch)
        state = F.running_update(state, scores)
        normal = F.normalise(scores, state, eps=case.inputs["eps"])
        for actual, key in (
            (state.count, "count"),
            (state.mean, "mean"),
            (state.var, "var_population"),
            (math.sqrt(state.var), "std_population"),
            (normal, "normalised_population"),
        ):
            case.near(actual, step[key], key=f"steps.{key}")


@check
def reward_ema(case: Case) -> None:
    for key, bias_corrected in (
        ("mean_and_variance_first_batch_init", False),
        ("two_moments_bias_corrected", True),
    ):
        case.compared.add(key)
        state = F.Moments()
        for batch, step in zip(case.inputs["batches"], case.expected[key], strict=True):
            scores, decay = case.as_tensor(batch), case.inputs["decay"]
            state = F.ema_update(state, scores, decay=decay, bias_corrected=bias_corrected)
            normal = F.normalise(scores, state, eps=case.inputs["eps"])
            case.near(state.mean, step["mean"], key=f"{key}.mean")
            case.near(state.var, step["var"], key=f"{key}.var")
            case.near(normal, step["normalised"], key=f"{key}.normalised")
            if bias_corrected:
                second = state.var + state.mean**2
                case.near(second, step["second_moment"], key=f"{key}.second_moment")


@check
def whiten(case: Case) -> None:
    values, mask, eps = case.tensor("values"), case.mask, case.inputs["eps"]
    pool = F.moments(values, mask)
    case.expect("count", pool.count)
    case.expect("mean", pool.mean)
    case.expect("var_population", pool.var)
    case.expect("population_shift_mean", F.whiten(values, mask, eps=eps), mask)
    kept = F.whiten(values, mask, eps=eps, shift_mean=False)
    case.expect("population_keep_mean", kept, mask)


@check
def gae(case: Case) -> None:
    inputs, mask = case.inputs, case.mask
    rewards, gamma = case.tensor("rewards"), inputs["gamma"]
    bootstrap = case.tensor("bootstrap_values") if "bootstrap_values" in inputs else None
    advantages, returns = F.gae(
        rewards,
        case.tensor("values"),
        mask,
        gamma=gamma,
        gae_lambda=inputs["lambda"],
        bootstrap_values=bootstrap,
    )
    case.expect("advantages", advantages, mask)
    case.expect("returns", returns, mask)
    sums = F.discounted_returns(rewards, mask, gamma=gamma, bootstrap_values=bootstrap)
    case.expect("discounted_returns", sums, mask)


@check
def gae_gap(case: Case) -> None:
    advantages, returns = F.gae(
        case.tensor("rewards"),
        case.tensor("values"),
        case.mask,
        gamma=case.inputs["gamma"],
        gae_lambda=case.inputs["lambda"],
    )
    case.expect("advantages_skip", advantages, case.mask)
    case.expect("returns_skip", returns, case.mask)


@check
def explained_variance(case: Case) -> None:
    values, returns, mask = case.tensor("values"), case.tensor("returns"), case.mask
    case.expect("var_returns", F.moments(returns, mask).var)
    case.expect("var_residual", F.moments(returns - values, mask).var)
    case.expect("explained_variance", F.explained_variance(values, returns, mask))


@check
def ptx(case: Case) -> None:
    inputs, labels = case.inputs, torch.tensor(case.inputs["ptx_labels"])
    logits = case.tensor("ptx_logits").requires_grad_()
    # As supervised training does it: only what predicts a counted label is looked at.
    counted = labels[:, 1:] != inputs["ignore_index"]
    logprobs = F.token_logprobs(logits[:, :-1][counted], labels[:, 1:][counted], temperature=1.0)
    total, count = -logprobs.sum(), counted.sum()
    loss = total / count.clamp_min(1)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    actor = inputs["policy_loss"] + inputs["ptx_coef"] * loss
    critic = inputs["value_coef"] * inputs["value_loss"]
    bonus = inputs["entropy_coef"] * inputs["entropy"]
    case.expect("ptx_loss", loss)
    case.expect("ptx_tokens", count)
    case.expect("actor_loss_with_ptx", actor)
    case.expect("total_loss", actor + critic - bonus)


@check
def adaptive_kl_controller(case: Case) -> None:
    inputs = case.inputs
    coef, coefs, errors = inputs["init_beta"], [], []
    for kl, num in zip(inputs["kl"], inputs["n_steps"], strict=True):
        new = F.adapted_kl_coef(
            coef, kl, target=inputs["target"], horizon=inputs["horizon"], num_responses=num
        )
        errors.append((new / coef - 1) * inputs["horizon"] / num)
        coef = new
        coefs.append(coef)
    case.expect("beta_after", coefs)
    case.expect("clipped_error", errors)


@check
def adaptive_beta(case: Case) -> None:
    coef, coefs = case.inputs["init_beta"], []
    for kl in case.inputs["kl"]:
        coef = F.adapted_penalty_coef(coef, kl, target=case.inputs["target"])
        coefs.append(coef)
    case.expect("beta_after", coefs)


@check
def lr_schedule(case: Case) -> None:
    inputs = case.inputs
    factors = [
        F.lr_factor(
            step,
            warmup_steps=inputs["warmup_steps"],
            total_steps=inputs["total_steps"],
            schedule=inputs["schedule"],
            min_ratio=inputs.get("min_lr_ratio", 0.0),
        )
        for step in inputs["steps"]
    ]
    # Rates are millions of times smaller than the tolerance: compare the factors.
    case.compared.add("lr")
    case.near(factors, [rate / inputs["base_lr"] for rate in case.expected["lr"]], key="lr")
