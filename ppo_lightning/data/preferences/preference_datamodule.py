"""The data module of reward models: pairs in, steps of pairs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

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
from ppo_lightning.data.records.formats import as_records
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

    held_out_setting = "set `data.init_args.val_pairs` or `val_share`"

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
        super().__init__(batch_size=batch_size, val_batch_size=val_batch_size, seed=seed)
        require(0 <= val_share < 1, f"`val_share` must lie in [0, 1), got {val_share}.")
        require(
            not val_share or val_pairs is None,
            "`val_share` takes held-out pairs from `pairs`; with `val_pairs` leave it out.",
        )
        require(
            overlong in ("error", "drop", "truncate"),
            f"`overlong` must be one of error, drop, truncate, got {overlong!r}.",
        )
        require(
            identical in ("error", "drop"),
            f"`identical` must be one of error, drop, got {identical!r}.",
        )
        self.pairs = as_records(pairs, fields=fields, on_error=on_error, name="pairs")
        self.val_pairs = (
            None
            if val_pairs is None
            else as_records(val_pairs, fields=fields, on_error=on_error, name="val_pairs")
        )
        self.val_share = val_share
        self.overlong: Literal["error", "drop", "truncate"] = overlong
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

    @property
    def has_held_out(self) -> bool:
        """Whether the run has held-out pairs."""
        return self.val_pairs is not None or self.val_share > 0

    def read_train(self) -> Sequence[PairExample]:
        """Return the training pairs.

        Raises:
            DataError: Records are no pairs, or too long.
            ConfigError: ``val_share`` leaves no pair on one side.
        """
        pairs = read_pairs(self.pairs, identical=self.identical)
        return self._examples(self._side(pairs, 0), each=not self.learner.keeps_negatives)

    def read_held_out(self) -> Sequence[PairExample]:
        """Return the held-out pairs, each rejected answer in a pair of its own."""
        if self.val_pairs is not None:
            found = self._examples(read_pairs(self.val_pairs, identical=self.identical))
            warn_of_shared_prompts(self.train_examples, found)
            return found
        if not self.val_share:
            return ()
        pairs = read_pairs(self.pairs, identical=self.identical)
        return self._examples(self._side(pairs, 1))

    def _side(self, pairs: list[PreferencePair], side: int) -> list[PreferencePair]:
        if not self.val_share:
            return pairs
        sides = split_by_prompt(pairs, self.val_share)
        if not all(sides):
            raise ConfigError(
                f"`data.init_args.val_share: {self.val_share}` leaves {len(sides[0])} pairs to "
                f"train on and {len(sides[1])} held out: change it, or give more prompts."
            )
        return sides[side]

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
