"""The first buffer of a run as evidence of what the actor and the rewards were made from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ppo_lightning.diagnostics import (
    Advice,
    RewardOrigin,
    Start,
    TextReader,
    review_reward_origin,
    review_scores,
    review_start,
)
from ppo_lightning.distributed import all_reduce_sum
from ppo_lightning.functional import kl_estimate, moments
from ppo_lightning.models.card import (
    ModelCard,
    digests_of,
    read_card,
    tokenizer_digests,
    weights_fingerprint,
)
from ppo_lightning.modules.collection import Collected
from ppo_lightning.modules.review import say
from ppo_lightning.rewards import SequenceClassifierReward

_CLAMP = 20.0  # of a log-ratio: e^20 is beyond any model that could be meant


def review_first_buffer(module: Any, collected: Collected) -> None:
    """Say what the first buffer shows: before any update, and on all ranks.

    Args:
        module: A ``PPOModule`` that is being fitted.
        collected: The buffer.

    Raises:
        ConfigError: ``guards.advice`` is ``error``, and something is likely to hurt.
    """
    found = [
        *_scores(module, collected),
        *review_start(_start(module, collected)),
        *_reward_origins(module),
    ]
    say(found, module.guards.advice)


def _scores(module: Any, collected: Collected) -> list[Advice]:
    """Compare the spread of the first scores with β."""
    result = collected.result
    scores = moments(result.raw, ~result.dropped, reduce=all_reduce_sum)
    if scores.count == 0:
        return []
    return review_scores(
        math.sqrt(scores.var),
        kl_coef=module.controls["kl_coef"],
        normalize=module.reward_pipeline.processing,
    )


def _start(module: Any, collected: Collected) -> Start:
    policy, reference = module.policy.path, module.reference_config.path
    kl, responses, tokens = _kl_totals(collected)
    return Start(
        kl_ref=kl / max(responses, 1.0),
        num_responses=int(responses),
        mean_length=tokens / max(responses, 1.0),
        policy=policy,
        policy_fingerprint=weights_fingerprint(policy),
        reference=reference,
        reference_fingerprint="" if reference is None else weights_fingerprint(reference),
    )


def _kl_totals(collected: Collected) -> tuple[float, float, float]:
    """KL, responses and tokens, over all ranks."""
    networks = collected.networks
    mask = collected.rollout.response_mask & collected.kept[:, None]
    per_token = kl_estimate(
        networks.logprobs, networks.ref_logprobs, estimator="k3", log_ratio_clamp=_CLAMP
    )
    own = [per_token.double().masked_fill(~mask, 0).sum(), mask.any(1).sum(), mask.sum()]
    kl, responses, tokens = all_reduce_sum(torch.stack([part.double() for part in own])).tolist()
    return kl, responses, tokens


def _reward_origins(module: Any) -> Iterator[Advice]:
    policy: TextReader | None = None
    for term in module.reward_pipeline.terms:
        if not isinstance(term.component, SequenceClassifierReward):
            continue
        card = read_card(term.component.path)
        if card is not None and card.kind == "reward":
            policy = policy or _policy(module)
            origin = _origin(term.name, term.component.path, card)
            yield from review_reward_origin(origin, policy)


def _policy(module: Any) -> TextReader:
    path = module.policy.path
    card, own = read_card(path), weights_fingerprint(path)
    others = [model.fingerprint for model in card.made_from] if card else []
    tokenizer, template = digests_of(module.tokenizer)
    return TextReader(
        path=path,
        lineage=[fingerprint for fingerprint in (own, *others) if fingerprint],
        tokenizer=tokenizer,
        chat_template=template,
    )


def _origin(name: str, path: str, card: ModelCard) -> RewardOrigin:
    sft = card.ancestor("sft")
    changes = {
        "weights": weights_fingerprint(path) != card.fingerprint,
        "chat template": tokenizer_digests(path)[1] != card.chat_template,
    }
    return RewardOrigin(
        name=name,
        model=TextReader(path=path, tokenizer=card.tokenizer, chat_template=card.chat_template),
        sft_path="" if sft is None else sft.path,
        sft_fingerprint="" if sft is None else sft.fingerprint,
        changed=[what for what, is_other in changes.items() if is_other],
    )
