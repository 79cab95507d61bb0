"""One sampled token a row, from logits and one uniform number a row."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_lightning.configs import SamplingConfig
from ppo_lightning.functional import inverse_cdf_sample
from ppo_lightning.models import sent


def draw_tokens(
    logits: Tensor,
    uniforms: Tensor | None,
    *,
    sampling: SamplingConfig,
    banned_ids: tuple[int, ...] = (),
    banned: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw the next token of each row.

    Args:
        logits: Of the next token, before the temperature. ``[B, V]``.
        uniforms: Uniform in [0, 1). ``[B]`` float64; None takes the likeliest token.
        sampling: Temperature, top-k and top-p.
        banned_ids: Not drawn (end tokens before the least length).
        banned: Rows for which that holds; None is all. ``[B]`` bool.

    Returns:
        ``(ids, logprobs)``, ``[B]`` long and ``[B]`` float32: the log-probability is that of the
        whole distribution at the temperature, before any token is ruled out.
    """
    scaled = logits.float()
    if sampling.temperature != 1.0:
        scaled = scaled / sampling.temperature
    candidates = _restricted(scaled, sampling, banned_ids, banned)
    ids = _chosen(candidates, uniforms)
    return ids, scaled.gather(1, ids[:, None])[:, 0] - scaled.logsumexp(-1)


def _chosen(candidates: Tensor, uniforms: Tensor | None) -> Tensor:
    if uniforms is None:
        return candidates.argmax(-1)
    return inverse_cdf_sample(candidates, uniforms)


def _restricted(
    scaled: Tensor,
    sampling: SamplingConfig,
    banned_ids: tuple[int, ...],
    banned: Tensor | None,
) -> Tensor:
    """Rule tokens out by setting their logits to -inf."""
    if banned_ids:
        places = sent(torch.tensor(banned_ids), scaled.device)
        barred = torch.zeros_like(scaled[0], dtype=torch.bool).index_fill_(0, places, True)
        rows = barred if banned is None else barred & banned[:, None]
        scaled = scaled.masked_fill(rows, -torch.inf)
    if 0 < sampling.top_k < scaled.shape[-1]:
        least = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if sampling.top_p < 1.0:
        scaled = _nucleus(scaled, sampling.top_p)
    return scaled


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens whose probability before them is below ``top_p``."""
    ordered, order = scaled.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    return scaled.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
