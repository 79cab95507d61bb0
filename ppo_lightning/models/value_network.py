"""The critic: a trunk and one number a state."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from ppo_lightning.errors import ModelError
from ppo_lightning.functional import accumulation_dtype, autocast_off
from ppo_lightning.models.inputs import ModelInputs, call_model
from ppo_lightning.models.last_block import narrowed
from ppo_lightning.models.layout import TokenLayout
from ppo_lightning.models.settings import keep_settings, settings_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HeadInit = Literal["zero", "normal"]


class ValueHead(nn.Linear):
    """Hidden state to value, computed in float32 even under autocast.

    There is no bias, as sequence classifiers have none: a critic can then be exported as one, and
    a reward model can become a critic, without a rest.

    Args:
        hidden_size: Width of the state.
        init: ``zero``, or ``normal`` with deviation 1/sqrt(hidden_size + 1).
        dtype: Of the weights.
    """

    def __init__(
        self, hidden_size: int, *, init: HeadInit = "zero", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(hidden_size, 1, bias=False, dtype=dtype)
        if init == "zero":
            nn.init.zeros_(self.weight)
        else:
            nn.init.normal_(self.weight, std=(hidden_size + 1) ** -0.5)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> ValueHead:
        """Take over the weights of a score layer with one output."""
        head = cls(linear.in_features, dtype=linear.weight.dtype)
        head.weight, head.bias = linear.weight, linear.bias
        return head

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[..., H]`` to ``[..., 1]`` float32 (float64 for float64 states)."""
        dtype = accumulation_dtype(hidden)
        bias = None if self.bias is None else self.bias.to(dtype)
        with autocast_off(hidden.device.type):
            return nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), bias)


class ValueNetwork(nn.Module):
    """A critic with a trunk of its own.

    Args:
        backbone: Decoder of transformers without an output layer.
        head: Hidden state to value.
    """

    def __init__(self, backbone: PreTrainedModel, head: ValueHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    @classmethod
    def from_causal_lm(cls, model: PreTrainedModel, *, head_init: HeadInit) -> ValueNetwork:
        """Take the trunk of a language model, with a new head."""
        head = ValueHead(output_width(model), init=head_init, dtype=model.dtype)
        return cls(_trunk(model), head)

    @classmethod
    def from_sequence_classifier(cls, model: PreTrainedModel) -> ValueNetwork:
        """Take trunk and score of a reward model: V at the last token equals its score.

        Raises:
            ModelError: The model has more than one label, or no linear layer named ``score``.
        """
        score = getattr(model, "score", None)
        if not isinstance(score, nn.Linear) or score.out_features != 1:
            raise ModelError(
                f"`critic_model.path` holds a {type(model).__name__} with "
                f"{model.config.num_labels} label(s); a critic needs a decoder with a `score` "
                "layer of one output. Take a reward model of one score, or a language model."
            )
        return cls(_trunk(model), ValueHead.from_linear(score))

    def forward(self, layout: TokenLayout) -> Tensor:
        """Value the states that a layout asks about.

        Args:
            layout: Of a batch; see ``layout_for``.

        Returns:
            ``[N + M]`` float32 or float64: of the states before scored tokens, then of those after
            the last ones.
        """
        with narrowed(self.backbone, layout.rows):
            hidden = call_model(self.backbone, layout.inputs).last_hidden_state
        values: Tensor = self.head(hidden.flatten(0, 1)[layout.asked])
        return values.squeeze(-1)

    def all_values(self, inputs: ModelInputs) -> Tensor:
        """Value every state; column t is the state after token t.

        Args:
            inputs: Padded rows.

        Returns:
            ``[B, S]`` float32 or float64, meaningless at padding.
        """
        values: Tensor = self.head(call_model(self.backbone, inputs).last_hidden_state)
        return values.squeeze(-1)

    def as_sequence_classifier(self, *, pad_token_id: int | None = None) -> PreTrainedModel:
        """Return the critic as a sequence classifier of its family, sharing its weights.

        Args:
            pad_token_id: For the config: classifiers of transformers refuse batches without one.

        Raises:
            ModelError: The family has no sequence classifier with a ``score`` layer.
        """
        config = copy.deepcopy(self.backbone.config)
        config.num_labels = 1
        if config.pad_token_id is None:
            config.pad_token_id = pad_token_id
        model = _empty_classifier(config)
        setattr(model, model.base_model_prefix, self.backbone)
        score = nn.Linear(self.head.in_features, 1, bias=False, device="meta")
        score.weight, score.bias = self.head.weight, self.head.bias
        model.score = score
        keep_settings(model, settings_of(self.backbone))
        model.train(self.training)
        return model


def output_width(model: PreTrainedModel) -> int:
    """Width of the states that the output layer reads."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return int(head.weight.shape[-1])


def _trunk(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without its head, which remembers the folder's settings."""
    trunk: Any = model.base_model
    keep_settings(trunk, replace(settings_of(model), generation=None))
    return cast("PreTrainedModel", trunk)


def _empty_classifier(config: Any) -> PreTrainedModel:
    """Make a classifier without weights, to be filled with a critic's."""
    try:
        with torch.device("meta"):
            make: Any = AutoModelForSequenceClassification.from_config
            model = make(config)
    except ValueError as error:
        raise ModelError(
            f"the family `{config.model_type}` has no sequence classifier, so this critic cannot "
            "be exported as one; export the actor alone."
        ) from error
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear layer `score` that could hold the critic's "
            "head; export the actor alone."
        )
    return model  # type: ignore[no-any-return]
