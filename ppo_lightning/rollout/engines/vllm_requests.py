"""Requests to a vLLM and its answers, in the terms of the other engines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.configs import SamplingConfig
from ppo_lightning.errors import ConfigError, RolloutError
from ppo_lightning.rollout.engines.base import Decoded, StopRules
from ppo_lightning.types import PromptBatch

TEMPERATURES = (0.01, 2.0)
"""Between which vLLM samples."""

_MAX_SEED = (1 << 63) - 1  # also keeps clear of -1, which is no seed to vLLM


def logprobs_mode(sampling: SamplingConfig) -> str:
    """Choose which log-probabilities vLLM is to return.

    Wanted are those at the sampling temperature before any token is ruled out. ``raw_logprobs``
    are of the model's logits, before the temperature; ``processed_logprobs`` come after it, and
    after the tokens that top-k, top-p or a least length rule out. The choice does not depend on
    the temperature, which may change while one vLLM runs.

    Raises:
        ConfigError: Neither is what is wanted, or vLLM knows no such temperature.
    """
    if not TEMPERATURES[0] <= sampling.temperature <= TEMPERATURES[1]:
        raise ConfigError(
            f"`sampling.temperature`: vLLM samples at {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}, "
            f"got {sampling.temperature}."
        )
    if not rules_tokens_out(sampling):
        return "processed_logprobs"
    if sampling.temperature != 1.0:
        raise ConfigError(
            f"`sampling.temperature` {sampling.temperature} with `top_k`, `top_p` or "
            "`min_new_tokens`: vLLM returns log-probabilities either before the temperature or "
            "after tokens are ruled out. Leave these out, or the temperature at 1."
        )
    return "raw_logprobs"


def rules_tokens_out(sampling: SamplingConfig) -> bool:
    """Whether some tokens may not be drawn: by top-k, top-p or a least length."""
    return bool(sampling.top_k or sampling.top_p < 1 or sampling.min_new_tokens)


def token_prompts(prompts: PromptBatch) -> list[dict[str, list[int]]]:
    """Return prompts as token ids, without padding."""
    rows = zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
    return [{"prompt_token_ids": ids[mask].tolist()} for ids, mask in rows]


def sampling_params(
    kind: Any,
    keys: Tensor,
    *,
    sampling: SamplingConfig,
    stops: StopRules,
    greedy: bool,
    watched: bool,
) -> list[Any]:
    """Say how each response is sampled; nothing is left to the model's folder.

    Args:
        kind: ``vllm.SamplingParams``.
        keys: Random-number key of each response. ``[B]`` long.
        sampling: Settings.
        stops: End tokens.
        greedy: Take the likeliest token.
        watched: vLLM has a tokenizer and looks for the stop strings itself.
    """
    options = {
        "n": 1,
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop_strings) if watched else [],
        "stop_token_ids": list(stops.end_ids),
        "ignore_eos": True,  # the end tokens are those above
        "logprobs": 0,  # of the sampled token alone
        "detokenize": watched,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
    }
    seeds = [None if greedy else key & _MAX_SEED for key in keys.tolist()]
    return [kind(seed=seed, **options) for seed in seeds]


def decoded(
    outputs: Sequence[Any],
    prompts: PromptBatch,
    *,
    sampling: SamplingConfig,
    stops: StopRules,
) -> Decoded:
    """Read vLLM's answers: ids and log-probabilities as they are, cut where a stop string ends.

    Args:
        outputs: A ``RequestOutput`` for each prompt, in their order.
        prompts: What was asked.
        sampling: Stop strings and most tokens.
        stops: Tokenizer and padding.

    Raises:
        RolloutError: An answer is missing, or was not ended by a token, a text or the budget.
        ConfigError: An answer ended where vLLM had no room for more.
    """
    if len(outputs) != len(prompts):
        raise RolloutError(f"vLLM gave {len(outputs)} answers to {len(prompts)} prompts.")
    device = prompts.prompt_ids.device
    answers = [output.outputs[0] for output in outputs]
    out = Decoded.empty(len(answers), sampling.max_new_tokens, stops.pad_id, device)
    for row, answer in enumerate(answers):
        ids, ended = _answer(answer, sampling, stops)
        logprobs = [position[id_].logprob for id_, position in _pairs(ids, answer)]
        out.ids[row, : len(ids)] = torch.tensor(ids, device=device)
        out.logprobs[row, : len(ids)] = torch.tensor(logprobs, device=device)
        out.lengths[row], out.ended[row] = len(ids), ended
    return out


def _answer(answer: Any, sampling: SamplingConfig, stops: StopRules) -> tuple[list[int], bool]:
    """Ids that are kept, and whether they ended by themselves."""
    ids, reason = list(answer.token_ids), answer.finish_reason
    if reason not in ("stop", "length") or not ids:
        raise RolloutError(
            f"vLLM ended a response after {len(ids)} tokens with `{reason}`, neither at an end "
            "token nor at `max_new_tokens`. Its own log says why."
        )
    length = _stopped_at(ids, sampling, stops)
    if length is not None:
        return ids[:length], True
    if reason == "length" and len(ids) < sampling.max_new_tokens:
        raise ConfigError(
            f"vLLM had no room for more than {len(ids)} response tokens, and "
            f"`sampling.max_new_tokens` is {sampling.max_new_tokens}: raise the engine's "
            "`max_model_len`, or take shorter prompts."
        )
    return ids, reason == "stop"


def _stopped_at(ids: list[int], sampling: SamplingConfig, stops: StopRules) -> int | None:
    """Tokens up to the first with which the text contains a stop string, or None.

    vLLM looks at the text as it grows and not before the least length, so its end is not always
    that of the other engines.
    """
    if not sampling.stop_strings:
        return None
    if stops.decoder is None:
        raise ValueError("`stop_strings` needs a tokenizer to look for them.")
    decode = stops.decoder.decode

    def contains(length: int) -> bool:
        text = decode(ids[:length], skip_special_tokens=True)
        return any(stop in text for stop in sampling.stop_strings)

    if not contains(len(ids)):
        return None
    return bisect_left(range(len(ids)), True, key=contains)


def _pairs(ids: list[int], answer: Any) -> list[tuple[int, Any]]:
    found = answer.logprobs or []
    if len(found) < len(ids):
        raise RolloutError(
            f"vLLM gave log-probabilities of {len(found)} tokens for a response of {len(ids)}."
        )
    return list(zip(ids, found, strict=False))
