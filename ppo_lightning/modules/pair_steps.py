"""Optimiser steps over pairs of answers, and the scores that they are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from ppo_lightning.configs import PreferenceConfig
from ppo_lightning.data.preferences.pair_batches import (
    PairBatch,
    PairExample,
    PairPart,
    idle_pair_part,
    pair_parts,
    row_batches,
)
from ppo_lightning.distributed import gather_objects
from ppo_lightning.functional import bradley_terry_loss, centering_penalty, pair_credit
from ppo_lightning.models import base_scorer, sequence_logits
from ppo_lightning.modules.supervised import SupervisedModule

_PASS_TOKENS = 16_384  # of a pass without gradient, where nothing is configured


class PairSteps(SupervisedModule):
    """Takes optimiser steps over pairs; a subclass builds the network and judges with it."""

    sums: ClassVar[tuple[str, ...]] = ("preference_loss", "correct", "gap", "score", "score_square")
    preference: PreferenceConfig

    @property
    def keeps_negatives(self) -> bool:
        """Whether the rejected answers of a record stay together."""
        return self.preference.negatives == "hardest"

    def scores(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Score rows, whatever their padding.

        Args:
            input_ids: ``[N, S]`` long.
            attention_mask: ``[N, S]``.

        Returns:
            ``[N]`` float32, with gradient.
        """
        assert self.network is not None
        return sequence_logits(base_scorer(self.network), input_ids, attention_mask)[:, 0]

    @torch.no_grad()
    def scores_of(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """Score rows of unlike length, without gradient and without dropout. ``[len(rows)]``."""
        assert self.network is not None
        found = torch.zeros(len(rows), device=self.device)
        budget = self.microbatch_tokens or _PASS_TOKENS
        with _evaluating(self.network) if self.dropout == "keep" else nullcontext():
            for numbers, ids, mask in row_batches(rows, max_tokens=budget, device=self.device):
                found[numbers] = self.scores(ids, mask)
        return found

    @override
    def training_step(self, batch: PairBatch, batch_idx: int) -> None:
        super().training_step(self._harder(batch), batch_idx)

    @override
    def parts(self, batch: PairBatch) -> list[PairPart]:
        return pair_parts(batch.examples, max_tokens=self.microbatch_tokens, device=self.device)

    @override
    def idle_part(self, batch: PairBatch) -> PairPart:
        return idle_pair_part(self.device)

    @override
    def count(self, batch: PairBatch) -> Tensor:
        return torch.tensor(len(batch), device=self.device)

    @override
    def loss_sum(self, part: PairPart) -> tuple[Tensor, Mapping[str, Tensor]]:
        chosen, rejected = self.scores(part.input_ids, part.attention_mask).chunk(2)
        loss = bradley_terry_loss(
            chosen,
            rejected,
            margin=part.margins if self.preference.use_margin else 0.0,
            label_smoothing=self.preference.label_smoothing,
        )
        whole = loss + self.preference.centering_coef * centering_penalty(chosen, rejected)
        found = {
            "preference_loss": loss,
            "correct": pair_credit(chosen, rejected),
            "gap": chosen - rejected,
            "score": (chosen + rejected) / 2,
            "score_square": (chosen.square() + rejected.square()) / 2,
        }
        aside = ~part.counts
        sums = {name: x.detach().masked_fill(aside, 0).sum() for name, x in found.items()}
        return whole.masked_fill(aside, 0).sum(), sums

    @override
    def train_values(self, totals: Mapping[str, float]) -> dict[str, float | None]:
        count = totals["count"]
        mean = {name: totals[name] / count for name in self.sums}
        return {
            "preference_loss": mean["preference_loss"],
            "accuracy": mean["correct"],
            "score_gap": mean["gap"],
            "score_mean": mean["score"],
            "score_std": math.sqrt(max(0.0, mean["score_square"] - mean["score"] ** 2)),
        }

    def _harder(self, batch: PairBatch) -> PairBatch:
        """Choose rejected answers and pairs by the scores that the present weights give.

        A function of weights and batch alone: nothing is kept that a resumed run would lack.
        """
        if self.preference.negatives == "each" and self.preference.hard_share == 1:
            return batch
        leads = self._leads(batch.examples)
        worst = [min(range(len(own)), key=own.__getitem__) for own in leads]
        examples = [e.against(which) for e, which in zip(batch.examples, worst, strict=True)]
        if self.preference.hard_share < 1:
            kept = self._hardest(examples, [own[w] for own, w in zip(leads, worst, strict=True)])
            examples = [example for example in examples if example.number in kept]
        return replace(batch, examples=tuple(examples))

    def _leads(self, examples: Sequence[PairExample]) -> list[list[float]]:
        """Return by how much the chosen answer wins over each rejected one, margin taken off."""
        rows = [row for e in examples for row in (e.chosen, *e.rejected)]
        scores = iter(self.scores_of(rows).tolist())
        leads = []
        for example in examples:
            wanted = next(scores) - (example.margin if self.preference.use_margin else 0.0)
            leads.append([wanted - next(scores) for _ in example.rejected])
        return leads

    def _hardest(self, examples: Sequence[PairExample], leads: Sequence[float]) -> set[int]:
        """Return the numbers of the step's hardest pairs, over all ranks."""
        own = [(lead, example.number) for example, lead in zip(examples, leads, strict=True)]
        everyone = sorted(gather_objects(own))
        count = math.ceil(self.preference.hard_share * len(everyone))
        return {number for _, number in everyone[:count]}


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """Switch dropout off for a while."""
    was = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was)
