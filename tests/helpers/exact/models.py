"""Tiny policies of the exactly solvable problem, and their supervised fine-tuning.

Padding is in the vocabulary, as for any model, but the problem has no such action. The
policies give it probability exactly 0 in float32, and training leaves it there: an output of
probability 0 has gradient 0.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from tests.helpers.exact.task import (
    EOS,
    MAX_PROMPT_TOKENS,
    MAX_TOKENS,
    NUM_CONTENT,
    PAD,
    VOCAB_SIZE,
    Task,
)

Family = Literal["phi", "gpt2"]

HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, NUM_POSITIONS = 64, 2, 2, 64
IGNORE = -100
SFT_ROWS = 128
SFT_LR = 3e-3
SFT_STEPS = 200


def fresh_policy(seed: int, family: Family) -> PreTrainedModel:
    """Draw an untrained policy that never emits padding; the global generator is left alone."""
    builders: dict[str, Callable[[], PreTrainedModel]] = {"phi": _phi, "gpt2": _gpt2}
    if family not in builders:
        raise ValueError(f"`family` must be one of {get_args(Family)}, got {family!r}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2000 + 18 * seed)
        model = builders[family]()
    return model.eval()


def _phi() -> PreTrainedModel:
    """Rotary positions, separate output bias: the bias keeps padding out."""
    config = PhiConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        partial_rotary_factor=0.5,
        max_position_embeddings=NUM_POSITIONS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attention_dropout=0.0,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = PhiForCausalLM(config)
    with torch.no_grad():
        model.lm_head.bias[PAD] = -1e4
    return model


def _gpt2() -> PreTrainedModel:
    """Learned positions, which show a position-id fault that rotary ones hide.

    GPT-2's output layer has no bias. So the last layer norm makes feature 0 the constant 8 (gain
    0, bias 8), and the row of padding in the untied output matrix reads that feature
    alone, with weight -125: a logit of -1,000 that lives in ordinary weights and therefore
    survives saving, loading and any trainer. Why 8: a layer norm's output has norm 8 here
    (the root of 64), so training would have to move the gain from 0 to about 1 before
    the sign could turn, while the other tokens may use the constant as a bias without one Adam
    step moving them further than it does through the 63 other features.
    """
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=HIDDEN_SIZE,
        n_layer=NUM_LAYERS,
        n_head=NUM_HEADS,
        n_inner=2 * HIDDEN_SIZE,
        n_positions=NUM_POSITIONS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = 0.0
        model.transformer.ln_f.bias[0] = 8.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[PAD] = 0.0
        model.lm_head.weight[PAD, 0] = -125.0
    return model


@torch.enable_grad()
def fine_tune(
    model: PreTrainedModel, task: Task, *, seed: int, steps: int, chain: int = 0
) -> PreTrainedModel:
    """Train ``model`` in place on strings of a random Markov chain, and return it.

    The result is a reference that is far from uniform, so KL to it means something.

    Args:
        model: The policy to train.
        task: Gives the prompts.
        seed: The problem's seed.
        steps: Adam steps of 128 strings.
        chain: Another number draws another chain: training the reference on it leads away.
    """
    chain_seed = 3000 + seed + 7 * chain
    transition = _draw_transition(chain_seed)
    generator = torch.Generator().manual_seed(chain_seed)
    optimizer = torch.optim.Adam(model.parameters(), SFT_LR)
    for _ in range(steps):
        inputs, labels = _sft_batch(task, transition, generator)
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(
            logits.view(-1, VOCAB_SIZE), labels.view(-1), ignore_index=IGNORE
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return model


def _draw_transition(chain_seed: int) -> Tensor:
    """Rows of a Dirichlet(0.7): the next content token after each token. ``[V, 6]``."""
    gamma = torch.distributions.Gamma(torch.full((VOCAB_SIZE, NUM_CONTENT), 0.7), torch.ones(1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(chain_seed)
        weights = gamma.sample()
    return weights / weights.sum(-1, keepdim=True)


def _sft_batch(task: Task, transition: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompt and response, right-padded, with next-token labels on the response only."""
    picked = torch.randint(len(task.prompts), (SFT_ROWS,), generator=generator)
    padded, lengths = padded_prompts(task)
    prompt_ids, prompt_lengths = padded[picked], lengths[picked]
    last = prompt_ids.gather(1, prompt_lengths[:, None] - 1).squeeze(1)
    response, valid = _sample_chain(last, transition, generator)

    inputs = torch.nn.functional.pad(prompt_ids, (0, MAX_TOKENS), value=PAD)
    labels = torch.full_like(inputs, IGNORE)
    columns = prompt_lengths[:, None] + torch.arange(MAX_TOKENS)
    inputs.scatter_(1, columns, response.masked_fill(~valid, PAD))
    labels.scatter_(1, columns - 1, response.masked_fill(~valid, IGNORE))
    return inputs, labels


def _sample_chain(
    previous: Tensor, transition: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Walk the chain: ``(tokens, valid)``, both ``[B, MAX_TOKENS]``.

    Ended rows walk on unseen, so the number of draws does not depend on what was drawn.
    """
    hazard = torch.linspace(0.1, 0.45, MAX_TOKENS)
    columns = []
    for depth in range(MAX_TOKENS):
        content = torch.multinomial(transition[previous], 1, generator=generator).squeeze(1) + 2
        ends = torch.rand(len(previous), generator=generator) < hazard[depth]
        previous = content.masked_fill(ends, EOS)
        columns.append(previous)
    tokens = torch.stack(columns, 1)
    ended = tokens == EOS
    return tokens, ended.cumsum(1) - ended.long() == 0


def padded_prompts(task: Task) -> tuple[Tensor, Tensor]:
    """Right-padded prompts ``[prompt, MAX_PROMPT_TOKENS]`` and their lengths ``[prompt]``."""
    lengths = torch.tensor([len(prompt) for prompt in task.prompts])
    ids = torch.full((len(task.prompts), MAX_PROMPT_TOKENS), PAD)
    for row, prompt in zip(ids, task.prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return ids, lengths
