"""Which function of the package answers which key of the golden files: losses and the chain."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ppo_lightning import functional as F
from tests.helpers.virtual_ranks import on_ranks
from tests.parity.golden_checks import Case, check


@check
def whiten_shards(case: Case) -> None:
    shards = [
        (case.as_tensor(shard["values"]), torch.tensor(shard["mask"]).bool())
        for shard in case.inputs["shards"]
    ]
    eps = case.inputs["eps"]
    pools = on_ranks(lambda reduce, k: F.moments(*shards[k], reduce=reduce), len(shards))
    for pool in pools:
        case.expect("count", pool.count)
        case.expect("mean", pool.mean)
        case.expect("var_population", pool.var)
    whitened = on_ranks(lambda reduce, k: F.whiten(*shards[k], eps=eps, reduce=reduce), len(shards))
    masks = [mask.tolist() for _, mask in shards]
    case.expect("population_shift_mean_per_shard", [w.tolist() for w in whitened], masks)


def policy_terms(case: Case, logprobs: Tensor) -> F.PolicyTerms:
    return F.policy_loss_per_token(
        logprobs,
        case.tensor("old_logprobs"),
        case.tensor("advantages"),
        case.mask,
        clip_low=case.inputs["clip_low"],
        clip_high=case.inputs["clip_high"],
        dual_clip=case.inputs.get("dual_clip"),
        log_ratio_clamp=case.inputs.get("log_ratio_clamp"),
    )


@check
def policy_loss(case: Case) -> None:
    inputs, mask = case.inputs, case.mask
    logprobs = case.tensor("logprobs").requires_grad_()
    terms = policy_terms(case, logprobs)
    loss = F.aggregate(terms.loss, mask, mode="token")
    loss.backward()
    case.expect("ratio", terms.ratio, mask)
    case.expect("loss_per_token", terms.loss, mask)
    case.expect("loss_token_mean", loss)
    case.expect("grad_token_mean_wrt_logprobs", logprobs.grad, mask)
    by_row = F.aggregate(terms.loss, mask, mode="sequence")
    case.expect("loss_sequence_mean_of_token_means", by_row)
    rows = mask.any(-1).sum()
    sums = F.aggregate(terms.loss, mask, mode="token", num_tokens=rows)
    case.expect("loss_sequence_mean_of_token_sums", sums)
    if "global_token_count" in inputs:
        share = F.aggregate(terms.loss, mask, mode="token", num_tokens=inputs["global_token_count"])
        case.expect("loss_token_sum_over_global_tokens", share)
        num = inputs["global_sequence_count"]
        share = F.aggregate(terms.loss, mask, mode="sequence", num_sequences=num)
        case.expect("loss_sequence_mean_over_global_sequences", share)
    case.expect("clip_fraction", F.masked_mean(terms.clip_active, mask))
    case.expect("outside_fraction", F.masked_mean(terms.outside, mask))
    if "dual_clip" in inputs:
        case.expect("dual_clip_fraction", F.masked_mean(terms.dual_clipped, mask))
    case.expect("ratio_mean", F.masked_mean(terms.ratio, mask))
    for estimator in ("k1", "k2", "k3"):
        kl = F.approx_kl(logprobs, case.tensor("old_logprobs"), mask, estimator=estimator)
        case.expect(f"approx_kl_{estimator}", kl)


@check
def policy_accumulation(case: Case) -> None:
    parts = [
        Case(case.inputs | inputs, case.expected, case.dtype, case.rtol, case.atol)
        for inputs in case.inputs["micro_batches"]
    ]
    tokens = sum(part.mask.sum() for part in parts)
    rows = sum(part.mask.any(-1).sum() for part in parts)
    losses = [policy_terms(part, part.tensor("logprobs")).loss for part in parts]
    shares = [
        F.aggregate(loss, part.mask, mode="token", num_tokens=tokens)
        for loss, part in zip(losses, parts, strict=True)
    ]
    by_row = [
        F.aggregate(loss, part.mask, mode="sequence", num_sequences=rows)
        for loss, part in zip(losses, parts, strict=True)
    ]
    means = [
        F.aggregate(loss, part.mask, mode="token")
        for loss, part in zip(losses, parts, strict=True)
        if part.mask.any()
    ]
    case.expect("global_token_count", tokens)
    case.expect("contribution_per_micro_batch", shares)
    case.expect("loss_token_mean_of_the_whole_step", sum(shares))
    case.expect("loss_sequence_mean_of_the_whole_step", sum(by_row))
    case.expect("mean_of_micro_batch_means_which_differs", sum(means) / len(means))


@check
def ppo_penalty(case: Case) -> None:
    inputs, mask = case.inputs, case.mask
    kls: dict[str, Tensor | None] = {"k1": None, "k2": None, "k3": None}
    if "logits" in inputs:
        temperature, actions = inputs["temperature"], torch.tensor(inputs["actions"])
        logits, old_logits = case.tensor("logits"), case.tensor("old_logits")
        new = F.token_logprobs(logits, actions, temperature=temperature)
        old = F.token_logprobs(old_logits, actions, temperature=temperature)
        kls = {"full": F.full_kl(old_logits, logits, temperature=temperature)}
    else:
        new, old = case.tensor("logprobs"), case.tensor("old_logprobs")
    for estimator, kl in kls.items():
        settings: Any = {"estimator": estimator, "kl": kl, "penalty_coef": inputs["beta"]}
        terms = F.penalty_loss_per_token(new, old, case.tensor("advantages"), mask, **settings)
        case.expect("surrogate_loss", F.masked_mean(terms.surrogate, mask))
        case.expect(f"kl_old_new_{estimator}", F.masked_mean(terms.kl, mask))
        case.expect(f"loss_{estimator}", F.aggregate(terms.loss, mask, mode="token"))


@check
def value_loss(case: Case) -> None:
    mask, values = case.mask, case.tensor("values").requires_grad_()
    terms = F.value_loss_per_token(
        values,
        case.tensor("old_values"),
        case.tensor("returns"),
        mask,
        clip_range=case.inputs["clip_value"],
    )
    by_token = F.aggregate(terms.loss, mask, mode="token")
    by_row = F.aggregate(terms.loss, mask, mode="sequence")
    (by_token / 2).backward()
    case.expect("squared_error_per_token", terms.loss, mask)
    case.expect("loss_token_mean_without_half", by_token)
    case.expect("loss_token_mean_with_half", by_token / 2)
    case.expect("loss_sequence_mean_without_half", by_row)
    case.expect("loss_sequence_mean_with_half", by_row / 2)
    case.expect("clip_fraction", F.masked_mean(terms.clipped, mask))
    case.expect("grad_token_mean_with_half_wrt_values", values.grad, mask)
    if "global_token_count" in case.inputs:
        num = case.inputs["global_token_count"]
        share = F.aggregate(terms.loss, mask, mode="token", num_tokens=num)
        case.expect("loss_token_sum_over_global_tokens_with_half", share / 2)


@check
def pipeline(case: Case) -> None:
    mask, rewards = _shaped(case)
    case.expect("token_rewards", rewards, mask)
    advantages, returns = F.gae(
        rewards,
        case.tensor("old_values"),
        mask,
        gamma=case.inputs["gamma"],
        gae_lambda=case.inputs["lambda"],
    )
    whitened = F.whiten(advantages, mask)
    if case.inputs["whiten_variance"] == "sample":
        # A convention that the package does not have. It differs by this factor, and by less than
        # the tolerance in what the guard of 1e-8 does.
        num = int(mask.sum())
        whitened = whitened * math.sqrt((num - 1) / num)
    case.expect("mask", mask)
    case.expect("advantages_raw", advantages, mask)
    case.expect("returns", returns, mask)
    case.expect("advantages", whitened, mask)
    explained = F.explained_variance(case.tensor("old_values"), returns, mask)
    case.expect("explained_variance", explained)
    _losses(case, mask, whitened, returns)


def _shaped(case: Case) -> tuple[Tensor, Tensor]:
    inputs = case.inputs
    mask = F.response_mask(torch.tensor(inputs["response_ids"]), inputs["eos_token_ids"])
    scores = case.tensor("scores")
    if inputs["score_norm"] == "zscore_population":
        scores = F.zscore(scores, eps=inputs["score_eps"])
    scores = F.clip_scores(scores, *inputs["score_clip"])
    case.expect("score_used", scores)
    old, ref = case.tensor("old_logprobs"), case.tensor("ref_logprobs")
    kl = F.kl_estimate(old, ref, estimator=inputs["kl_estimator"])
    return mask, F.token_rewards(scores, kl, mask, kl_coef=inputs["beta"])


def _losses(case: Case, mask: Tensor, advantages: Tensor, returns: Tensor) -> None:
    inputs, new, old = case.inputs, case.tensor("logprobs"), case.tensor("old_logprobs")
    clip = inputs["clip"]
    policy = F.policy_loss_per_token(new, old, advantages, mask, clip_low=clip, clip_high=clip)
    value = F.value_loss_per_token(
        case.tensor("values"),
        case.tensor("old_values"),
        returns,
        mask,
        clip_range=inputs["clip_value"],
    )
    policy_mean = F.aggregate(policy.loss, mask, mode="token")
    value_mean = F.aggregate(value.loss, mask, mode="token")
    case.expect("policy_loss", policy_mean)
    case.expect("clip_fraction", F.masked_mean(policy.clip_active, mask))
    case.expect("approx_kl_k1", F.approx_kl(new, old, mask, estimator="k1"))
    case.expect("approx_kl_k3", F.approx_kl(new, old, mask))
    case.expect("value_loss_with_half", value_mean / 2)
    case.expect("value_clip_fraction", F.masked_mean(value.clipped, mask))
    # vf_coef is half of a coefficient that goes with the factor 1/2.
    case.expect("total_loss", policy_mean + inputs["value_coef"] / 2 * value_mean)
