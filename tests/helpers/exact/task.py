"""Prompts, responses and reward of the exactly solvable problem.

The vocabulary has eight tokens: padding, end of sequence, and six content tokens. A response is
at most four tokens, the end token included, so all 1,555 of them can be listed. A response
that never ends is legal, and pays a penalty.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PAD, EOS = 0, 1
FIRST_CONTENT = 2
NUM_CONTENT = 6
VOCAB_SIZE = FIRST_CONTENT + NUM_CONTENT
MAX_TOKENS = 4
NUM_PROMPTS = 4
MAX_PROMPT_TOKENS = 3

MISSING_EOS_PENALTY = 1.0
NEEDLE_BONUS = 2.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Prompts and the weights of the reward.

    The reward couples distant positions, so neither a per-token nor a next-token learner can
    solve the task: the policy needs credit for what comes later.

    Args:
        prompts: Content tokens; lengths 1, 2, 3, 1, so that batches need left padding.
        position: Worth of a token at a position. ``[prompt, MAX_TOKENS, VOCAB_SIZE]``.
        pair: Worth of two neighbours. ``[VOCAB_SIZE, VOCAB_SIZE]``.
        skip: Worth of two tokens, one apart. ``[prompt, VOCAB_SIZE, VOCAB_SIZE]``.
        length: Worth of a number of content tokens. ``[MAX_TOKENS + 1]``.
        needle: The opening two tokens that earn a bonus together. ``[prompt, 2]`` long.
    """

    prompts: tuple[tuple[int, ...], ...]
    position: Tensor
    pair: Tensor
    skip: Tensor
    length: Tensor
    needle: Tensor

    def raw_reward(self, prompt_index: Tensor, responses: Tensor) -> Tensor:
        """Reward before it is brought to mean 0 and spread 1.

        Args:
            prompt_index: Which prompt each row answers. ``[B]`` long.
            responses: Token ids, ``PAD`` after the end. ``[B, MAX_TOKENS]`` long.

        Returns:
            ``[B]`` float32.
        """
        row = prompt_index[:, None]
        tokens = self.position[row, torch.arange(MAX_TOKENS), responses].sum(1)
        neighbours = self.pair[responses[:, :-1], responses[:, 1:]].sum(1)
        skips = self.skip[row, responses[:, :-2], responses[:, 2:]].sum(1)
        length = self.length[(responses >= FIRST_CONTENT).sum(1)]
        unended = (responses != EOS).all(1)
        found = (responses[:, :2] == self.needle[prompt_index]).all(1)
        worth = tokens + neighbours + skips + length
        return worth - MISSING_EOS_PENALTY * unended + NEEDLE_BONUS * found


def draw_task(seed: int) -> Task:
    """Draw the task of a seed; the order of the draws is part of its definition."""
    generator = torch.Generator().manual_seed(1000 + seed)
    prompts = _draw_prompts(generator)

    def normal(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    position = normal(NUM_PROMPTS, MAX_TOKENS, VOCAB_SIZE, scale=0.5)
    pair = normal(VOCAB_SIZE, VOCAB_SIZE, scale=0.6)
    skip = normal(NUM_PROMPTS, VOCAB_SIZE, VOCAB_SIZE, scale=0.5)
    length = normal(MAX_TOKENS + 1, scale=0.5)
    needle = torch.randint(FIRST_CONTENT, VOCAB_SIZE, (NUM_PROMPTS, 2), generator=generator)
    # Padding earns nothing, whatever it stands beside.
    for weights in (position, pair, skip):
        weights[..., PAD] = 0.0
    pair[PAD] = 0.0
    return Task(
        prompts=prompts, position=position, pair=pair, skip=skip, length=length, needle=needle
    )


def _draw_prompts(generator: torch.Generator) -> tuple[tuple[int, ...], ...]:
    prompts: list[tuple[int, ...]] = []
    while len(prompts) < NUM_PROMPTS:
        shape = (1 + len(prompts) % MAX_PROMPT_TOKENS,)
        ids = torch.randint(FIRST_CONTENT, VOCAB_SIZE, shape, generator=generator).tolist()
        if tuple(ids) not in prompts:
            prompts.append(tuple(ids))
    return tuple(prompts)


def content_strings(length: int) -> Tensor:
    """All strings of ``length`` content tokens in lexicographic order, ``[6**length, length]``.

    Row ``i`` of ``content_strings(t)`` is state ``i`` at depth ``t`` wherever this problem speaks
    of states.
    """
    count = NUM_CONTENT**length
    place_values = NUM_CONTENT ** torch.arange(length - 1, -1, -1)
    return FIRST_CONTENT + torch.arange(count)[:, None] // place_values % NUM_CONTENT


def ended_responses(num_content: int) -> Tensor:
    """Responses of ``num_content`` content tokens and an end token, padded to full width."""
    content = content_strings(num_content)
    responses = content.new_full((len(content), MAX_TOKENS), PAD)
    responses[:, :num_content] = content
    responses[:, num_content] = EOS
    return responses


def all_responses() -> Tensor:
    """Every possible response, ``[1555, MAX_TOKENS]`` long: the ended ones, then the truncated."""
    ended = [ended_responses(length) for length in range(MAX_TOKENS)]
    return torch.cat([*ended, content_strings(MAX_TOKENS)])
