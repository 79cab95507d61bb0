"""The data module of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch

from ppo_lightning.configs import InlineRecord
from ppo_lightning.configs.checks import require_at_least
from ppo_lightning.data.demonstrations.demonstration_set import DemonstrationSet
from ppo_lightning.data.demonstrations.learned import Example, Learner
from ppo_lightning.data.prompts.collate import left_pad
from ppo_lightning.data.prompts.rendering import tokenize_all
from ppo_lightning.data.records.base import RecordSource
from ppo_lightning.data.steps.share import Share
from ppo_lightning.data.steps.step_loader import StepLoader
from ppo_lightning.data.steps.supervised_datamodule import SupervisedDataModule
from ppo_lightning.distributed import num_replicas, replica
from ppo_lightning.errors import ConfigError
from ppo_lightning.types import PromptBatch, TensorRecord

# `Path` stands last for the reason that `data/prompts/sources.py` gives.
Demonstrations = RecordSource | str | list[str | InlineRecord] | Path
"""A source of records, a path, or the records themselves: objects, or strings (plain texts)."""


@runtime_checkable
class DemonstrationReader(Protocol):
    """What the data module asks of the module that learns."""

    @property
    def tokenizer(self) -> Any:
        """The policy's, with its chat template."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Every id that ends a response."""

    @property
    def max_positions(self) -> int | None:
        """Most tokens that the policy can read; None is unlimited."""


@dataclass(frozen=True, kw_only=True)
class ExampleBatch(TensorRecord):
    """This rank's examples of one optimiser step, or of some held-out ones.

    Args:
        examples: Maybe none.
        epoch: Number of the epoch, from 0.
        step: Number of the step within the epoch, from 0.
        num_steps: Steps of the epoch.
    """

    examples: tuple[Example, ...]
    epoch: int
    step: int
    num_steps: int

    def __len__(self) -> int:
        return len(self.examples)


class SFTDataModule(SupervisedDataModule):
    """Demonstrations, and the steps that go through them.

    A record has `prompt` and `response`, or `messages` (a chat; every turn of the assistant is
    learned), or `text` (all of it is learned).

    Args:
        demonstrations: A file (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``, ``.txt``),
            a folder or hub name of `datasets`, a list, or a source.
        val_demonstrations: Held-out ones, for perplexity and answers.
        val_share: Without ``val_demonstrations``: share of ``demonstrations`` that is held out, by
            a hash of the prompt.
        batch_size: Examples of one optimiser step, over all ranks.
        chat: Whether a plain prompt becomes a user turn of the chat template; ``auto`` does so
            where the tokenizer has a template.
        system_prompt: System turn in front of every chat that has none.
        max_tokens: Longest example, prompt and answer; None leaves it to the model's positions.
        overlong: What happens to a longer one: ``error``, ``drop`` or ``truncate`` (its end).
        val_batch_size: Held-out examples measured at once on a rank.
        fields: Our name -> their column, such as ``{prompt: question}``; null hides a column.
        on_error: Records that cannot be used are an ``error`` that lists them, or left out.
        seed: Of the order; None takes ``seed_everything``'s, or 0.
    """

    setting: ClassVar[str] = "demonstrations"

    def __init__(
        self,
        demonstrations: Demonstrations,
        val_demonstrations: Demonstrations | None = None,
        *,
        val_share: float = 0.0,
        batch_size: int = 32,
        chat: Literal["auto"] | bool = "auto",
        system_prompt: str | None = None,
        max_tokens: int | None = None,
        overlong: Literal["error", "drop", "truncate"] = "error",
        val_batch_size: int = 32,
        fields: Mapping[str, str | None] | None = None,
        on_error: Literal["error", "skip"] = "error",
        seed: int | None = None,
    ) -> None:
        require_at_least("max_tokens", max_tokens, 2)
        super().__init__(
            demonstrations,
            val_demonstrations,
            val_share=val_share,
            batch_size=batch_size,
            val_batch_size=val_batch_size,
            fields=fields,
            overlong=overlong,
            on_error=on_error,
            seed=seed,
        )
        self.chat = chat
        self.system_prompt = system_prompt
        self.max_tokens = max_tokens
        self.train_set: DemonstrationSet | None = None
        self.val_set: DemonstrationSet | None = None

    @property
    def reader(self) -> DemonstrationReader:
        """The module that learns."""
        module = getattr(self.trainer, "lightning_module", None)
        if not isinstance(module, DemonstrationReader):
            raise TypeError(
                "SFTDataModule needs a module with a `tokenizer`, such as SFTModule, got "
                f"{type(module).__name__}."
            )
        return module

    def read(self, source: RecordSource, share: Share, *, held_out: bool) -> Sequence[Example]:
        """Read demonstrations; of held-out ones also what they answer."""
        found = self._read(source, share, held_out=held_out)
        if held_out:
            self.val_set = found
        else:
            self.train_set = found
        return found.examples

    def _read(self, source: RecordSource, share: Share, *, held_out: bool) -> DemonstrationSet:
        reader = self.reader
        learner = Learner(
            reader.tokenizer,
            end_ids=reader.end_ids,
            chat=self.chat,
            system_prompt=self.system_prompt,
        )
        return DemonstrationSet.build(
            source,
            learner,
            max_tokens=self._longest(reader.max_positions),
            overlong=self.overlong,
            share=share,
            keep_prompts=held_out,
        )

    def _longest(self, positions: int | None) -> int | None:
        if self.max_tokens is None or positions is None:
            return positions if self.max_tokens is None else self.max_tokens
        if self.max_tokens > positions:
            raise ConfigError(
                f"`data.init_args.max_tokens` ({self.max_tokens}) exceeds the {positions} "
                "positions of the policy: lower it."
            )
        return self.max_tokens

    def make_batch(
        self, examples: Sequence[Example], *, epoch: int, step: int, num_steps: int
    ) -> ExampleBatch:
        """Make a batch of some examples, maybe none."""
        return ExampleBatch(examples=tuple(examples), epoch=epoch, step=step, num_steps=num_steps)

    @property
    def num_prompts(self) -> int:
        """Held-out prompts that can be answered."""
        return 0 if self.val_set is None else len(self.val_set.prompts)

    def prompt_batch(self, numbers: Sequence[int]) -> PromptBatch:
        """Return this rank's share of some held-out prompts, by their number; maybe none."""
        records = () if self.val_set is None else self.val_set.prompts
        tokenizer = self.reader.tokenizer
        own = list(numbers)[replica() :: num_replicas()]
        ids = tokenize_all([records[number] for number in own], tokenizer)
        prompt_ids, prompt_mask = left_pad(ids, tokenizer.pad_token_id)
        places = torch.tensor(own, dtype=torch.long)
        return PromptBatch(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            keys=places,
            indices=places,
            groups=places,
            records=tuple(records[number] for number in own),
        )

    def predict_dataloader(self) -> StepLoader[PromptBatch]:
        """Held-out prompts of this rank."""
        size = self.val_batch_size * num_replicas()
        starts = range(0, max(self.num_prompts, 1), size)

        def make(epoch: int, step: int) -> PromptBatch:
            start = starts[step]
            return self.prompt_batch(range(start, min(start + size, self.num_prompts)))

        return StepLoader(make, num_steps=len(starts), place=lambda: (0, 0))
