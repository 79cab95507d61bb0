"""The passes of an iteration that take the most memory, made with tensors without contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn
from typing_extensions import override

from ppo_lightning.estimate.networks import Networks
from ppo_lightning.estimate.run import Device, Run
from ppo_lightning.estimate.tally import OTHER, ByteTally, claiming_gradients
from ppo_lightning.functional import output_layer
from ppo_lightning.models import (
    KeyValueSlots,
    base_causal_lm,
    decode_step,
    read_prompts,
    reading_of,
    sequence_logits,
    step_slots,
)
from ppo_lightning.modules.objective import Coefficients
from ppo_lightning.modules.optim import gradient_norm
from ppo_lightning.modules.passes import pass_plan
from ppo_lightning.modules.update import Objective, accumulate_gradients
from ppo_lightning.rollout.engines.base import inference_mode_of
from ppo_lightning.rollout.engines.draw import draw_tokens
from ppo_lightning.rollout.engines.slots import PROMPT_TOKENS
from ppo_lightning.rollout.experience import (
    SCORING_TOKENS,
    score_with_networks,
    with_frozen_states,
)
from ppo_lightning.rollout.minibatches import microbatch_rows
from ppo_lightning.types import Experience, Sequences


def sequences_of(run: Run, rows: int, *, together: int = 1) -> Sequences:
    """Make prompts and responses of the full length.

    Args:
        run: Says how long.
        rows: B.
        together: So many rows, one after the other, answer one prompt.
    """
    prompt, response = run.prompt_tokens, run.sampling.max_new_tokens
    ids = torch.zeros(rows, prompt, dtype=torch.long)
    ids[:, 0] = torch.arange(rows) // together
    return Sequences(
        prompt_ids=ids,
        prompt_mask=torch.ones(rows, prompt, dtype=torch.bool),
        response_ids=torch.zeros(rows, response, dtype=torch.long),
        response_mask=torch.ones(rows, response, dtype=torch.bool),
    )


def precision(run: Run) -> AbstractContextManager[None]:
    """Context of a forward pass, as Lightning's plugin for the precision makes it."""
    if run.mixed_dtype is None:
        return nullcontext()
    dtype = getattr(torch, run.mixed_dtype)
    return torch.autocast("cpu", dtype, cache_enabled=False)


@contextmanager
def chunks_of(device: Device) -> Iterator[None]:
    """Cut the logits of the output layer as it is done on a device, whatever the tensors say."""
    before = output_layer.CHUNK_BYTES
    if device != "cpu":
        output_layer.CHUNK_BYTES = output_layer.ACCELERATOR_CHUNK_BYTES
    try:
        yield
    finally:
        output_layer.CHUNK_BYTES = before


@torch.no_grad()
def sample(run: Run, networks: Networks, tally: ByteTally) -> None:
    """Read the prompts, and decode the last token of a response."""
    model = base_causal_lm(networks.trained.actor)
    rows = min(run.num_responses, run.sampling.batch_size or run.num_responses)
    width = run.prompt_tokens + run.sampling.max_new_tokens
    with inference_mode_of(networks.trained.actor), precision(run):
        if reading_of(model).takes_slots(width):
            _decode_in_slots(run, model, rows, tally)
        else:
            _decode_in_step(run, model, rows, tally)


class _Slots(KeyValueSlots):
    """Keys and values that are counted as such."""

    def __init__(self, count: int, width: int, tally: ByteTally) -> None:
        super().__init__(count, width)
        self._tally = tally

    @override
    def _room(self, like: Tensor) -> Tensor:
        made = super()._room(like)
        self._tally.claim([made], "KV cache")
        return made


def _decode_in_slots(run: Run, model: nn.Module, rows: int, tally: ByteTally) -> None:
    prompt, width = run.prompt_tokens, run.prompt_tokens + run.sampling.max_new_tokens
    group = run.buffer.responses_per_prompt
    memory, sequences = _Slots(rows, width, tally), sequences_of(run, rows)
    distinct = -(-rows // group)
    lengths = torch.full((rows,), width - 1)
    size, logits = max(1, PROMPT_TOKENS // prompt), []
    for part in torch.split(torch.arange(distinct), size):
        ids, mask = sequences.prompt_ids[part], sequences.prompt_mask[part]
        logits.append(read_prompts(model, ids, mask, memory, part))
    _draw(run, torch.cat(logits)[torch.arange(rows) // group])
    del logits
    _draw(run, step_slots(model, sequences.response_ids[:, 0], lengths, memory)[torch.arange(rows)])


def _decode_in_step(run: Run, model: nn.Module, rows: int, tally: ByteTally) -> None:
    sequences = sequences_of(run, rows)
    total = run.prompt_tokens + run.sampling.max_new_tokens - 1
    mask = torch.ones(rows, total, dtype=torch.bool)
    places = torch.arange(total).expand(rows, total)
    prompt = slice(0, run.prompt_tokens)
    logits, _ = decode_step(model, sequences.prompt_ids, mask[:, prompt], places[:, prompt], None)
    _draw(run, logits)
    del logits
    before, at_before = tally.peak, tally.at_peak
    ids = sequences.input_ids[:, : total - 1]
    _, cache = decode_step(model, ids, mask[:, :-1], places[:, :-1], None)
    # A cache of that width comes of single steps in truth, whose own peaks are lower.
    tally.peak, tally.at_peak = before, at_before
    tally.rename(OTHER, "KV cache")
    _draw(run, decode_step(model, ids[:, :1], mask, places[:, -1:], cache)[0])


def _draw(run: Run, logits: Tensor) -> None:
    draw_tokens(logits, torch.zeros(len(logits), dtype=torch.float64), sampling=run.sampling)


@torch.no_grad()
def judge(run: Run, networks: Networks, tally: ByteTally) -> None:
    """Score as many texts as each learned reward takes at once."""
    for model, network in networks.scorers:
        tokens = run.prompt_tokens + run.sampling.max_new_tokens
        tokens = min(tokens, model.max_length or tokens)
        rows = min(run.num_responses, model.batch_size)
        if model.batch_tokens is not None:
            rows = max(1, min(rows, model.batch_tokens // tokens))
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        sequence_logits(network, ids, torch.ones_like(ids))


def score(run: Run, networks: Networks, tally: ByteTally) -> None:
    """Ask actor, critic and reference about the largest microbatch of the rollout."""
    together = run.buffer.responses_per_prompt
    sequences = sequences_of(run, run.num_responses, together=together)
    packed = networks.trained.packs(sequences)
    limit = run.ppo.microbatch_tokens or SCORING_TOKENS
    rows = microbatch_rows(sequences, max_tokens=limit, packed=packed)[0]
    with precision(run):
        score_with_networks(
            _remembered(run, networks, tally, sequences.select(rows)),
            networks=networks.trained,
            reference=networks.reference,
            temperature=run.sampling.temperature,
            estimator=run.kl.estimator,
            max_tokens=run.ppo.microbatch_tokens,
            values=run.ppo.advantage == "gae",
            final_values=run.ppo.bootstrap_truncated,
        )


def update(run: Run, networks: Networks, tally: ByteTally) -> None:
    """Take an optimiser step of each kind that the run takes."""
    plan = pass_plan(run.ppo, epochs=1, train_actor=True)
    with precision(run):
        sequences = _remembered(run, networks, tally, _minibatch(run, networks))
    # Several ranks have one backward pass, whatever is set; here there is one.
    ppo = run.ppo if run.is_alone else replace(run.ppo, backward="together")
    objective = Objective(
        networks=networks.trained,
        reference=networks.reference,
        ppo=ppo,
        kl=run.kl,
    )
    for part in dict.fromkeys(plan):
        with claiming_gradients(tally, networks.trained), precision(run):
            accumulate_gradients(
                _experience(run, sequences),
                objective,
                _coefficients(run),
                backward=torch.autograd.backward,
                part=part,
            )
        if not run.strategy.cuts_states:  # a step on parts makes no whole tensors
            for group in networks.optimizer.param_groups:
                gradient_norm(group["params"])
            networks.optimizer.step()
        networks.optimizer.zero_grad()


def _remembered(run: Run, networks: Networks, tally: ByteTally, sequences: Sequences) -> Sequences:
    """Add what frozen blocks make of some sequences, in the room of the whole buffer's."""
    known = with_frozen_states(sequences, networks.trained, max_tokens=run.ppo.microbatch_tokens)
    if known.trunk is None:
        return sequences
    prompts = run.num_responses
    if networks.trained.packs(sequences):
        prompts = -(-prompts // run.buffer.responses_per_prompt)
    tokens = prompts * run.prompt_tokens + run.num_responses * run.sampling.max_new_tokens
    own = known.trunk.states
    states = own.new_zeros(max(tokens + 1, len(own)), own.shape[-1])  # and a row of 0
    tally.claim([states], "frozen trunk")
    return replace(known, trunk=replace(known.trunk, states=states))


def _minibatch(run: Run, networks: Networks) -> Sequences:
    """The first two microbatches of a minibatch: the second meets the gradients of the first."""
    whole = run.buffer.num_minibatches == 1
    together = run.buffer.responses_per_prompt if whole else run.buffer.together
    sequences = sequences_of(run, run.minibatch_rows, together=together)
    packed = networks.trained.packs(sequences)
    groups = microbatch_rows(sequences, max_tokens=run.ppo.microbatch_tokens, packed=packed)
    return sequences.select(torch.cat(list(islice(groups, 2))))


def _experience(run: Run, sequences: Sequences) -> Experience:
    column = torch.zeros(sequences.response_mask.shape)
    return Experience(
        sequences=sequences,
        old_logprobs=column,
        old_values=column,
        ref_logprobs=column,
        advantages=column,
        returns=column,
        indices=torch.arange(len(sequences)),
        num_responses=run.num_responses,
        iteration=0,
        policy_version=0,
        temperature=run.sampling.temperature,
    )


def _coefficients(run: Run) -> Coefficients:
    return Coefficients(
        clip_low=run.ppo.clip_range,
        clip_high=run.ppo.clip_range_high or run.ppo.clip_range,
        ent_coef=run.ppo.ent_coef,
        kl_coef=run.kl.coef,
        penalty_coef=run.ppo.penalty_coef,
    )
