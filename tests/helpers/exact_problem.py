"""An RLHF problem whose optimum is known exactly, small enough for a test.

For KL-regularised RLHF the best policy is ``pi*(y|x)`` proportional to
``reference(y|x) * exp(reward(x, y) / beta)``, and its objective J* is the mean over prompts of
``beta * log Z(x)``. With eight tokens and at most four of them in a response all of it can be
counted: objective, KL, values, the policy gradient. So a training run gets an absolute mark, 0
for the reference and 1 for the optimum, and a gradient estimate gets the true one to compare with.

Usage::

    problem = make_problem(seed=0)                    # or family="gpt2": learned positions
    files = export_problem(tmp_path, seed=0)          # model folder and prompts for a run
    problem.score(AutoModelForCausalLM.from_pretrained(trained), beta=0.3)

and in the run's YAML ``class_path: tests.helpers.exact_problem.ExactReward``.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ppo_lightning.rewards import Reward
from tests.helpers.exact.dynamics import Evaluation, Table, response_logprobs, visits
from tests.helpers.exact.export import ExportedProblem, export_problem, prompt_ids, prompt_text
from tests.helpers.exact.models import Family
from tests.helpers.exact.problem import ExactProblem, make_problem
from tests.helpers.exact.task import EOS, MAX_TOKENS, NUM_PROMPTS, PAD, VOCAB_SIZE, all_responses

__all__ = [
    "EOS",
    "MAX_TOKENS",
    "NUM_PROMPTS",
    "PAD",
    "VOCAB_SIZE",
    "Evaluation",
    "ExactProblem",
    "ExactReward",
    "ExportedProblem",
    "Family",
    "Table",
    "all_responses",
    "export_problem",
    "make_problem",
    "prompt_text",
    "response_logprobs",
    "visits",
]


class ScoredCompletions(Protocol):
    """What the reward reads of a batch of completions."""

    @property
    def prompts(self) -> Sequence[str]:
        """Prompts as the data has them: ``"t3 t5"``."""

    @property
    def response_ids(self) -> Sequence[Sequence[int]]:
        """Valid tokens only, the end token included."""

    @property
    def truncated(self) -> Sequence[bool]:
        """True where the response has no end token."""


class ExactReward(Reward):
    """Reward component of the exactly solvable problem.

    Args:
        seed: The problem's seed.
        family: Architecture of its reference, which fixes the reward's mean and spread.
    """

    def __init__(self, seed: int = 0, family: Family = "phi") -> None:
        self._problem = make_problem(seed, family)
        self._index = {prompt: i for i, prompt in enumerate(self._problem.task.prompts)}

    def __call__(self, completions: ScoredCompletions) -> Tensor:
        """Score each completion.

        Returns:
            ``[B]`` float32.

        Raises:
            ValueError: A prompt is not one of the problem's, or a response is not possible in
                it: too long, a token after the end, padding counted as a token, or a
                ``truncated`` flag that contradicts the tokens.
        """
        rows = [self._prompt_index(prompt) for prompt in completions.prompts]
        responses = [
            _padded(ids, truncated)
            for ids, truncated in zip(completions.response_ids, completions.truncated, strict=True)
        ]
        return self._problem.reward(torch.tensor(rows), torch.tensor(responses))

    def _prompt_index(self, prompt: str) -> int:
        ids = prompt_ids(prompt)
        if ids not in self._index:
            known = [prompt_text(p) for p in self._index]
            raise ValueError(f"Prompt {prompt!r} is not of this problem; it has {known}.")
        return self._index[ids]


def _padded(ids: Sequence[int], truncated: bool) -> list[int]:
    """Check a response, since a reward that forgives would hide the fault, and pad it."""
    ids = list(ids)
    ended = ids[-1:] == [EOS]
    content = ids[:-1] if ended else ids
    fits = len(ids) <= MAX_TOKENS if ended else len(ids) == MAX_TOKENS
    if ended == truncated or not fits or {PAD, EOS} & set(content):
        raise ValueError(
            f"Response {ids} with truncated={truncated} cannot occur: at most {MAX_TOKENS} tokens,"
            f" {EOS} ends a response, {PAD} is padding. Pass valid tokens only."
        )
    return ids + [PAD] * (MAX_TOKENS - len(ids))
