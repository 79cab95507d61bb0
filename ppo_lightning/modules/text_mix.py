"""PPO-ptx: language modelling on texts, or on answers, in the actor's steps."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ppo_lightning.configs import PTXConfig
from ppo_lightning.data import (
    DemonstrationSet,
    Example,
    Learner,
    PromptSet,
    as_records,
    as_source,
    shuffled_order,
    token_rows,
)
from ppo_lightning.distributed import max_over_ranks, num_replicas, replica, shares_gradients
from ppo_lightning.errors import ConfigError, DataError
from ppo_lightning.modules.objective import SUMS, Terms
from ppo_lightning.modules.update import Objective, touch
from ppo_lightning.rollout import microbatch_rows
from ppo_lightning.types import MiniBatch, Sequences


@dataclass(frozen=True, kw_only=True)
class TextMix:
    """Texts cut into pieces, or demonstrations; which a step reads depends on its number alone.

    So there is no position to save, and all ranks know what the others read.

    Args:
        config: Weight and size.
        pieces: Token ids, two or more each, with what is learned of them.
        seed: Of their order.
    """

    config: PTXConfig
    pieces: tuple[Example, ...]
    seed: int

    @classmethod
    def build(
        cls,
        config: PTXConfig,
        tokenizer: Any,
        *,
        learner: Learner,
        seed: int,
        max_positions: int | None = None,
    ) -> TextMix:
        """Read and tokenise the texts, each ending with the end token, or the demonstrations.

        Args:
            config: Where they are.
            tokenizer: The actor's.
            learner: Reads demonstrations with it.
            seed: Of their order.
            max_positions: Most tokens that the actor can read; None is unlimited.

        Raises:
            ConfigError: A step has fewer texts than there are ranks, or a piece may be longer than
                the actor can read.
            DataError: The texts cannot be read, or have no two tokens.
        """
        if config.batch_size < num_replicas():
            raise ConfigError(
                f"`ptx.batch_size` ({config.batch_size}) must be at least the number of ranks "
                f"({num_replicas()})."
            )
        if max_positions is not None and config.max_length > max_positions:
            raise ConfigError(
                f"`ptx.max_length` ({config.max_length}) exceeds the {max_positions} positions of "
                "the policy."
            )
        if config.demonstrations:
            return cls(config=config, pieces=_demonstrations(config, learner), seed=seed)
        return cls(config=config, pieces=_text_pieces(config, tokenizer), seed=seed)

    def add(
        self,
        terms: Terms,
        objective: Objective,
        batch: MiniBatch,
        parameters: Mapping[str, Sequence[nn.Parameter]],
        backward: Callable[[Tensor], None],
    ) -> Terms:
        """Add the gradient of a step's texts.

        Args:
            terms: Of the minibatch.
            objective: Networks.
            batch: The minibatch, for its number.
            parameters: By group.
            backward: Lightning's ``manual_backward``.

        Returns:
            ``terms`` with the loss and its sums added.
        """
        iteration = batch.experience.iteration
        if not self.config.coef or iteration % self.config.every_n_iterations:
            return terms
        chosen = self._chosen(iteration * batch.num_steps + batch.step)
        count = sum(self.pieces[number].num_learned for number in chosen)
        device = terms.sums.device
        whole = self._sequences(chosen[replica() :: num_replicas()], device)
        loss, nll = terms.loss, torch.zeros_like(terms.sums[0])
        for sequences in _pieces(whole, objective.ppo.microbatch_tokens):
            part = self._nll(sequences, objective)
            own = self.config.coef * part * num_replicas() / count
            # Ranks add up all parameters at each backward, whichever they are of.
            everything = [*parameters["actor"], *parameters["critic"]]
            backward(own + touch(everything) if shares_gradients(everything) else own)
            loss, nll = loss + own.detach(), nll + part.detach()
        sums = terms.sums.clone()
        sums[SUMS.index("ptx_loss")] += nll
        sums[SUMS.index("ptx_tokens")] += whole.response_mask.sum()
        return terms._replace(loss=loss, sums=sums)

    @staticmethod
    def _nll(sequences: Sequences, objective: Objective) -> Tensor:
        """−log p of the valid tokens, summed; at temperature 1, as a text is no rollout."""
        found = objective.networks(
            sequences, temperature=1.0, values=False, entropy=False, final_values=False
        )
        nll: Tensor = -found.logprobs.masked_fill(~sequences.response_mask, 0).sum()
        return nll

    def _chosen(self, step: int) -> list[int]:
        size = self.config.batch_size
        return shuffled_order(len(self.pieces), step * size, size, seed=self.seed)

    def _sequences(self, numbers: Sequence[int], device: torch.device) -> Sequences:
        """Lay pieces out: the first token is given, of the others those learned are foretold."""
        pieces = [self.pieces[number] for number in numbers]
        rows = token_rows([[place] for place in range(len(pieces))], pieces, packed=False)
        first = rows.ids[:, :1]
        return Sequences(
            prompt_ids=first,
            prompt_mask=torch.ones_like(first, dtype=torch.bool),
            response_ids=rows.ids[:, 1:],
            response_mask=rows.learned[:, 1:],
        ).to(device)


def _text_pieces(config: PTXConfig, tokenizer: Any) -> tuple[Example, ...]:
    texts = config.texts if isinstance(config.texts, str) else list(config.texts)
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    size, pieces = config.max_length, []
    for ids in PromptSet.build(as_source(texts), tokenizer, chat=False).ids:
        whole = [*ids, *end]
        pieces += [whole[i : i + size] for i in range(0, len(whole), size)]
    usable = tuple(
        Example(ids=array("i", piece), spans=((1, len(piece)),)) for piece in pieces if piece[1:]
    )
    if not usable:
        raise DataError("`ptx.texts` has no text of two tokens or more.")
    return usable


def _demonstrations(config: PTXConfig, learner: Learner) -> tuple[Example, ...]:
    given = config.demonstrations
    source = as_records(given if isinstance(given, str) else list(given), name="ptx.demonstrations")
    found = DemonstrationSet.build(
        source, learner, max_tokens=config.max_length, overlong="truncate"
    )
    return found.examples


def _pieces(whole: Sequences, max_tokens: int | None) -> list[Sequences]:
    """Cut a step's texts by the token budget, into equally many pieces on every rank."""
    rows = microbatch_rows(whole, max_tokens=max_tokens)
    pieces = [whole.select(group).trimmed() for group in rows]
    wanted = max_over_ranks(len(pieces), whole.response_ids.device)
    nothing = replace(pieces[0], response_mask=torch.zeros_like(pieces[0].response_mask))
    return pieces + [nothing] * (wanted - len(pieces))
