"""Scores of a sequence classifier, whatever its padding, tokenizer and number of labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ppo_lightning.errors import ModelError
from ppo_lightning.functional import last_index, position_ids
from ppo_lightning.models.checks import max_positions
from ppo_lightning.models.fingerprint import fingerprint
from ppo_lightning.models.loading import load_reward_model
from ppo_lightning.models.scoring import ModelInputs, call_model
from ppo_lightning.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ppo_lightning.configs import DType

Text = str | Sequence[Message]
_NO_LIMIT = 1_000_000_000  # tokenizers say 1e30 for it

Transform = Literal["logit", "probability", "log_odds"]


class SequenceScorer:
    """A reward model with its own tokenizer: one number a text or conversation.

    Not a module, so it takes part in no checkpoint and no gradient sync.

    Args:
        model: Sequence classifier, decoder or encoder; frozen.
        tokenizer: Its own.
        label: Number or name of the output to read; may be left out where there is one.
        transform: ``logit`` as it is, ``probability`` of the label, or ``log_odds`` of it.
        max_length: Most tokens; longer texts lose their beginning. None takes what the model reads.
        batch_size: Texts in a forward pass.
        append_eos: End every text with the end token, for models trained so.

    Raises:
        ModelError: The label is unknown, or must be chosen.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        label: int | str | None = None,
        transform: Transform = "logit",
        max_length: int | None = None,
        batch_size: int = 16,
        append_eos: bool = False,
    ) -> None:
        model.eval()  # type: ignore[no-untyped-call]
        self.model = model.requires_grad_(False)
        self.tokenizer = tokenizer
        self.label = _label_number(model.config, label)
        self.transform = transform
        self.max_length = max_length or _longest(model, tokenizer)
        self.tokenizer.truncation_side = "left"  # what is judged stands at the end
        self.batch_size = batch_size
        self.append_eos = append_eos

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: DType = "float32",
        trust_remote_code: bool = False,
        **options: Any,
    ) -> SequenceScorer:
        """Load model and tokenizer from a folder; ``options`` go to the constructor."""
        loaded = load_reward_model(path, dtype=dtype, trust_remote_code=trust_remote_code)
        return cls(*loaded, **options)

    def to(self, device: torch.device | str) -> SequenceScorer:
        """Move the model."""
        self.model.to(device)  # type: ignore[arg-type]
        return self

    def fingerprint(self) -> str:
        """Digest of the weights."""
        return fingerprint(self.model)

    @torch.no_grad()
    def score(self, texts: Sequence[Text]) -> Tensor:
        """Score texts, or conversations rendered with the model's own template.

        Texts of like length are scored together; the result does not depend on their neighbours.

        Args:
            texts: Plain strings, or lists of turns. A conversation for a model without a template
                becomes its turns' contents, a blank line between them.

        Returns:
            ``[B]`` float32 on the model's device.
        """
        rows = [self.token_ids(text) for text in texts]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores = torch.zeros(len(rows), device=self.model.device)
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            logits = sequence_logits(self.model, *self._padded([rows[i] for i in numbers]))
            scores[numbers] = self._transformed(logits)
        return scores

    def token_ids(self, text: Text) -> list[int]:
        """Tokenise one text as the model reads it: at least one token, at most ``max_length``."""
        if isinstance(text, str):
            ids = self._tokenise(text, special=True)
        elif self.tokenizer.chat_template is None:
            ids = self._tokenise("\n\n".join(turn["content"] for turn in text), special=True)
        else:
            turns = [dict(turn) for turn in text]
            rendered = self.tokenizer.apply_chat_template(turns, tokenize=False)
            assert isinstance(rendered, str)
            # The template writes BOS itself: as special tokens there would be two.
            ids = self._tokenise(rendered, special=False)
        eos = self.tokenizer.eos_token_id
        if self.append_eos and eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos][-(self.max_length or len(ids) + 1) :]
        return ids or [eos if eos is not None else 0]

    def _tokenise(self, text: str, *, special: bool) -> list[int]:
        """Cut at the front, where the text is too long; its special tokens are kept."""
        limit = self.max_length
        encoded = self.tokenizer(
            text, add_special_tokens=special, truncation=limit is not None, max_length=limit
        )
        return list(encoded["input_ids"])

    def _padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Right-pad: ids and mask, both ``[B, S]`` long."""
        width = max(map(len, rows))
        ids = [row + [0] * (width - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        device = self.model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _transformed(self, logits: Tensor) -> Tensor:
        """Read one label of ``[B, labels]``: ``[B]``."""
        chosen = logits[:, self.label]
        if self.transform == "logit":
            return chosen
        odds = chosen if self._labels_are_independent(logits) else _log_odds(logits, self.label)
        return odds if self.transform == "log_odds" else odds.sigmoid()

    def _labels_are_independent(self, logits: Tensor) -> bool:
        """Whether each logit is the log-odds of a yes-or-no question of its own."""
        problem = getattr(self.model.config, "problem_type", None)
        return logits.shape[1] == 1 or problem == "multi_label_classification"


def sequence_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Outputs of a sequence classifier, the same however the batch is padded.

    A decoder is read at the last real token by the mask. transformers looks for the pad id instead,
    which mistakes a text that ends with it, and refuses models without one.

    Args:
        model: Sequence classifier of transformers.
        input_ids: ``[B, S]`` long.
        attention_mask: 1 on real tokens, padding on either side. ``[B, S]``.

    Returns:
        ``[B, labels]`` float32.
    """
    plain: Any = model
    inputs = ModelInputs(input_ids, attention_mask, position_ids(attention_mask))
    score = getattr(plain, "score", None)
    if not isinstance(score, nn.Linear) or plain.config.is_encoder_decoder:
        logits: Tensor = plain(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits.float()
    hidden: Tensor = call_model(plain.base_model, inputs).last_hidden_state
    last = last_index(attention_mask.bool())
    picked: Tensor = score(hidden[torch.arange(len(last), device=last.device), last])
    return picked.float()


def _log_odds(logits: Tensor, label: int) -> Tensor:
    """Give log p/(1 - p) of one label among several, without a detour over probabilities."""
    others = [i for i in range(logits.shape[1]) if i != label]
    return logits[:, label] - logits[:, others].logsumexp(-1)


def _label_number(config: Any, label: int | str | None) -> int:
    """Find the output to read."""
    names = {int(number): str(name) for number, name in config.id2label.items()}
    if label is None and config.num_labels == 1:
        return 0
    if isinstance(label, str):
        label = next((n for n, name in names.items() if name.lower() == label.lower()), label)
    if isinstance(label, int) and 0 <= label < config.num_labels:
        return label
    listed = ", ".join(f"{number} ({name})" for number, name in sorted(names.items()))
    raise ModelError(f"`label` must name one of the reward model's outputs, got {label}: {listed}.")


def _longest(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Most tokens that both model and tokenizer can take; None where neither has a limit."""
    limits = [max_positions(model), tokenizer.model_max_length]
    known = [limit for limit in limits if limit is not None and limit < _NO_LIMIT]
    return min(known, default=None)
