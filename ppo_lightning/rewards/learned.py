"""A learned reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ppo_lightning.configs import DType
from ppo_lightning.configs.checks import require_at_least
from ppo_lightning.rewards.base import Reward
from ppo_lightning.rewards.texts import judged_texts
from ppo_lightning.types import Completions, Message

if TYPE_CHECKING:
    from ppo_lightning.models import SequenceScorer


class SequenceClassifierReward(Reward):
    """Output of a sequence classifier of transformers, with its own tokenizer and chat template.

    Text is rendered anew for it: the policy's tokens never reach it. A chat is given as a chat,
    with the response as its last turn.

    Args:
        path: Folder, hub name, or ``package:NAME`` for weights that a Python package carries.
        label: Number or name of the output to read; may be left out where there is one.
        transform: The ``logit`` as it is, the ``probability`` of the label, or its ``log_odds``.
        plain_prompts: A prompt that is no chat is joined to its response as ``text``, or both
            become two turns of a ``chat``.
        include_prompt: False judges the response alone, as sentiment classifiers want it.
        max_length: Most tokens; longer texts lose their beginning. Null takes what the model reads.
        batch_size: Texts in a forward pass.
        append_eos: End every text with the end token, for models trained so.
        dtype: Of the weights.
        trust_remote_code: Run Python code that the folder holds.
    """

    def __init__(
        self,
        path: str,
        label: int | str | None = None,
        transform: Literal["logit", "probability", "log_odds"] = "logit",
        plain_prompts: Literal["text", "chat"] = "text",
        include_prompt: bool = True,
        max_length: int | None = None,
        batch_size: int = 16,
        append_eos: bool = False,
        dtype: DType = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        require_at_least("max_length", max_length, 1)
        require_at_least("batch_size", batch_size, 1)
        self.path = path
        self.label = label
        self.transform = transform
        self.plain_prompts = plain_prompts
        self.include_prompt = include_prompt
        self.max_length = max_length
        self.batch_size = batch_size
        self.append_eos = append_eos
        self.dtype = dtype
        self.trust_remote_code = trust_remote_code
        self._scorer: SequenceScorer | None = None

    def setup(self, device: torch.device) -> None:
        """Load model and tokenizer, once, and move them to the device.

        Raises:
            ModelError: There is no usable model at ``path``, or ``label`` must be chosen.
        """
        if self._scorer is None:
            self._scorer = self._load()
        self._scorer.to(device)

    def fingerprint(self) -> str:
        """Digest of the model's weights; ``""`` before ``setup``."""
        return "" if self._scorer is None else self._scorer.fingerprint()

    def close(self) -> None:
        """Let go of the model."""
        self._scorer = None

    def __call__(self, completions: Completions) -> Tensor:
        """Score each response. ``[B]`` float32."""
        if self._scorer is None:
            self.setup(torch.device("cpu"))
        assert self._scorer is not None
        return self._scorer.score(self.inputs(completions))

    def inputs(self, completions: Completions) -> list[str | Sequence[Message]]:
        """Return what the model is asked about: a text or a chat for each response."""
        if not self.include_prompt:
            return list(completions.responses)
        texts = judged_texts(completions, include_prompt=True)
        return [chat or text for chat, text in zip(self._chats(completions), texts, strict=True)]

    def _chats(self, completions: Completions) -> list[tuple[Message, ...] | None]:
        """Return the chat with the response as its last turn, or None where it is no chat."""
        rows = zip(completions.prompts, completions.messages, completions.responses, strict=True)
        chats = []
        for prompt, messages, response in rows:
            if messages is None and self.plain_prompts == "chat":
                messages = ({"role": "user", "content": prompt},)
            turn = {"role": "assistant", "content": response}
            chats.append(None if messages is None else (*messages, turn))
        return chats

    def _load(self) -> SequenceScorer:
        # Imported here: it brings transformers along, which `--help` has no need of.
        from ppo_lightning.models import SequenceScorer

        return SequenceScorer.load(
            self.path,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            label=self.label,
            transform=self.transform,
            max_length=self.max_length,
            batch_size=self.batch_size,
            append_eos=self.append_eos,
        )
