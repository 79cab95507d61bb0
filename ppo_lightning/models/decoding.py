"""One step of decoding with a key-value cache, whatever the family and release call it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ppo_lightning.models.adapters import base_causal_lm
from ppo_lightning.models.scoring import forward_parameters

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def decode_step(
    model: nn.Module, ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any
) -> tuple[Tensor, Any]:
    """Read some tokens and return the logits after the last one.

    Args:
        model: Causal language model of transformers or PEFT.
        ids: Tokens that the cache does not hold yet. ``[B, T]`` long.
        attention_mask: True on real tokens, those in the cache included. ``[B, S]`` bool.
        position_ids: Of ``ids``. ``[B, T]`` long.
        cache: From the step before; None at first.

    Returns:
        Logits ``[B, V]`` and the grown cache.
    """
    base = base_causal_lm(model)
    known = forward_parameters(type(base))
    name = next((name for name in _CACHE_NAMES if name in known), "past_key_values")
    options = {"position_ids": position_ids, "logits_to_keep": 1}
    output = base(
        input_ids=ids,
        attention_mask=attention_mask.long(),
        use_cache=True,
        **{name: cache},
        **{option: value for option, value in options.items() if option in known},
    )
    return output.logits[:, -1], getattr(output, name)
