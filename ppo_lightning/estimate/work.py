"""What one rank does in an iteration, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_lightning.estimate.run import Run
from ppo_lightning.rollout.experience import SCORING_TOKENS


@dataclass(frozen=True, kw_only=True)
class Work:
    """One iteration of one rank, all prompts and responses at their longest.

    Args:
        responses: Of this rank.
        prompt_tokens: Of each.
        response_tokens: Of each.
        at_once: Responses that are decoded together.
        scoring_passes: Forward passes over the buffer, for each network.
        epochs: Passes over the buffer that train actor and critic.
        critic_epochs: Those that train the critic alone, besides.
        steps: Optimiser steps of one such pass.
        microbatches: Forward and backward passes of a step.
    """

    responses: int
    prompt_tokens: int
    response_tokens: int
    at_once: int
    scoring_passes: int
    epochs: int
    critic_epochs: int
    steps: int
    microbatches: int

    @property
    def tokens(self) -> int:
        """Prompts and responses."""
        return self.responses * (self.prompt_tokens + self.response_tokens)

    @property
    def waves(self) -> int:
        """Times that a batch of responses is decoded."""
        return -(-self.responses // self.at_once)


def work_of(run: Run) -> Work:
    """Count what one rank does in an iteration that is not stopped early.

    Every response is taken to have a prompt of its own: where padding is left out and a prompt has
    several, there are fewer passes.
    """
    row = run.prompt_tokens + run.sampling.max_new_tokens
    budget = run.ppo.microbatch_tokens
    in_pass = run.minibatch_rows if budget is None else max(1, budget // row)
    scored = max(1, (budget or SCORING_TOKENS) // row)
    return Work(
        responses=run.num_responses,
        prompt_tokens=run.prompt_tokens,
        response_tokens=run.sampling.max_new_tokens,
        at_once=min(run.num_responses, run.sampling.batch_size or run.num_responses),
        scoring_passes=-(-run.num_responses // scored),
        epochs=run.ppo.num_update_epochs,
        critic_epochs=run.ppo.extra_critic_epochs,
        steps=run.buffer.num_minibatches,
        microbatches=-(-run.minibatch_rows // in_pass),
    )
