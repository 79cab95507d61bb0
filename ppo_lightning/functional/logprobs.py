"""Log-probabilities and entropy of the next-token distribution.

The one place that turns logits into log-probabilities: rollout, reference and update all come
here, so that the ratio is 1 before the first update. The distribution is the one at the sampling
temperature over the whole vocabulary, before any top-k or top-p.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ppo_lightning.functional.masking import accumulation_dtype, upcast


def log_softmax(logits: Tensor, *, temperature: float) -> Tensor:
    """Normalise logits at a temperature, in float32 whatever their dtype (float64 stays).

    Args:
        logits: ``[..., V]`` float; ``-inf`` bars a token.
        temperature: Sampling temperature, above 0.

    Returns:
        ``[..., V]`` float32 or float64, never above 0.

    Raises:
        ValueError: ``temperature`` is not above 0.
    """
    if not temperature > 0:
        raise ValueError(
            f"`temperature` must be above 0, got {temperature}: greedy decoding has no "
            "log-probabilities to train on; sample with a small temperature instead."
        )
    if temperature == 1:
        return F.log_softmax(logits, dim=-1, dtype=accumulation_dtype(logits))
    return F.log_softmax(upcast(logits) / temperature, dim=-1)


def _pick(logprobs: Tensor, ids: Tensor) -> Tensor:
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _entropy(logprobs: Tensor) -> Tensor:
    # A barred token has p = 0 and log p = -inf, and 0 * -inf is nan: bound the logarithm.
    return -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float) -> Tensor:
    """Score given tokens; ``logits[..., :]`` is the distribution that ``ids[...]`` came from.

    Args:
        logits: ``[..., V]`` float.
        ids: Token ids in ``[0, V)``, at padding too. ``[...]`` int64.
        temperature: Sampling temperature, above 0.

    Returns:
        ``[...]`` float32 or float64, in nats, never above 0.

    Raises:
        ValueError: ``temperature`` is not above 0.
    """
    return _pick(log_softmax(logits, temperature=temperature), ids)


def entropy_from_logits(logits: Tensor, *, temperature: float) -> Tensor:
    """Entropy of the whole next-token distribution (not of the sampled token).

    Args:
        logits: ``[..., V]`` float.
        temperature: Sampling temperature, above 0.

    Returns:
        ``[...]`` float32 or float64, in nats, from 0 to ln V.

    Raises:
        ValueError: ``temperature`` is not above 0.
    """
    return _entropy(log_softmax(logits, temperature=temperature))


def logprobs_and_entropy(
    logits: Tensor, ids: Tensor, *, temperature: float, entropy_grad: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute ``token_logprobs`` and ``entropy_from_logits`` with a single softmax.

    Args:
        logits: ``[..., V]`` float.
        ids: Token ids in ``[0, V)``. ``[...]`` int64.
        temperature: Sampling temperature, above 0.
        entropy_grad: False where the entropy is only logged: it then keeps no ``[..., V]``
            tensor alive for the backward pass.

    Returns:
        ``(logprobs, entropy)``, both ``[...]``.

    Raises:
        ValueError: ``temperature`` is not above 0.
    """
    logprobs = log_softmax(logits, temperature=temperature)
    return _pick(logprobs, ids), _entropy(logprobs if entropy_grad else logprobs.detach())


def shifted_logprobs(logits: Tensor, input_ids: Tensor, *, temperature: float) -> Tensor:
    """Score a whole sequence, where the logits at place p predict the token at p + 1.

    Args:
        logits: Output of a causal model on ``input_ids``. ``[B, S, V]`` float.
        input_ids: Prompt and response. ``[B, S]`` int64.
        temperature: Sampling temperature, above 0.

    Returns:
        ``[B, S-1]``: column t belongs to ``input_ids[:, t + 1]``, so masks lose their first column.

    Raises:
        ValueError: ``temperature`` is not above 0.
    """
    return token_logprobs(logits[:, :-1], input_ids[:, 1:], temperature=temperature)
