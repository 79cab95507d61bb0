"""Checks of models and tokenizer against each other, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ppo_lightning.errors import ModelError
from ppo_lightning.models.attention import ATTENTION
from ppo_lightning.models.inputs import ModelInputs, call_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_UNLIMITED = {"mpt"}  # ALiBi: the length in its config is that of the training
_RUNS_ANYWHERE = {"sdpa", "eager", ATTENTION, None}


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, models: Mapping[str, nn.Module]) -> None:
    """Insist that every model has an embedding for every id that it can meet.

    Ids come from the tokenizer and, in a response, from the actor, which can emit every row of its
    vocabulary. Nothing is resized: that would leave the models different.

    Args:
        tokenizer: The policy's.
        models: By the name to use in messages; the policy under ``actor``.

    Raises:
        ModelError: Names the model, the id that it lacks, and both sizes.
    """
    ids = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    ids["its last token"] = len(tokenizer) - 1
    token, highest = max(ids.items(), key=lambda item: item[1])
    for name, model in models.items():
        rows = embedding_rows(model)
        if highest >= rows:
            raise ModelError(
                f"the tokenizer has {len(tokenizer)} tokens and uses id {highest} ({token}), but "
                f"the {name}'s embedding has {rows} rows (ids 0 to {rows - 1}). Take the tokenizer "
                f"of the {name}'s own folder, or resize every model's embedding and save it first."
            )
    _check_emitted(models)


def _check_emitted(models: Mapping[str, nn.Module]) -> None:
    if "actor" not in models:
        return
    emitted = embedding_rows(models["actor"])
    for name, model in models.items():
        rows = embedding_rows(model)
        if rows < emitted:
            raise ModelError(
                f"the actor can emit ids up to {emitted - 1} (its embedding has {emitted} rows), "
                f"but the {name}'s embedding has {rows} rows. Use models of one vocabulary, or "
                f"resize the {name}'s embedding to {emitted} rows and save it first."
            )


def check_same_ids(ours: Mapping[str, int], theirs: Mapping[str, int], setting: str) -> None:
    """Insist that two vocabularies agree on every id that both of them have.

    Args:
        ours: Ids by token, of the policy.
        theirs: Of another model, which reads the policy's ids.
        setting: Names the other model.

    Raises:
        ModelError: Names both sizes and the first id that stands for another token.
    """
    meant = {id_: token for token, id_ in theirs.items()}
    differing = [(id_, token) for token, id_ in ours.items() if meant.get(id_, token) != token]
    if differing:
        id_, token = min(differing)
        raise ModelError(
            f"`{setting}`: its tokenizer is another one than the policy's ({len(theirs)} and "
            f"{len(ours)} tokens; id {id_} is {meant[id_]!r} there and {token!r} here), so the "
            "policy's ids would mean other text to it. Give a model of the policy's vocabulary."
        )


def embedding_rows(model: nn.Module) -> int:
    """Number of ids that a model knows, of the model itself or of the trunk inside it."""
    holder: Any = getattr(model, "backbone", model)
    return int(holder.get_input_embeddings().weight.shape[0])


def max_positions(model: nn.Module) -> int | None:
    """Most tokens that a model can read at once; None where nothing limits them.

    Args:
        model: Of transformers or PEFT, or a critic.
    """
    return positions_of(getattr(model, "backbone", model).config)


def positions_of(config: Any) -> int | None:
    """Most tokens that a model of this config can read at once; None where nothing limits them."""
    config = config.get_text_config()
    if config.model_type in _UNLIMITED or getattr(config, "alibi", False):
        return None
    found = [getattr(config, name, None) for name in _POSITIONS]
    return next((int(n) for n in found if n), None)


def check_decoder(config: Any, path: str, *, classifier: bool) -> None:
    """Refuse what cannot be a policy or a critic's trunk, by what its config says.

    Args:
        config: Of transformers.
        path: As the user gave it.
        classifier: Whether a classifier is wanted rather than a language model.

    Raises:
        ModelError: An encoder, an encoder-decoder, or a classifier in place of a language model.
    """
    names = ", ".join(config.architectures or ()) or config.model_type
    wanted = "Give a causal language model (a decoder), such as a GPT-2 or a Llama."
    if config.is_encoder_decoder:
        raise ModelError(f"`{path}` is an encoder-decoder ({names}). {wanted}")
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if masked and not getattr(config, "is_decoder", False):
        raise ModelError(f"`{path}` is an encoder, which reads both ways ({names}). {wanted}")
    if not classifier and names.endswith("ForSequenceClassification"):
        raise ModelError(f"`{path}` is a classifier ({names}), which emits no tokens. {wanted}")


def can_be_tried(model: nn.Module) -> bool:
    """Whether a loaded model can be asked something before it is brought to its device."""
    of: Any = model
    return of.device.type == "cpu" and of.config._attn_implementation in _RUNS_ANYWHERE


@torch.no_grad()
def check_behaviour(model: PreTrainedModel, path: str) -> None:
    """Try on a few tokens that the model reads one way and does not read padding.

    Some decoders are configured to look ahead, and some families have positions that left padding
    shifts, or no use for a mask at all. Log-probabilities would then be wrong without a sign.

    Args:
        model: Just loaded, on the CPU; others are not tried.
        path: As the user gave it.

    Raises:
        ModelError: A later token or padding changes what the model says.
    """
    if not can_be_tried(model):
        return
    a, b, c = (id_ % embedding_rows(model) for id_ in (1, 2, 3))
    ids = torch.tensor([[a, b, c], [a, b, a], [c, a, b]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 1, 1]])
    positions = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 0, 1]])
    output = call_model(model.base_model, ModelInputs(ids, mask, positions))
    states = output.last_hidden_state if "last_hidden_state" in output else output.logits
    if _differ(states[0, :2], states[1, :2], model.dtype):
        raise ModelError(
            f"`{path}` ({type(model).__name__}) lets a later token change what it says about "
            "earlier ones. Give a causal language model."
        )
    if states[2, 1:].isnan().any() and not states[0, :2].isnan().any():
        raise ModelError(
            f"`{path}` ({type(model).__name__}) gives nan in {str(model.dtype)[6:]} when its input "
            "is padded on the left: the attention of its family sums in float32, in which the "
            "mask's least number is infinite. Load it with `dtype: float32`."
        )
    if _differ(states[0, :2], states[2, 1:], model.dtype):
        raise ModelError(
            f"`{path}` ({type(model).__name__}) says something else when its input is padded on "
            "the left, so batches of different prompts would be scored wrongly. Give a model "
            "whose family supports left padding."
        )


def _differ(left: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    """Whether two outputs differ by more than rounding."""
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 0.1
    return bool((left - right).abs().max() > tolerance * left.std().clamp_min(1e-6))
