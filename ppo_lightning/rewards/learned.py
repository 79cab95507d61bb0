"""A learned reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ppo_lightning.configs import DType, Quantization
from ppo_lightning.configs.checks import require, require_at_least, require_fields
from ppo_lightning.distributed import is_distributed
from ppo_lightning.errors import ConfigError, ModelError
from ppo_lightning.io import read_text
from ppo_lightning.rewards.base import Reward
from ppo_lightning.rewards.texts import judged_texts
from ppo_lightning.types import Completions, Message

if TYPE_CHECKING:
    from ppo_lightning.models import SequenceScorer

PlainPrompts = Literal["text", "chat"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a reward model wants its texts; one trained here says so in its folder.

    Args:
        plain_prompts: See ``SequenceClassifierReward``, as for the others.
        include_prompt: Whether it judges the prompt too.
        append_eos: Whether every text ends with the end token.
        max_length: Most tokens.
    """

    plain_prompts: PlainPrompts = "text"
    include_prompt: bool = True
    append_eos: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        require_fields(self)
        require_at_least("max_length", self.max_length, 1)


class SequenceClassifierReward(Reward):
    """Output of a sequence classifier of transformers, with its own tokenizer and chat template.

    Text is rendered anew for it: the policy's tokens never reach it. A chat is given as a chat,
    with the response as its last turn. What is left null below is read from the
    ``ppo_lightning.json`` of a reward model that was trained here, so that it is asked as it
    was trained.

    Args:
        path: Folder of the model or of the run that trained it, hub name, or ``package:NAME`` for
            weights that a Python package carries.
        label: Number or name of the output to read; may be left out where there is one.
        transform: The ``logit`` as it is, the ``probability`` of the label, or its ``log_odds``.
        plain_prompts: A prompt that is no chat is joined to its response as ``text``, or both
            become two turns of a ``chat``. Null is what the folder says, else ``text``.
        include_prompt: False judges the response alone, as sentiment classifiers want it. Null is
            what the folder says, else true.
        max_length: Most tokens; longer texts lose their beginning. Null is what the folder says,
            else what the model reads.
        batch_size: Most texts in a forward pass.
        append_eos: End every text with the end token, for models trained so. Null is what the
            folder says, else false.
        dtype: Of the weights.
        trust_remote_code: Run Python code that the folder holds.
        device: Where it runs: ``auto`` is the run's own device; or ``cpu``, ``cuda``, ``cuda:1``.
        quantization: ``int8`` keeps its linear layers in eight bits: a quarter of the memory of
            float32, a little slower, scores that differ by about 1 %. ``nf4`` keeps them in four
            bits, for an eighth and larger differences; needs the package ``bitsandbytes``. Null
            leaves them.
        chat_template: Jinja text, or a file that holds it, in place of the tokenizer's own.
        batch_tokens: Most tokens in a forward pass, padding included (a longer text goes alone);
            null counts texts only.
        shard: Keep its weights in shards over the ranks of the run, and put them together while it
            scores: less memory for updates.
    """

    def __init__(
        self,
        path: str,
        label: int | str | None = None,
        transform: Literal["logit", "probability", "log_odds"] = "logit",
        plain_prompts: PlainPrompts | None = None,
        include_prompt: bool | None = None,
        max_length: int | None = None,
        batch_size: int = 16,
        append_eos: bool | None = None,
        dtype: DType = "float32",
        trust_remote_code: bool = False,
        device: str = "auto",
        quantization: Quantization | None = None,
        chat_template: str | None = None,
        batch_tokens: int | None = None,
        shard: bool = False,
    ) -> None:
        require_at_least("max_length", max_length, 1)
        require_at_least("batch_size", batch_size, 1)
        require_at_least("batch_tokens", batch_tokens, 1)
        _require_kept(quantization, device, shard)
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
        self.device = None if device == "auto" else _device(device)
        self.quantization = quantization
        self.chat_template = chat_template
        self.batch_tokens = batch_tokens
        self.shard = shard
        self._reading = self._with_own(Reading())
        self._scorer: SequenceScorer | None = None

    def setup(self, device: torch.device) -> None:
        """Load model and tokenizer, once, and move them to the device.

        Raises:
            ModelError: There is no usable model at ``path``, it is one that answers, ``label`` must
                be chosen, or what the folder says of its texts is not readable.
            ConfigError: There is no such device here, or no such template.
        """
        own = device if self.device is None else self.device
        if self._scorer is None:
            _require_present(own)
            _require_scores(self.path)
            self._reading = self._with_own(folder_reading(self.path))
            self._scorer = self._load()
            if self.shard and is_distributed():
                self._scorer.shard(own)
        self._scorer.to(own)

    def sharded_networks(self) -> Sequence[nn.Module]:
        """The model, once it is loaded."""
        return () if self._scorer is None else (self._scorer.model,)

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
        if not self._reading.include_prompt:
            return list(completions.responses)
        texts = judged_texts(completions, include_prompt=True)
        return [chat or text for chat, text in zip(self._chats(completions), texts, strict=True)]

    def _chats(self, completions: Completions) -> list[tuple[Message, ...] | None]:
        """Return the chat with the response as its last turn, or None where it is no chat."""
        rows = zip(completions.prompts, completions.messages, completions.responses, strict=True)
        chats = []
        for prompt, messages, response in rows:
            if messages is None and self._reading.plain_prompts == "chat":
                messages = ({"role": "user", "content": prompt},)
            turn = {"role": "assistant", "content": response}
            chats.append(None if messages is None else (*messages, turn))
        return chats

    def _with_own(self, reading: Reading) -> Reading:
        """Put the settings that are not null in place of the folder's."""
        own = {field.name: getattr(self, field.name) for field in fields(Reading)}
        return replace(reading, **{name: v for name, v in own.items() if v is not None})

    def _load(self) -> SequenceScorer:
        # Imported here: it brings transformers along, which `--help` has no need of.
        from ppo_lightning.models import SequenceScorer

        template = self.chat_template
        return SequenceScorer.load(
            self.path,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            label=self.label,
            transform=self.transform,
            max_length=self._reading.max_length,
            batch_size=self.batch_size,
            append_eos=self._reading.append_eos,
            batch_tokens=self.batch_tokens,
            chat_template=None if template is None else template_text(template),
            quantization=self.quantization,
        )


def _require_kept(quantization: str | None, device: str, shard: bool) -> None:
    """Check how the weights are kept."""
    require(
        quantization in (None, "int8", "nf4"),
        f"`quantization` must be int8, nf4 or null, got {quantization!r}.",
    )
    require(
        not (shard and (quantization is not None or device != "auto")),
        "`shard` goes with neither `quantization` nor `device`: leave those out, or it.",
    )


_ANSWERING = {"sft": "an SFT model", "ppo": "a model that PPO has trained"}


def _require_scores(path: str) -> None:
    """Refuse the model of another step of the chain, which answers and has no scores."""
    from ppo_lightning.models.card import read_card

    card = read_card(path)
    if card is not None and card.kind in _ANSWERING:
        raise ModelError(
            f"`{path}` is {_ANSWERING[card.kind]}, which answers and does not score: train a "
            "reward model from it (`ppo_lightning.modules.RewardModule`), or give the folder of "
            "one."
        )


def folder_reading(path: str) -> Reading:
    """Return what a reward model's folder says of the texts that it was trained on.

    Args:
        path: As in ``SequenceClassifierReward``.

    Raises:
        ModelError: There is no such model, or it says something that nobody can mean.
    """
    from ppo_lightning.models.card import read_card

    card = read_card(path)
    known: dict[str, Any] = asdict(Reading())
    said = {} if card is None else {k: v for k, v in card.settings.items() if k in known}
    try:
        for name in ("include_prompt", "append_eos"):
            value = said.get(name, True)
            require(isinstance(value, bool), f"`{name}` must be true or false, got {value!r}.")
        return Reading(**said)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"`ppo_lightning.json` of `{path}` says in `settings`: {error} Export the model anew, "
            "or mend the file."
        ) from error


def template_text(given: str) -> str:
    """Return a chat template that is given as text or as a file.

    Raises:
        ConfigError: It is neither: there is no such file, and no template lacks braces.
    """
    if "{" in given:
        return given
    if not Path(given).is_file():
        raise ConfigError(
            f"`chat_template`: there is no file `{given}`, and it is no template either (which "
            "has `{{ … }}` in it)."
        )
    return read_text(given)


def _device(name: str) -> torch.device:
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"`device` must be auto, cpu, cuda or cuda:NUMBER, got {name!r}."
        ) from error
    require(
        found.type in ("cpu", "cuda"),
        f"`device` must be auto, cpu, cuda or cuda:NUMBER, got {name!r}.",
    )
    return found


def _require_present(device: torch.device) -> None:
    """Refuse a graphics processor that is not here, before any weights are read."""
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= count:
        raise ConfigError(f"`device: {device}` of a reward: this machine has {count} such devices.")
