"""Exact values, optimum and probabilities by backward induction over the tree of responses.

A *state* is a prompt with the content tokens sampled so far. Everything known of states or of
actions is a *table*: a list over depth ``t`` (tokens sampled so far), whose entry has shape
``[prompt, 6**t]`` for states and ``[prompt, 6**t, VOCAB_SIZE]`` for actions, in the order of
``content_strings(t)``. Policies are tables of log-probabilities. All of it is differentiable.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.helpers.exact.task import EOS, FIRST_CONTENT, MAX_TOKENS, NUM_CONTENT, NUM_PROMPTS, PAD

Table = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What a policy earns, exactly; scalars are means over the prompts.

    Args:
        objective: ``E[reward] - beta * KL``.
        reward: Expected reward.
        kl: KL(policy || reference), nats per response.
        entropy: Entropy of the response, nats.
        action_values: Action table of ``Q``, the action's own KL penalty included.
        state_values: State table of ``V``, what a perfect critic would predict.
    """

    objective: Tensor
    reward: Tensor
    kl: Tensor
    entropy: Tensor
    action_values: Table
    state_values: Table


def future_of(values: Tensor | None) -> Tensor | float:
    """Lay the values of the next depth's states under the actions that lead to them.

    Args:
        values: State values one token deeper, ``[prompt, 6**(t+1)]``, or None below the tree.

    Returns:
        ``[prompt, 6**t, VOCAB_SIZE]``, 0 under padding and the end token; or 0.
    """
    if values is None:
        return 0.0
    successors = values.view(NUM_PROMPTS, -1, NUM_CONTENT)
    return torch.nn.functional.pad(successors, (FIRST_CONTENT, 0))


def expected_total(policy: Table, payoff: Table) -> tuple[list[Tensor], list[Tensor]]:
    """Expected sum of ``payoff`` along a response: ``(action_values, state_values)``."""
    action_values: list[Tensor] = []
    state_values: list[Tensor] = []
    values = None
    for log_probs, pay in zip(reversed(policy), reversed(payoff), strict=True):
        totals = pay + future_of(values)
        values = (log_probs.exp() * totals).sum(-1)
        action_values.insert(0, totals)
        state_values.insert(0, values)
    return action_values, state_values


def log_ratios(policy: Table, reference: Table) -> list[Tensor]:
    """``log policy - log reference`` per action, 0 where the policy never acts (0 log 0 = 0)."""
    return [(p - r).masked_fill(p.exp() == 0, 0.0) for p, r in zip(policy, reference, strict=True)]


def evaluate(policy: Table, *, reference: Table, payoff: Table, beta: float) -> Evaluation:
    """Objective and its parts of a policy, exactly.

    Args:
        policy: Action table of log-probabilities.
        reference: The same of the reference.
        payoff: Action table of the reward that the action brings at once.
        beta: Weight of the KL penalty, reward units per nat.
    """
    ratios = log_ratios(policy, reference)
    surprise = [(-p).masked_fill(p.exp() == 0, 0.0) for p in policy]
    shaped = [pay - beta * ratio for pay, ratio in zip(payoff, ratios, strict=True)]
    action_values, state_values = expected_total(policy, shaped)

    def mean_total(pay: Table) -> Tensor:
        return expected_total(policy, pay)[1][0].mean()

    return Evaluation(
        objective=state_values[0].mean(),
        reward=mean_total(payoff),
        kl=mean_total(ratios),
        entropy=mean_total(surprise),
        action_values=action_values,
        state_values=state_values,
    )


def optimum(*, reference: Table, payoff: Table, beta: float) -> tuple[list[Tensor], Tensor]:
    """The best policy in closed form, and the objective it reaches.

    ``V(s) = beta * log sum_a reference(a|s) * exp(Q(s, a) / beta)``, from the leaves to the root.

    Returns:
        ``(policy, objective)``: an action table, and the mean of ``beta * log Z`` over prompts.
    """
    policy: list[Tensor] = []
    values = None
    for log_probs, pay in zip(reversed(reference), reversed(payoff), strict=True):
        tilted = log_probs + (pay + future_of(values)) / beta
        log_z = tilted.logsumexp(-1)
        policy.insert(0, tilted - log_z[..., None])
        values = beta * log_z
    assert values is not None
    return policy, values.mean()


def response_logprobs(policy: Table, responses: Tensor) -> Tensor:
    """Log-probability of each response after each prompt, padding left out.

    Args:
        policy: Action table of log-probabilities.
        responses: ``[N, MAX_TOKENS]`` long, ``PAD`` after the end.

    Returns:
        ``[prompt, N]``.
    """
    total = policy[0].new_zeros(NUM_PROMPTS, len(responses))
    state = torch.zeros(len(responses), dtype=torch.long)
    running = torch.ones(len(responses), dtype=torch.bool)
    for log_probs, token in zip(policy, responses.unbind(1), strict=True):
        taken = log_probs[:, state.where(running, 0), token]  # [prompt, N]
        total = total + taken.masked_fill(~running, 0.0)
        state = state * NUM_CONTENT + token - FIRST_CONTENT
        running = running & (token != EOS) & (token != PAD)
    return total


def visits(policy: Table) -> list[Tensor]:
    """State table of how often a response passes through the state, prompts equally likely."""
    reach = [policy[0].new_full((NUM_PROMPTS, 1), 1 / NUM_PROMPTS)]
    for log_probs in policy[: MAX_TOKENS - 1]:
        reach.append((reach[-1][..., None] * log_probs[..., FIRST_CONTENT:].exp()).flatten(1))
    return reach


def explained_variance(predicted: Table, exact: Table, *, weights: Table) -> float:
    """``1 - var(exact - predicted) / var(exact)`` over states, weighted by ``weights``."""
    flat = [torch.cat([x.flatten() for x in table]) for table in (predicted, exact, weights)]
    guess, truth, weight = flat[0], flat[1], flat[2] / flat[2].sum()

    def variance(x: Tensor) -> Tensor:
        return (weight * (x - (weight * x).sum()) ** 2).sum()

    return float(1 - variance(truth - guess) / variance(truth))
