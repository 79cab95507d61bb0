"""The native decode loop: plain, with random numbers that belong to the response.

Every draw uses one uniform number made from (key of the response, position), so a response does
not depend on its neighbours, on the batch it sits in, or on the number of ranks, and there is no
generator state to save.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from ppo_lightning.configs import SamplingConfig
from ppo_lightning.functional import hash_uniform, position_ids
from ppo_lightning.models import check_decoding, decode_step
from ppo_lightning.rollout.engines.base import BatchedEngine, Decoded, StopRules, inference_mode_of
from ppo_lightning.rollout.engines.draw import draw_tokens
from ppo_lightning.types import PromptBatch


class NativeEngine(BatchedEngine):
    """Decode with the model's own key-value cache, all rows in step."""

    @override
    def check(self, model: nn.Module) -> None:
        """Try whether decoding with the cache says what a pass over everything says."""
        with inference_mode_of(model):
            check_decoding(model)

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
        out = _empty(rows, sampling.max_new_tokens, stops.pad_id, device)
        end_ids = torch.tensor(stops.end_ids, dtype=torch.long, device=device)
        step_ids, start, cache = prompts.prompt_ids, 0, None
        for t in range(sampling.max_new_tokens):
            end = width + t
            logits, cache = decode_step(model, step_ids, mask[:, :end], places[:, start:end], cache)
            uniforms = None if greedy else hash_uniform(prompts.keys, t)
            banned = stops.end_ids if t < sampling.min_new_tokens else ()
            ids, logprobs = draw_tokens(logits, uniforms, sampling=sampling, banned_ids=banned)
            _record(out, t, ids, logprobs, end_ids, sampling, stops)
            if bool(out.ended.all()):
                break
            step_ids, start = ids[:, None], end
        return out


def _empty(rows: int, width: int, pad_id: int, device: torch.device) -> Decoded:
    """Room for responses, all of length 0."""
    return Decoded(
        ids=torch.full((rows, width), pad_id, device=device),
        logprobs=torch.zeros(rows, width, device=device),
        lengths=torch.zeros(rows, dtype=torch.long, device=device),
        ended=torch.zeros(rows, dtype=torch.bool, device=device),
    )


def _record(
    out: Decoded,
    t: int,
    ids: Tensor,
    logprobs: Tensor,
    end_ids: Tensor,
    sampling: SamplingConfig,
    stops: StopRules,
) -> None:
    """Append the drawn tokens to the rows that are still going."""
    going = ~out.ended
    out.ids[:, t] = ids.where(going, out.ids[:, t])
    out.logprobs[:, t] = logprobs.where(going, out.logprobs[:, t])
    out.lengths += going
    out.ended |= going & torch.isin(ids, end_ids)
    if sampling.stop_strings:
        out.ended |= _has_stop_string(out, sampling, stops)


def _has_stop_string(out: Decoded, sampling: SamplingConfig, stops: StopRules) -> Tensor:
    """Which rows that are still going contain a stop string by now. ``[B]`` bool."""
    if stops.decoder is None:
        raise ValueError("`stop_strings` needs a tokenizer to look for them.")
    hit = torch.zeros_like(out.ended)
    for row in (~out.ended).nonzero()[:, 0].tolist():
        ids = out.ids[row, : int(out.lengths[row])].tolist()
        text = stops.decoder.decode(ids, skip_special_tokens=True)
        hit[row] = any(stop in text for stop in sampling.stop_strings)
    return hit
