"""The exactly solvable problem: task, reference and everything that can be said of a policy."""

import copy
import functools
import hashlib
import inspect
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.exact import dynamics, models
from tests.helpers.exact import task as task_module
from tests.helpers.exact.dynamics import Evaluation, Table
from tests.helpers.exact.models import (
    SFT_STEPS,
    Family,
    fine_tune,
    fresh_policy,
    padded_prompts,
)
from tests.helpers.exact.task import (
    EOS,
    FIRST_CONTENT,
    MAX_TOKENS,
    NUM_CONTENT,
    NUM_PROMPTS,
    PAD,
    VOCAB_SIZE,
    Task,
    all_responses,
    content_strings,
    draw_task,
    ended_responses,
)

RewardFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExactProblem:
    """KL-regularised RLHF with a known optimum; build it with :func:`make_problem`.

    Args:
        seed: Draws prompts, reward and reference.
        family: Architecture of the reference.
        task: Prompts and raw reward.
        reference: The frozen fine-tuned model; policies start as copies of it.
        reference_policy: Its action table of log-probabilities.
        shift: Mean raw reward of the reference.
        scale: Standard deviation of the raw reward under the reference.
        payoff: Action table of the reward paid for an action, mean 0 and spread 1 under the
            reference.
    """

    seed: int
    family: Family
    task: Task
    reference: PreTrainedModel
    reference_policy: Table
    shift: float
    scale: float
    payoff: Table

    def reward(self, prompt_index: Tensor, responses: Tensor) -> Tensor:
        """Reward ``[B]`` of padded responses ``[B, MAX_TOKENS]`` to prompts ``[B]``."""
        return (self.task.raw_reward(prompt_index, responses) - self.shift) / self.scale

    def policy_copy(self) -> PreTrainedModel:
        """Trainable copy of the reference."""
        return copy.deepcopy(self.reference).requires_grad_(True)

    def off_reference_start(self, steps: int = 40) -> PreTrainedModel:
        """Policy a little off the reference (KL > 0): the place to compare gradients at."""
        model = self.policy_copy()
        return fine_tune(model, self.task, seed=self.seed, steps=steps, chain=1)

    def policy_of(self, model: PreTrainedModel) -> list[Tensor]:
        """Action table of a model's log-probabilities, differentiable."""
        return model_policy(self.task, model)

    def evaluate(self, policy: Table, *, beta: float) -> Evaluation:
        """Exact objective, reward, KL, entropy and values of a policy."""
        return dynamics.evaluate(
            policy, reference=self.reference_policy, payoff=self.payoff, beta=beta
        )

    def optimum(self, *, beta: float) -> tuple[list[Tensor], Tensor]:
        """Best policy and its objective J*, in closed form."""
        return dynamics.optimum(reference=self.reference_policy, payoff=self.payoff, beta=beta)

    def brute_force_objective(self, *, beta: float) -> Tensor:
        """J* from the list of all responses; shares no recursion and no table with `optimum`."""
        responses = all_responses()
        rows = torch.arange(NUM_PROMPTS).repeat_interleave(len(responses))
        rewards = self.reward(rows, responses.repeat(NUM_PROMPTS, 1)).view(NUM_PROMPTS, -1)
        logprobs = dynamics.response_logprobs(self.reference_policy, responses)
        return beta * (logprobs + rewards / beta).logsumexp(1).mean()

    def score(self, model: PreTrainedModel, *, beta: float) -> float:
        """Share of the way from the reference (0) to the optimum (1) that a model has gone."""
        with torch.no_grad():
            reached = self.evaluate(self.policy_of(model), beta=beta).objective
        start = self.evaluate(self.reference_policy, beta=beta).objective
        _, best = self.optimum(beta=beta)
        return float((reached - start) / (best - start))

    def objective_gradient(self, model: PreTrainedModel, *, beta: float) -> dict[str, Tensor]:
        """Exact gradient of ``E[reward] - beta * KL`` for every parameter, by name."""
        names, parameters = zip(*model.named_parameters(), strict=True)
        objective = self.evaluate(self.policy_of(model), beta=beta).objective
        return dict(zip(names, torch.autograd.grad(objective, parameters), strict=True))

    def critic_explained_variance(
        self, policy: Table, predict: Callable[[Tensor], Tensor], *, beta: float
    ) -> float:
        """Compare a critic with the exact ``V(s)``, states weighted by the policy's visits.

        Args:
            policy: Action table of the policy whose values the critic should know.
            predict: Maps right-padded ids ``[N, S]`` to values ``[N, S]``, causally: the value at
                a position is that of the state which ends there.
            beta: The objective's KL weight.
        """
        with torch.no_grad():
            predicted = table_of(self.task, predict)
            exact = self.evaluate(policy, beta=beta).state_values
            return dynamics.explained_variance(predicted, exact, weights=dynamics.visits(policy))

    def left_padded_prompts(self, prompt_index: Tensor) -> tuple[Tensor, Tensor]:
        """Prompt ids and attention mask, both ``[B, 3]`` long."""
        ids, lengths = padded_prompts(self.task)
        rolled = [row.roll(-int(n)) for row, n in zip(ids, lengths, strict=True)]
        picked = torch.stack(rolled)[prompt_index]
        return picked, (picked != PAD).long()


def table_of(task: Task, causal: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Table of a causal function of token ids, one call for all states.

    Args:
        task: Gives the prompts.
        causal: Maps right-padded ids ``[N, S]`` to outputs ``[N, S, ...]``.
    """
    leaves = content_strings(MAX_TOKENS - 1)
    prompts, lengths = padded_prompts(task)
    ids = torch.nn.functional.pad(prompts, (0, MAX_TOKENS - 1), value=PAD)
    ids = ids[:, None].repeat(1, len(leaves), 1)
    columns = lengths[:, None, None] + torch.arange(MAX_TOKENS - 1)
    ids.scatter_(2, columns.expand(-1, len(leaves), -1), leaves.expand(NUM_PROMPTS, -1, -1))
    flat = causal(ids.flatten(0, 1))
    outputs = flat.view(NUM_PROMPTS, len(leaves), *flat.shape[1:])
    prompt = torch.arange(NUM_PROMPTS)
    # Leaves that share their first t tokens are neighbours: one of each group speaks for it.
    groups = [outputs[:, :: NUM_CONTENT ** (MAX_TOKENS - 1 - t)] for t in range(MAX_TOKENS)]
    return [group[prompt, :, lengths - 1 + t] for t, group in enumerate(groups)]


def model_policy(task: Task, model: PreTrainedModel) -> list[Tensor]:
    """Action table of log-probabilities, float32 or better. ``[prompt, 6**t, VOCAB_SIZE]``."""

    def log_probs(ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids).logits
        return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    return table_of(task, log_probs)


def payoff_table(reward: RewardFunction) -> list[Tensor]:
    """Action table of a reward that is paid by the action that ends the response."""

    def paid(responses: Tensor) -> Tensor:
        rows = torch.arange(NUM_PROMPTS).repeat_interleave(len(responses))
        return reward(rows, responses.repeat(NUM_PROMPTS, 1)).view(NUM_PROMPTS, -1)

    payoff = [torch.zeros(NUM_PROMPTS, NUM_CONTENT**t, VOCAB_SIZE) for t in range(MAX_TOKENS)]
    for depth, table in enumerate(payoff):
        table[..., EOS] = paid(ended_responses(depth))
    payoff[-1][..., FIRST_CONTENT:] = paid(content_strings(MAX_TOKENS)).view(
        NUM_PROMPTS, -1, NUM_CONTENT
    )
    return payoff


@functools.lru_cache(maxsize=8)
def make_problem(seed: int = 0, family: Family = "phi") -> ExactProblem:
    """Build the problem of a seed, with its reference fine-tuned (3 s; then kept on disk).

    The problem is shared by all callers: train a :meth:`ExactProblem.policy_copy`.
    """
    task = draw_task(seed)
    reference = _fine_tuned_reference(seed, family, task).requires_grad_(False)
    policy = model_policy(task, reference)

    def expectation(reward: RewardFunction) -> float:
        _, values = dynamics.expected_total(policy, payoff_table(reward))
        return float(values[0].mean())

    shift = expectation(task.raw_reward)
    scale = math.sqrt(expectation(lambda rows, ids: (task.raw_reward(rows, ids) - shift) ** 2))
    return ExactProblem(
        seed=seed,
        family=family,
        task=task,
        reference=reference,
        reference_policy=policy,
        shift=shift,
        scale=scale,
        payoff=payoff_table(lambda rows, ids: (task.raw_reward(rows, ids) - shift) / scale),
    )


def _fine_tuned_reference(seed: int, family: Family, task: Task) -> PreTrainedModel:
    model = fresh_policy(seed, family)
    path = _cache_path(seed, family)
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    fine_tune(model, task, seed=seed, steps=SFT_STEPS)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Test processes run side by side: a file appears whole or not at all.
    partial = path.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), partial)
    partial.replace(path)
    return model


def _cache_path(seed: int, family: Family) -> Path:
    """File of the trained reference; the name changes with whatever could change the weights."""
    sources = [inspect.getsource(module).encode() for module in (models, task_module)]
    versions = f"{torch.__version__} {transformers.__version__}".encode()
    digest = hashlib.sha256(b"".join([versions, *sources])).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"ppo_lightning_exact_{os.getuid()}"
    return folder / f"{family}-{seed}-{digest}.pt"
