"""``ppo-lightning sample``: answers of a checkpoint or a model, beside the reference's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ppo_lightning.cli.arguments import Arguments
from ppo_lightning.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from ppo_lightning.configs import PolicyConfig, SamplingConfig
    from ppo_lightning.data import PromptSource
    from ppo_lightning.types import PromptBatch

_CHAT: dict[str, Literal["auto"] | bool] = {"auto": "auto", "true": True, "false": False}


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    options = Arguments(
        prog="ppo-lightning sample",
        description="Answer prompts with the actor of a checkpoint, or with any causal language "
        "model. Without settings of its own it samples as the run did.",
    )
    options.add_argument("model", help="checkpoint (.ckpt), folder, hub name or package:NAME")
    options.add_argument("--prompt", action="append", default=[], help="may be given several times")
    options.add_argument("--prompts", help="file of prompts: .jsonl, or .txt with one a line")
    options.add_argument(
        "--reference",
        nargs="?",
        const="",
        metavar="MODEL",
        help="answer with the checkpoint's reference as well, or with the model given",
    )
    options.add_argument("--greedy", action="store_true", help="take the likeliest tokens")
    options.add_argument("--max-new-tokens", type=int)
    options.add_argument("--temperature", type=float)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--batch-size", type=int, default=16, help="prompts answered at once")
    options.add_argument("--chat", choices=list(_CHAT), help="as in the data; else as in the run")
    options.add_argument(
        "--system-prompt", help='first turn of every chat without one; else the run\'s; "" for none'
    )
    options.add_argument("--device", help="cpu or cuda; by default a GPU if there is one")
    options.add_argument("--json", action="store_true", help="print a JSON object a prompt")
    options.add_argument("--policy-path", help="where a checkpoint's starting model lies now")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command; see ``parser`` for its options."""
    given = parser().parse_args(arguments)
    source = _source(given)
    _device(given)  # before models are loaded
    speakers, manner = _speakers(given)
    texts = {speaker.name: list(_answers(speaker, source, manner, given)) for speaker in speakers}
    for row in zip(*texts.values(), strict=True):
        answers = dict(zip(texts, (answer for _, answer in row), strict=True))
        _print(row[0][0], answers, as_json=given.json)
    return 0


@dataclass(frozen=True)
class _Speaker:
    """A model that answers, and the tokenizer it reads with."""

    name: str
    model: AbstractContextManager[nn.Module]
    tokenizer: Any
    policy: PolicyConfig


@dataclass(frozen=True)
class _Manner:
    """How prompts are put, and how the responses are sampled."""

    sampling: SamplingConfig
    chat: Literal["auto"] | bool = "auto"
    system_prompt: str | None = None


def _source(given: argparse.Namespace) -> PromptSource:
    from ppo_lightning.data import as_source

    if bool(given.prompt) == bool(given.prompts):
        raise ConfigError("give either `--prompt TEXT` or `--prompts FILE`.")
    return as_source(given.prompts or given.prompt)


def _speakers(given: argparse.Namespace) -> tuple[list[_Speaker], _Manner]:
    """Load who answers, and tell how."""
    from ppo_lightning.configs import SamplingConfig

    if _is_checkpoint(given.model):
        speakers, manner = _from_checkpoint(given)
    else:
        speakers, manner = [_from_model("policy", given.model, given)], _Manner(SamplingConfig())
        if given.reference == "":
            raise ConfigError(
                f"`{given.model}` is no checkpoint, so it names no reference: give one, as "
                "`--reference MODEL`."
            )
    if given.reference:
        speakers.append(_from_model("reference", given.reference, given))
    return speakers, _as_wished(manner, given)


def _is_checkpoint(model: str) -> bool:
    """Whether a checkpoint is meant: one that is not there is no hub name either."""
    return model.endswith(".ckpt") or (Path(model).is_file() and not model.endswith(".gguf"))


def _as_wished(manner: _Manner, given: argparse.Namespace) -> _Manner:
    """Change what the options say otherwise."""
    if given.temperature is not None and not given.temperature > 0:
        raise ConfigError(
            f"`--temperature` must be above 0, got {given.temperature:g}: `--greedy` takes the "
            "likeliest tokens."
        )
    sampling = manner.sampling
    wishes = {"max_new_tokens": given.max_new_tokens, "temperature": given.temperature}
    wishes = {name: value for name, value in wishes.items() if value is not None}
    wishes["min_new_tokens"] = min(
        sampling.min_new_tokens, wishes.get("max_new_tokens", sampling.max_new_tokens)
    )
    system = manner.system_prompt if given.system_prompt is None else given.system_prompt or None
    return _Manner(
        sampling=replace(sampling, batch_size=given.batch_size, **wishes),
        chat=manner.chat if given.chat is None else _CHAT[given.chat],
        system_prompt=system,
    )


def _from_checkpoint(given: argparse.Namespace) -> tuple[list[_Speaker], _Manner]:
    from ppo_lightning.checkpointing import load_actor, read_models
    from ppo_lightning.models import ReferencePolicy, load_tokenizer

    models = read_models(given.model, policy_path=given.policy_path)
    tokenizer = load_tokenizer(
        models.policy.path, trust_remote_code=models.policy.trust_remote_code
    )
    actor = load_actor(models).to(_device(given))
    speakers = [_Speaker("policy", nullcontext(actor), tokenizer, models.policy)]
    if given.reference == "":
        settings = replace(models.reference, device="auto")
        reference = ReferencePolicy.build(settings, models.policy, actor)
        model = reference.to(_device(given)).causal_lm()
        speakers.append(_Speaker("reference", model, tokenizer, models.policy))
    return speakers, _Manner(models.sampling, models.chat, models.system_prompt)


def _from_model(name: str, path: str, given: argparse.Namespace) -> _Speaker:
    from ppo_lightning.configs import PolicyConfig
    from ppo_lightning.models import load_causal_lm, load_tokenizer

    policy = PolicyConfig(path=path)
    model = load_causal_lm(policy).to(_device(given))  # type: ignore[arg-type]
    return _Speaker(name, nullcontext(model), load_tokenizer(path), policy)


def _answers(
    speaker: _Speaker, source: PromptSource, manner: _Manner, given: argparse.Namespace
) -> Iterator[tuple[str, str]]:
    """Yield (prompt, answer); a prompt's random numbers are the same for every speaker."""
    from ppo_lightning.rollout import NativeEngine, StopRules, completions_of

    tokenizer, sampling = speaker.tokenizer, manner.sampling
    batch = _batch(speaker, source, manner, given)
    with speaker.model as model:
        stops, engine = StopRules.build(tokenizer, model, sampling), NativeEngine()
        engine.check(model)
        rollout = engine.generate(
            model,
            batch.to(_device(given)),
            sampling=sampling,
            stops=stops,
            policy_version=0,
            greedy=given.greedy,
        )
    completions = completions_of(rollout, tokenizer)
    yield from zip(completions.prompts, completions.responses, strict=True)


def _batch(
    speaker: _Speaker, source: PromptSource, manner: _Manner, given: argparse.Namespace
) -> PromptBatch:
    import torch

    from ppo_lightning.data import PromptSet, make_prompt_batch
    from ppo_lightning.functional import combine_keys
    from ppo_lightning.models import position_limit

    limit, room = position_limit(speaker.policy), manner.sampling.max_new_tokens
    if limit is not None and room >= limit:
        raise ConfigError(
            f"`--max-new-tokens` must be below {limit}, the positions of `{speaker.policy.path}`, "
            f"to leave room for a prompt; got {room}."
        )
    prompts = PromptSet.build(
        source,
        speaker.tokenizer,
        chat=manner.chat,
        system_prompt=manner.system_prompt,
        max_prompt_tokens=None if limit is None else limit - room,
    )
    numbers = torch.arange(len(prompts))
    return make_prompt_batch(
        prompts,
        numbers.tolist(),
        keys=combine_keys(given.seed, numbers),
        indices=numbers,
        groups=numbers,
        pad_id=speaker.tokenizer.pad_token_id,
    )


def _device(given: argparse.Namespace) -> str:
    import torch

    if not given.device:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=given.device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has one for each
        problem = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"`--device {given.device}` cannot be used ({problem}). Give `cpu`, or `cuda` where "
            "there is a GPU."
        ) from error
    return str(given.device)


def _print(prompt: str, answers: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"prompt": prompt, **answers}, ensure_ascii=False))
        return
    print(f"prompt: {prompt}")
    for name, answer in answers.items():
        print(f"{name}: {answer}")
    print()
