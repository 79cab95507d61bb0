"""The data module of reward models: pairs in, steps of pairs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Protocol, runtime_checkable

from ppo_lightning.configs import InlineRecord
from ppo_lightning.configs.checks import require
from ppo_lightning.data.preferences.pair_batches import PairBatch, PairExample
from ppo_lightning.data.preferences.pair_set import (
    PairReader,
    pair_examples,
    split_by_prompt,
    warn_of_shared_prompts,
)
from ppo_lightning.data.preferences.pairs import PreferencePair, read_pairs
from ppo_lightning.data.records.base import RecordSource
from ppo_lightning.data.steps.share import Share
from ppo_lightning.data.steps.supervised_datamodule import SupervisedDataModule
from ppo_lightning.errors import ConfigError

# `Path` comes last, and for the reason that `data/prompts/sources.py` gives.
Pairs = RecordSource | str | list[InlineRecord] | Path
"""A source, a path to a file, or the records themselves."""


@runtime_checkable
class PairLearner(Protocol):
    """What is asked of the module."""

    pair_reader: PairReader
    keeps_negatives: bool
    """Whether all rejected answers of a record stay together, for the module to choose from."""


class PreferenceDataModule(SupervisedDataModule):
    """Pairs of a chosen and a rejected answer, for a reward model.

    A record has ``prompt`` and the texts ``chosen`` and ``rejected``; or ``messages`` (the turns
    before the answer), ``chosen`` and ``rejected`` (texts or turns); or ``chosen`` and ``rejected``
    as whole chats, whose common beginning is the prompt. ``rejected`` may be a list of several
    answers, and ``margin`` a number from 0: by how much the chosen one should win.

    Args:
        pairs: Training pairs.
        val_pairs: Held-out pairs for validation, ``test`` and ``predict``.
        val_share: Without ``val_pairs``: share of the prompts of ``pairs`` that is held out, by a
            hash of the prompt, so that no prompt is on both sides, whatever the seed.
        batch_size: Pairs of one optimiser step, over all ranks.
        val_batch_size: Held-out pairs scored at once on a rank.
        fields: Our name -> the file's column, such as ``{chosen: response_a}``.
        overlong: A text longer than the reward model reads is an ``error``, its pair is left out
            (``drop``), or it loses its beginning (``truncate``), as it will when it is scored.
        identical: Pairs whose answers are the same are an ``error``, or left out (``drop``).
        on_error: Records that are no pairs are an ``error`` that lists them, or left out
            (``skip``).
        seed: Of the order; None takes ``seed_everything``'s, or 0.
    """

    setting: ClassVar[str] = "pairs"

    def __init__(
        self,
        pairs: Pairs,
        val_pairs: Pairs | None = None,
        *,
        val_share: float = 0.0,
        batch_size: int = 32,
        val_batch_size: int = 64,
        fields: Mapping[str, str | None] | None = None,
        overlong: Literal["error", "drop", "truncate"] = "error",
        identical: Literal["error", "drop"] = "error",
        on_error: Literal["error", "skip"] = "error",
        seed: int | None = None,
    ) -> None:
        require(
            identical in ("error", "drop"),
            f"`identical` must be one of error, drop, got {identical!r}.",
        )
        super().__init__(
            pairs,
            val_pairs,
            val_share=val_share,
            batch_size=batch_size,
            val_batch_size=val_batch_size,
            fields=fields,
            overlong=overlong,
            on_error=on_error,
            seed=seed,
        )
        self.identical: Literal["error", "drop"] = identical

    @property
    def learner(self) -> PairLearner:
        """The module that the pairs are read for."""
        module = getattr(self.trainer, "lightning_module", None)
        if not isinstance(module, PairLearner):
            raise TypeError(
                f"PreferenceDataModule needs a module with `pair_reader`, such as RewardModule, "
                f"got {type(module).__name__}."
            )
        return module

    def read(self, source: RecordSource, share: Share, *, held_out: bool) -> Sequence[PairExample]:
        """Read pairs; of held-out ones each rejected answer in a pair of its own.

        Raises:
            DataError: Records are no pairs, or too long.
            ConfigError: ``val_share`` leaves no pair on one side.
        """
        pairs = self._part(read_pairs(source, identical=self.identical), share)
        found = self._examples(pairs, each=held_out or not self.learner.keeps_negatives)
        if held_out and share.part == "all":
            warn_of_shared_prompts(self.train_examples, found)
        return found

    def _part(self, pairs: list[PreferencePair], share: Share) -> list[PreferencePair]:
        if share.part == "all":
            return pairs
        train, held_out = sides = split_by_prompt(pairs, share.held_out)
        if not all(sides):
            raise ConfigError(
                f"`data.init_args.val_share: {share.held_out}` leaves {len(train)} pairs to train "
                f"on and {len(held_out)} held out: change it, or give more prompts."
            )
        return held_out if share.part == "held out" else train

    def _examples(self, pairs: list[PreferencePair], *, each: bool = True) -> list[PairExample]:
        return pair_examples(
            pairs,
            self.learner.pair_reader,
            overlong=self.overlong,
            identical=self.identical,
            each=each,
        )

    def make_batch(
        self, examples: Sequence[PairExample], *, epoch: int, step: int, num_steps: int
    ) -> PairBatch:
        """Make a batch of some pairs, maybe none."""
        return PairBatch(examples=tuple(examples), epoch=epoch, step=step, num_steps=num_steps)
