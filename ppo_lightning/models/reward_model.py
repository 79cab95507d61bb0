"""Scores of a sequence classifier, whatever its padding, tokenizer and number of labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ppo_lightning.distributed import pulse
from ppo_lightning.errors import ModelError
from ppo_lightning.functional import last_index, position_ids
from ppo_lightning.models.checks import max_positions
from ppo_lightning.models.fingerprint import fingerprint
from ppo_lightning.models.inputs import ModelInputs, call_model
from ppo_lightning.models.last_block import narrowed
from ppo_lightning.models.loading import load_reward_model
from ppo_lightning.models.precision import quantise_linears
from ppo_lightning.models.score_head import exact_head, exact_linear
from ppo_lightning.models.sharding import shard_over_all
from ppo_lightning.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ppo_lightning.configs import DType, Quantization

Text = str | Sequence[Message]
_NO_LIMIT = 1_000_000_000  # tokenizers say 1e30 for it

Transform = Literal["logit", "probability", "log_odds"]


class ScorerTokens:
    """How a reward model reads: its template, its tokens, its limit; the same in training and use.

    Args:
        tokenizer: The model's own.
        max_length: Most tokens; longer texts lose their beginning. None is unlimited.
        append_eos: End every text with the end token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = None,
        append_eos: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.truncation_side = "left"  # what is judged stands at the end
        self.max_length = max_length
        self.append_eos = append_eos

    def whole_ids(self, text: Text) -> list[int]:
        """Tokenise one text without the limit."""
        whole = ScorerTokens(self.tokenizer, append_eos=self.append_eos)
        return whole.token_ids(text)

    def token_ids(self, text: Text) -> list[int]:
        """Tokenise one text as the model reads it: at least one token, at most ``max_length``."""
        rendered, special = self._rendered(text)
        eos = self.tokenizer.eos_token_id
        ids = self._tokenise(rendered, self.max_length, special=special)
        if self.append_eos and eos is not None and ids[-1:] != [eos]:
            room = None if self.max_length is None else self.max_length - 1
            ids = [*self._tokenise(rendered, room, special=special), eos]
        return ids or [eos if eos is not None else 0]

    def _rendered(self, text: Text) -> tuple[str, bool]:
        """Return the text to tokenise, and whether the tokenizer adds its special tokens."""
        if isinstance(text, str):
            return text, True
        if self.tokenizer.chat_template is None:
            return "\n\n".join(turn["content"] for turn in text), True
        turns = [dict(turn) for turn in text]
        rendered = self.tokenizer.apply_chat_template(turns, tokenize=False)
        assert isinstance(rendered, str)
        return rendered, False  # the template writes BOS itself: there would be two

    def _tokenise(self, text: str, limit: int | None, *, special: bool) -> list[int]:
        """Cut at the front, where the text is too long; its special tokens are kept."""
        if limit == 0:
            return []
        encoded = self.tokenizer(
            text,
            add_special_tokens=special,
            truncation=limit is not None,
            max_length=limit,
            verbose=False,
        )
        return list(encoded["input_ids"])


class SequenceScorer(ScorerTokens):
    """A reward model with its own tokenizer: one number a text or conversation.

    Not a module, so it takes part in no checkpoint and no gradient sync.

    Args:
        model: Sequence classifier, decoder or encoder; frozen.
        tokenizer: Its own.
        label: Number or name of the output to read; may be left out where there is one.
        transform: ``logit`` as it is, ``probability`` of the label, or ``log_odds`` of it.
        max_length: Most tokens; longer texts lose their beginning. None takes what the model reads.
        batch_size: Most texts in a forward pass.
        append_eos: End every text with the end token, for models trained so.
        batch_tokens: Most tokens in a forward pass, padding included (a longer text goes alone);
            None counts texts only.
        chat_template: In place of the tokenizer's own; None keeps that.
        quantization: Keeps the trunk's linear layers in eight bits (``int8``) or four (``nf4``);
            None as they are.

    Raises:
        ModelError: The label is unknown, or must be chosen; or there is nothing to quantise.
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
        batch_tokens: int | None = None,
        chat_template: str | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        model.eval()  # type: ignore[no-untyped-call]
        super().__init__(
            tokenizer,
            max_length=max_length or longest_text(model, tokenizer),
            append_eos=append_eos,
        )
        self.model = model.requires_grad_(False)
        self.label = _label_number(model.config, label)
        self.transform = transform
        self.batch_size = batch_size
        self.batch_tokens = batch_tokens
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        self._fingerprint: str | None = None
        if quantization is not None:
            self._fingerprint = fingerprint(model)  # the weights are the same, however kept
            quantise_linears(model, quantization)

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

    def shard(self, device: torch.device) -> None:
        """Cut the trunk's weights over all ranks; see ``distributed.gathered``."""
        self._fingerprint = fingerprint(self.model)
        shard_over_all(self.model.base_model, device)

    def to(self, device: torch.device | str) -> SequenceScorer:
        """Move the model."""
        self.model.to(device)  # type: ignore[arg-type]
        return self

    def fingerprint(self) -> str:
        """Digest of the weights."""
        return fingerprint(self.model) if self._fingerprint is None else self._fingerprint

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
        scores = torch.zeros(len(rows), device=self.model.device)
        for numbers in self._batches([len(row) for row in rows]):
            pulse.beat()
            logits = sequence_logits(self.model, *self._padded([rows[i] for i in numbers]))
            scores[numbers] = self._transformed(logits)
        return scores

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of texts of like length, as many as a forward pass may take."""
        batch: list[int] = []
        for number in sorted(range(len(lengths)), key=lengths.__getitem__):
            padded = lengths[number] * (len(batch) + 1)  # it is the longest so far
            full = self.batch_tokens is not None and padded > self.batch_tokens
            if batch and (full or len(batch) == self.batch_size):
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

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
        ids, mask = _right_padded(plain.config, input_ids, attention_mask)
        with exact_head(model):
            logits: Tensor = plain(input_ids=ids, attention_mask=mask).logits
        return logits.float()
    last = last_index(attention_mask.bool())
    last += torch.arange(len(last), device=last.device) * input_ids.shape[1]
    with narrowed(plain.base_model, last):
        hidden: Tensor = call_model(plain.base_model, inputs).last_hidden_state
    return exact_linear(score, hidden.flatten(0, 1)[last])


def _right_padded(config: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Bring real tokens to the front: encoders count positions from the first column.

    The id under padding becomes the model's own: some families count positions by it.
    """
    order = (mask == 0).long().argsort(dim=1, stable=True)
    ids, mask = ids.gather(1, order), mask.gather(1, order)
    return ids.masked_fill(mask == 0, getattr(config, "pad_token_id", None) or 0), mask


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


def longest_text(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Most tokens that both model and tokenizer can take; None where neither has a limit."""
    return text_limit(max_positions(model), tokenizer)


def text_limit(positions: int | None, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Say what ``longest_text`` does, of a model that is not loaded.

    Args:
        positions: That the model has; None is unlimited.
        tokenizer: Its own.
    """
    known = [n for n in (positions, tokenizer.model_max_length) if n is not None and n < _NO_LIMIT]
    return min(known, default=None)
