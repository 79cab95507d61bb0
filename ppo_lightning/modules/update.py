"""Gradients of one minibatch: the objective, microbatch by microbatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ppo_lightning.configs import KLConfig, PPOConfig
from ppo_lightning.distributed import all_reduce_sum, max_over_ranks, num_replicas, shares_gradients
from ppo_lightning.models import ActorCritic
from ppo_lightning.modules.objective import SUMS, Coefficients, Counts, Terms, microbatch_terms
from ppo_lightning.modules.passes import Part
from ppo_lightning.rollout import microbatch_rows
from ppo_lightning.rollout.experience import Reference
from ppo_lightning.types import Experience, Sequences

_COLUMNS = ("old_logprobs", "old_values", "ref_logprobs", "advantages", "returns")
"""Fields of ``Experience`` with a number for each response token."""


Unsynced = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Everything that the loss of a minibatch is made of.

    Args:
        networks: Actor and critic.
        reference: Read only where the exact KL is part of the loss.
        ppo: The objective.
        kl: Placement of the penalty.
    """

    networks: ActorCritic
    reference: Reference
    ppo: PPOConfig
    kl: KLConfig

    def parts(self, part: Part) -> tuple[Part, ...]:
        """Say what gets a forward and backward pass of its own in a step that trains ``part``.

        Networks that share nothing need not keep their activations at the same time. Where ranks
        share gradients, even one alone, DDP expects a backward pass to reach all parameters.
        """
        apart = self.ppo.backward == "in_turn" and self.networks.critic is not None
        whole = part != "both" or not apart or shares_gradients(self.networks.parameters())
        return (part,) if whole else ("actor", "critic")

    def microbatch(
        self, batch: Experience, coefficients: Coefficients, counts: Counts, part: Part = "both"
    ) -> Terms:
        """Forward pass and loss of one microbatch, at the temperature that it was sampled at."""
        ref_logits = None
        exact = part != "critic" and self.kl.placement == "loss" and self.kl.estimator == "full"
        if exact:
            ref_logits = self.reference.logprobs(
                batch.sequences, temperature=batch.temperature, logits=True
            ).logits
        output = self.networks(
            batch.sequences,
            temperature=batch.temperature,
            policy=part != "critic",
            values=part != "actor",
            logits=exact,
            entropy_grad=coefficients.ent_coef != 0,
            final_values=False,
        )
        return microbatch_terms(
            output,
            batch,
            ppo=self.ppo,
            kl=self.kl,
            coefficients=coefficients,
            counts=counts,
            part=part,
            ref_logits=ref_logits,
        )


def accumulate_gradients(
    minibatch: Experience,
    objective: Objective,
    coefficients: Coefficients,
    *,
    backward: Callable[[Tensor], None],
    part: Part = "both",
    idle: Sequence[nn.Parameter] = (),
    unsynced: Unsynced = nullcontext,
) -> Terms:
    """Run forward and backward over a minibatch, one backward for each microbatch.

    Networks without a common trunk have one each, see ``Objective.parts``.

    Losses are sums divided by the counts of the whole minibatch on all ranks, so neither the cut
    into microbatches nor the number of ranks changes the gradient.

    Args:
        minibatch: This rank's rows.
        objective: Networks and loss.
        coefficients: In force now.
        backward: Lightning's ``manual_backward``.
        part: What is trained.
        idle: Parameters that the loss does not reach; see ``touch``.
        unsynced: Context of a backward pass whose gradients stay this rank's until a later one.

    Returns:
        Sums over this rank's microbatches; ``loss`` is detached.
    """
    mask = minibatch.sequences.response_mask
    own = torch.stack([mask.sum(), mask.any(1).sum()]).double()
    tokens, sequences = (all_reduce_sum(own) / num_replicas()).tolist()
    counts = Counts(tokens, sequences)
    loss, sums = mask.new_zeros((), dtype=torch.float64), mask.new_zeros(len(SUMS)).double()
    ratio_max = first_error = torch.zeros((), device=mask.device)
    pieces = [(m, p) for m in microbatches(minibatch, objective) for p in objective.parts(part)]
    for number, (microbatch, piece) in enumerate(pieces, 1):
        with nullcontext() if number == len(pieces) else unsynced():
            terms = objective.microbatch(microbatch, coefficients, counts, piece)
            backward(terms.loss + touch(idle) if idle else terms.loss)
        loss, sums = loss + terms.loss.detach(), sums + terms.sums
        ratio_max = torch.maximum(ratio_max, terms.ratio_max)
        first_error = torch.maximum(first_error, terms.first_error)
    return Terms(loss, sums, ratio_max, first_error)


def touch(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a 0 that hangs on parameters, so that they get a gradient of 0.

    Ranks add their gradients up parameter by parameter: one that has none on any would keep all of
    them waiting.
    """
    # Sums of nothing: a value that is not finite cannot get in.
    return torch.stack([p.flatten()[:0].float().sum() for p in parameters]).sum()


@torch.no_grad()
def kl_old_of(minibatch: Experience, objective: Objective, coefficients: Coefficients) -> float:
    """Measure KL(old‖new) on a minibatch with the current weights, over all ranks.

    Returns:
        Nats per token; nan where no token is valid.
    """
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=minibatch.old_logprobs.device)
    for microbatch in microbatches(minibatch, objective):
        terms = objective.microbatch(microbatch, coefficients, Counts(1.0, 1.0), "actor")
        sums = sums + terms.sums
    kl_sum, tokens = all_reduce_sum(sums[[SUMS.index("kl_old"), SUMS.index("tokens")]]).tolist()
    return kl_sum / tokens if tokens else math.nan


def microbatches(minibatch: Experience, objective: Objective) -> list[Experience]:
    """Cut a minibatch by its token budget, into equally many pieces on every rank.

    A rank that is short of rows gets dummy rows with an empty mask, so that all ranks run the same
    number of backward passes.
    """
    groups = microbatch_rows(
        minibatch.sequences,
        max_tokens=objective.ppo.microbatch_tokens,
        packed=objective.networks.packs(minibatch.sequences),
    )
    pieces = [_trimmed(minibatch.select(rows)) for rows in groups]
    wanted = max_over_ranks(len(pieces), minibatch.old_logprobs.device)
    return pieces + [_dummy(minibatch)] * (wanted - len(pieces))


def _columns_of(batch: Experience) -> tuple[str, ...]:
    weighted = batch.importance_weights is not None
    return (*_COLUMNS, "importance_weights") if weighted else _COLUMNS


def _trimmed(batch: Experience) -> Experience:
    """Drop the columns that are padding in every row."""
    sequences = batch.sequences.trimmed()
    width = sequences.response_ids.shape[1]
    columns = {name: getattr(batch, name)[:, :width] for name in _columns_of(batch)}
    return replace(batch, sequences=sequences, **columns)


def _dummy(like: Experience) -> Experience:
    """One row that is read but counts nowhere: a prompt token and no valid response token."""
    ids = like.sequences.prompt_ids.new_zeros((1, 1))
    real = torch.ones_like(ids, dtype=torch.bool)
    sequences = Sequences(prompt_ids=ids, prompt_mask=real, response_ids=ids, response_mask=~real)
    columns = {name: getattr(like, name).new_zeros((1, 1)) for name in _columns_of(like)}
    return replace(like, sequences=sequences, indices=ids[0], **columns)
