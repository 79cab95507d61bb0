"""Loaders: of one iteration (a fresh buffer, then its minibatches) and of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from ppo_lightning.distributed import num_replicas, replica
from ppo_lightning.functional import combine_keys
from ppo_lightning.rollout.minibatches import minibatch_rows
from ppo_lightning.rollout.sharing import rows_of_all_replicas, share_of
from ppo_lightning.types import Experience, MiniBatch, PromptBatch

_MAX_SEED = 2**63 - 1


class RolloutLoader:
    """Yield the minibatches of one iteration; each ``iter`` is one iteration.

    Sized, or Lightning would prefetch a batch and sample the next buffer one update too early.
    ``__iter__`` is a generator function, because Lightning calls ``iter`` more often than it
    iterates: the buffer is collected at the first ``next``.

    Args:
        collect: Samples and scores a fresh buffer.
        num_minibatches: Optimiser steps in one pass over the buffer.
        num_epochs: Most passes over the buffer.
        seed: Of the shuffles; each pass of each iteration has its own.
        together: So many responses, one after the other, stay in one minibatch.
    """

    def __init__(
        self,
        collect: Callable[[], Experience],
        *,
        num_minibatches: int,
        num_epochs: int,
        seed: int,
        together: int = 1,
    ) -> None:
        self.collect = collect
        self.num_minibatches = num_minibatches
        self.num_epochs = num_epochs
        self.seed = seed
        self.together = together

    def __len__(self) -> int:
        return self.num_minibatches * self.num_epochs

    def __iter__(self) -> Iterator[MiniBatch]:
        experience = rows_of_all_replicas(self.collect())
        share = self._share(experience)
        step = 0
        for epoch in range(self.num_epochs):
            for rows in minibatch_rows(
                experience.indices,
                num_responses=experience.num_responses,
                num_minibatches=self.num_minibatches,
                key=int(combine_keys(self.seed, experience.iteration, epoch)) & _MAX_SEED,
                together=self.together,
            ):
                yield MiniBatch(
                    experience=experience.select(share(rows)),
                    epoch=epoch,
                    step=step,
                    num_steps=len(self),
                    num_epochs=self.num_epochs,
                )
                step += 1

    def _share(self, experience: Experience) -> Callable[[Tensor], Tensor]:
        """Return what picks this replica's rows of a minibatch."""
        owner, owners = replica(), num_replicas()
        if owners == 1 or len(experience) < experience.num_responses:  # they are its own already
            return lambda rows: rows
        lengths = experience.sequences.attention_mask.sum(1).cpu()
        return partial(
            share_of, lengths=lengths, owner=owner, owners=owners, together=self.together
        )


class HeldOutLoader:
    """Held-out prompts in batches, the same ones every time.

    Args:
        batches: Of this rank.
    """

    def __init__(self, batches: Sequence[PromptBatch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[PromptBatch]:
        return iter(self.batches)
