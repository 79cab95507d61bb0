"""One step of decoding with a key-value cache, whatever the family and release call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ppo_lightning.errors import ModelError
from ppo_lightning.functional import position_ids
from ppo_lightning.models.adapters import base_causal_lm
from ppo_lightning.models.checks import can_be_tried, embedding_rows
from ppo_lightning.models.inputs import ModelInputs, cache_name, call_model, forward_parameters

_STATES_ONLY = {"mamba", "falcon_mamba", "mamba2"}
"""Their cache is a state that padding has been kept out of; the mask is laid over the tokens of the
step alone. A wider one would silently be taken for a longer input."""


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
    if getattr(getattr(base, "config", None), "model_type", None) in _STATES_ONLY:
        attention_mask = attention_mask[:, -ids.shape[1] :]
    name = cache_name(base)
    options = {"position_ids": position_ids, "logits_to_keep": 1}
    output = base(
        input_ids=ids,
        attention_mask=attention_mask.long(),
        use_cache=True,
        **{name: cache},
        **{option: value for option, value in options.items() if option in known},
    )
    return output.logits[:, -1], getattr(output, name)


_TRIED = 7  # tokens: more than the window of a short convolution
_READ_FIRST = 3
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-2}
_COARSE_TOLERANCE = 0.1


def check_decoding(model: nn.Module) -> None:
    """Try on a few tokens that decoding with a cache says what one pass over everything says.

    A family may read the mask of a step, or padding below its cache, in a way of its own. Responses
    would then be sampled from another distribution than the one that is trained, without a sign.

    Args:
        model: Causal language model, evaluating, on the CPU; others are not tried.

    Raises:
        ModelError: The two differ by more than rounding, or decoding fails.
    """
    base: Any = base_causal_lm(model)
    if not can_be_tried(base):
        return
    ids = (torch.arange(1, _TRIED + 1) % embedding_rows(base)).expand(2, -1)
    mask = torch.ones(2, _TRIED, dtype=torch.bool)
    mask[1, : _READ_FIRST - 1] = False
    try:
        at_once, in_steps = _both_ways(base, ids, mask)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(_refusal(base, f"cannot be decoded token by token ({error})")) from error
    difference = (at_once - in_steps).square().mean().sqrt()
    if difference > _TOLERANCE.get(base.dtype, _COARSE_TOLERANCE) * at_once.std():
        said = "says something else when it is decoded token by token than in one pass"
        raise ModelError(_refusal(base, said))


@torch.no_grad()
def _both_ways(base: nn.Module, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Logits after the tokens read first and after each one that follows, each ``[B, T, V]``."""
    places = position_ids(mask)
    at_once = call_model(base, ModelInputs(ids, mask.long(), places)).logits
    steps, start, cache = [], 0, None
    for end in range(_READ_FIRST, _TRIED + 1):
        logits, cache = decode_step(
            base, ids[:, start:end], mask[:, :end], places[:, start:end], cache
        )
        steps.append(logits)
        start = end
    return at_once[:, _READ_FIRST - 1 :].float(), torch.stack(steps, dim=1).float()


def _refusal(model: nn.Module, what: str) -> str:
    return (
        f"a {type(model).__name__} {what}, so the native decode loop would sample from another "
        "distribution than the one that is trained. Leave decoding to transformers, as "
        "`model.init_args.engine: {class_path: ppo_lightning.rollout.GenerateEngine}`, or give a "
        "policy of another family."
    )
