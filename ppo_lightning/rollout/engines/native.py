"""The native decode loop: plain, with random numbers that belong to the response.

Every draw uses one uniform number made from (key of the response, position), so a response does
not depend on its neighbours, on the batch it sits in, or on the number of ranks, and there is no
generator state to save.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ppo_lightning.configs import DType, SamplingConfig
from ppo_lightning.distributed import pulse
from ppo_lightning.functional import autocast_off, hash_uniform, position_ids
from ppo_lightning.models import base_causal_lm, check_decoding, decode_step, reading_of
from ppo_lightning.rollout.engines.base import (
    BatchedEngine,
    Decoded,
    StopRules,
    inference_mode_of,
    joined,
)
from ppo_lightning.rollout.engines.draw import draw_tokens
from ppo_lightning.rollout.engines.slots import SlotDecoder
from ppo_lightning.rollout.engines.stop_text import TextStops
from ppo_lightning.types import PromptBatch, Rollout


class NativeEngine(BatchedEngine):
    """Decode with a key-value cache.

    Models whose rows may be packed are decoded in slots (``SlotDecoder``): without padding, and a
    response that has ended makes room for the next prompt. Others keep the cache of their family,
    with all rows of a batch in step.

    Args:
        dtype: Sample in it, from a copy of the weights that is made for each rollout where they are
            of another, and takes their room in it; the trainer's own log-probabilities are the old
            ones in any case. None computes as the trainer does (``trainer.precision``), but for
            autocast on a CPU, which makes single tokens slower there: that samples in the dtype of
            the weights.
        cuda_graphs: On a GPU, replay the steps of slots as CUDA graphs. Models whose steps cannot
            be recorded, or that hooks take part in (sharding, offloading), are run step by step in
            any case.
    """

    def __init__(self, dtype: DType | None = None, cuda_graphs: bool = True) -> None:
        self.dtype = None if dtype is None else getattr(torch, dtype)
        self.cuda_graphs = cuda_graphs

    @override
    def check(self, model: nn.Module) -> None:
        """Try whether decoding with the cache says what a pass over everything says."""
        with inference_mode_of(model):
            check_decoding(model)

    @override
    def generate(
        self,
        model: nn.Module,
        prompts: PromptBatch,
        *,
        sampling: SamplingConfig,
        stops: StopRules,
        policy_version: int,
        greedy: bool = False,
    ) -> Rollout:
        base = base_causal_lm(model)
        if self.dtype is not None and len(prompts) and self.dtype != base.dtype:
            base = model = _copy_in(self.dtype, base)
        width = prompts.prompt_ids.shape[1] + sampling.max_new_tokens
        if len(prompts) == 0 or not reading_of(base).takes_slots(width):
            with self._arithmetic(prompts):
                return super().generate(
                    model,
                    prompts,
                    sampling=sampling,
                    stops=stops,
                    policy_version=policy_version,
                    greedy=greedy,
                )
        with inference_mode_of(model), self._arithmetic(prompts):
            decoder = SlotDecoder(
                base,
                prompts,
                sampling=sampling,
                stops=stops,
                greedy=greedy,
                cuda_graphs=self.cuda_graphs,
            )
            return joined(
                prompts,
                [decoder.run()],
                stops.pad_id,
                policy_version=policy_version,
                temperature=sampling.temperature,
            )

    def _arithmetic(self, prompts: PromptBatch) -> AbstractContextManager[Any]:
        """Turn autocast off where the weights' own dtype is to be used."""
        device = prompts.prompt_ids.device.type
        if self.dtype is None and device != "cpu":
            return nullcontext()
        return autocast_off(device)

    @override
    def decode_batch(
        self,
        model: nn.Module,
        prompts: PromptBatch,
        *,
        sampling: SamplingConfig,
        stops: StopRules,
        greedy: bool,
    ) -> Decoded:
        """Go on until every row has ended or the budget is used."""
        rows, width = prompts.prompt_ids.shape
        device = prompts.prompt_ids.device
        total = width + sampling.max_new_tokens
        mask = torch.ones(rows, total, dtype=torch.bool, device=device)
        mask[:, :width] = prompts.prompt_mask
        places = position_ids(mask)
        out = Decoded.empty(rows, sampling.max_new_tokens, stops.pad_id, device)
        end_ids = torch.tensor(stops.end_ids, dtype=torch.long, device=device)
        texts = TextStops.build(sampling, stops)
        step_ids, start, cache = prompts.prompt_ids, 0, None
        for t in range(sampling.max_new_tokens):
            pulse.beat()
            end = width + t
            logits, cache = decode_step(model, step_ids, mask[:, :end], places[:, start:end], cache)
            uniforms = None if greedy else hash_uniform(prompts.keys, t)
            banned = stops.end_ids if t < sampling.min_new_tokens else ()
            ids, logprobs = draw_tokens(logits, uniforms, sampling=sampling, banned_ids=banned)
            _record(out, t, ids, logprobs, end_ids, texts)
            if bool(out.ended.all()):
                break
            step_ids, start = ids[:, None], end
        return out


def _copy_in(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    """Copy a model with its weights in another dtype; buffers (rotary frequencies) stay exact."""
    weights = {
        id(weight): nn.Parameter(weight.detach().to(dtype), requires_grad=False)
        if weight.is_floating_point()
        else weight  # in few bits, and frozen
        for weight in model.parameters()
    }
    return copy.deepcopy(model, weights)


def _record(
    out: Decoded,
    t: int,
    ids: Tensor,
    logprobs: Tensor,
    end_ids: Tensor,
    texts: TextStops | None,
) -> None:
    """Append the drawn tokens to the rows that are still going."""
    going = ~out.ended
    out.ids[:, t] = ids.where(going, out.ids[:, t])
    out.logprobs[:, t] = logprobs.where(going, out.logprobs[:, t])
    out.lengths += going
    out.ended |= going & torch.isin(ids, end_ids)
    if texts is not None:
        rows = (~out.ended).nonzero()[:, 0]
        out.ended[rows] = texts.ended(rows, out)
