"""The head of a reward model: one number out of a trunk's states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ppo_lightning.errors import ModelError
from ppo_lightning.functional import autocast_off

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ppo_lightning.models.value_network import HeadInit

LABEL = "score"


def one_score_config(config: Any, path: str) -> None:
    """Ask a config for a classifier of one score that is no probability.

    ``regression`` makes transformers' own pipeline return the score as it is.

    Args:
        config: Of transformers; changed in place.
        path: As the user gave it.

    Raises:
        ModelError: It is an encoder-decoder, which reads no single text.
    """
    if config.is_encoder_decoder:
        raise ModelError(
            f"`{path}` is an encoder-decoder. Give a causal language model, an encoder (such as a "
            "BERT), or a sequence classifier."
        )
    config.num_labels = 1
    config.id2label, config.label2id = {0: LABEL}, {LABEL: 0}
    config.problem_type = "regression"


def score_layer(model: nn.Module) -> nn.Linear:
    """Return the layer that makes the score.

    Args:
        model: Sequence classifier of transformers with one output.

    Raises:
        ModelError: The family's classifier has no linear layer of one output.
    """
    plain: Any = model
    trunk = {id(part) for part in plain.base_model.modules()}
    found = [
        part
        for part in model.modules()
        if isinstance(part, nn.Linear) and id(part) not in trunk and part.out_features == 1
    ]
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no linear layer of one output above its trunk, so it "
            "cannot be made a reward model here. Take a model of another family."
        )
    return found[-1]


@torch.no_grad()
def start_head(layer: nn.Linear, init: HeadInit) -> None:
    """Start a new head: at zero, or normal with deviation 1/sqrt(inputs + 1); its bias at zero."""
    if init == "zero":
        layer.weight.zero_()
    else:
        layer.weight.normal_(std=(layer.in_features + 1) ** -0.5)
    if layer.bias is not None:
        layer.bias.zero_()


def head_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return what lies above the trunk, a pooler that leads there included.

    Folders of language models have no pooler: it starts at random with the head, and is trained
    with it, or no checkpoint would hold it.
    """
    plain: Any = model
    named = plain.base_model.named_parameters()
    trunk = {id(p) for name, p in named if not in_pooler(name)}
    return [p for p in model.parameters() if id(p) not in trunk]


def in_pooler(name: str) -> bool:
    """Whether a part of a trunk, by its name in the model, belongs to a pooler."""
    return "pooler" in name


@contextmanager
def exact_head(model: nn.Module) -> Iterator[None]:
    """Let pooler and head compute in float32, whatever autocast or the trunk's dtype would do.

    Args:
        model: Sequence classifier of transformers.
    """
    own = {id(p) for p in head_parameters(model)}
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    hooks = [
        hook
        for layer in layers
        if id(layer.weight) in own
        for hook in (
            layer.register_forward_pre_hook(_as_weights),
            layer.register_forward_hook(_exactly),
        )
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _as_weights(layer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    return inputs[0].to(layer.weight.dtype)


def _exactly(layer: Any, inputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
    return exact_linear(layer, inputs[0])


def exact_linear(layer: nn.Linear, states: Tensor) -> Tensor:
    """Apply a layer in float32, under autocast too, which would round scores to three digits."""
    with autocast_off(states.device.type):
        bias = None if layer.bias is None else layer.bias.float()
        return nn.functional.linear(states.float(), layer.weight.float(), bias)


@contextmanager
@torch.no_grad()
def normalised_head(model: PreTrainedModel, *, mean: float, std: float) -> Iterator[bool]:
    """Show a reward model whose scores are (score - mean) / std, by way of its weights.

    The scale goes into the head. The mean goes into the head's bias; where it has none (as in
    decoders) into the bias of the last normalisation, which decoders of GPT-2's kind have and those
    of Llama's kind have not: their scores then keep their mean, in units of ``std``.

    Args:
        model: Sequence classifier with one score; its weights are put back in the end.
        mean: Of the scores now.
        std: Of the scores now, above 0.

    Yields:
        Whether the mean is folded in.
    """
    head, shifted = score_layer(model), True
    norm = None if head.bias is not None else _last_bias(model)
    touched = [p for p in (head.weight, head.bias, norm) if p is not None]
    before = [p.detach().clone() for p in touched]
    try:
        if head.bias is not None:
            head.bias.sub_(mean).div_(std)
        elif norm is not None:
            weight = head.weight[0]
            norm.sub_((mean * weight / weight.square().sum()).to(norm.dtype))
        else:
            shifted = False
        head.weight.div_(std)
        yield shifted
    finally:
        for parameter, kept in zip(touched, before, strict=True):
            parameter.copy_(kept)


def _last_bias(model: PreTrainedModel) -> nn.Parameter | None:
    """Return the bias of the normalisation that feeds the head; None where there is none.

    That is a layer norm straight below the trunk (``transformer.ln_f``), as wide as the head.
    """
    trunk: nn.Module = model.base_model
    norms = [part for part in trunk.children() if "norm" in type(part).__name__.lower()]
    bias = getattr(norms[-1], "bias", None) if norms else None
    wide = score_layer(model).in_features
    fits = isinstance(bias, nn.Parameter) and bias.shape == (wide,)
    return bias if fits else None
