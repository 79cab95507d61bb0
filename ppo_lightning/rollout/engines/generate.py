"""Hugging Face ``generate`` as an engine: the reference that the native loop is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteriaList
from typing_extensions import override

from ppo_lightning.configs import SamplingConfig
from ppo_lightning.distributed import pulse
from ppo_lightning.functional import mask_from_lengths, token_logprobs
from ppo_lightning.rollout.engines.base import BatchedEngine, Decoded, StopRules
from ppo_lightning.types import PromptBatch


class GenerateEngine(BatchedEngine):
    """Sample with transformers' ``generate``.

    Its random numbers come from one seeded generator for the whole batch, so a response depends
    on the batch it sits in: runs on different numbers of ranks sample different responses.
    """

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
        generator: Any = model.generate
        fork = torch.random.fork_rng(devices=_cuda_devices(prompts.prompt_ids))
        with fork, _own_settings_aside(model):
            torch.manual_seed(int(prompts.keys[0]) & (2**63 - 1))
            output = generator(
                input_ids=prompts.prompt_ids,
                attention_mask=prompts.prompt_mask.long(),
                generation_config=_settings(sampling, stops, greedy),
                tokenizer=stops.decoder,
                stopping_criteria=StoppingCriteriaList([_beat]),
            )
        ids = output.sequences[:, prompts.prompt_ids.shape[1] :]
        logits = torch.stack(output.logits, dim=1)
        logprobs = token_logprobs(logits, ids, temperature=sampling.temperature)
        lengths, ended = _lengths(ids, sampling, stops)
        unused = ~mask_from_lengths(lengths, ids.shape[1])
        logprobs = logprobs.masked_fill(unused, 0)
        return Decoded(ids=ids, logprobs=logprobs, lengths=lengths, ended=ended)


def _beat(ids: Tensor, scores: Any, **options: Any) -> Tensor:
    """Note each token as progress; it stops no row. Returns ``[B]`` bool."""
    pulse.beat()
    return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def _settings(sampling: SamplingConfig, stops: StopRules, greedy: bool) -> GenerationConfig:
    """Every setting that shapes the distribution is given: none comes from the model's folder."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens or None,
        do_sample=not greedy,
        temperature=1.0 if greedy else sampling.temperature,
        top_k=0 if greedy else sampling.top_k,
        top_p=1.0 if greedy else sampling.top_p,
        repetition_penalty=1.0,
        num_beams=1,
        eos_token_id=list(stops.end_ids) or None,
        pad_token_id=stops.pad_id,
        stop_strings=list(sampling.stop_strings) or None,
        output_logits=True,
        return_dict_in_generate=True,
    )


@contextmanager
def _own_settings_aside(model: nn.Module) -> Iterator[None]:
    """Hide the folder's generation settings: ``generate`` fills what is left open from them."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    kept = base.generation_config
    base.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        base.generation_config = kept


def _cuda_devices(ids: Tensor) -> list[int]:
    return [ids.device.index] if ids.device.type == "cuda" else []


def _lengths(ids: Tensor, sampling: SamplingConfig, stops: StopRules) -> tuple[Tensor, Tensor]:
    """Replay the stopping rules: ``generate`` pads finished rows but records no lengths."""
    ends = torch.isin(ids, torch.tensor(stops.end_ids, device=ids.device, dtype=torch.long))
    lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, ids.shape[1])
    ended = ends.any(1)
    if sampling.stop_strings and stops.decoder is not None:
        for row in range(len(ids)):
            for n in range(1, int(lengths[row]) + 1):
                text = stops.decoder.decode(ids[row, :n].tolist(), skip_special_tokens=True)
                if any(stop in text for stop in sampling.stop_strings):
                    lengths[row], ended[row] = n, True
                    break
    return lengths, ended
