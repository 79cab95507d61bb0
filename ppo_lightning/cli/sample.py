"""``ppo-lightning sample``: answers of a checkpoint or a model, beside the reference's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_lightning.cli.arguments import Arguments
from ppo_lightning.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from ppo_lightning.configs import PolicyConfig, SamplingConfig
    from ppo_lightning.data import PromptSource
    from ppo_lightning.types import PromptBatch

_CHAT = {"auto": "auto", "true": True, "false": False}


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
    options.add_argument("--chat", choices=list(_CHAT), default="auto", help="as in the data's")
    options.add_argument("--system-prompt", help="first turn of every chat without one")
    options.add_argument("--device", help="cpu or cuda; by default a GPU if there is one")
    options.add_argument("--json", action="store_true", help="print a JSON object a prompt")
    options.add_argument("--policy-path", help="where a checkpoint's starting model lies now")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command; see ``parser`` for its options."""
    given = parser().parse_args(arguments)
    source = _source(given)
    speakers, sampling = _speakers(given)
    texts = {speaker.name: list(_answers(speaker, source, sampling, given)) for speaker in speakers}
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


def _source(given: argparse.Namespace) -> PromptSource:
    from ppo_lightning.data import as_source

    if bool(given.prompt) == bool(given.prompts):
        raise ConfigError("give either `--prompt TEXT` or `--prompts FILE`.")
    return as_source(given.prompts or given.prompt)


def _speakers(given: argparse.Namespace) -> tuple[list[_Speaker], SamplingConfig]:
    """Load who answers, and how the responses are sampled."""
    from ppo_lightning.configs import SamplingConfig

    if Path(given.model).is_file() and not given.model.endswith(".gguf"):
        speakers, sampling = _from_checkpoint(given)
    else:
        speakers, sampling = [_from_model("policy", given.model, given)], SamplingConfig()
        if given.reference == "":
            raise ConfigError(
                f"`{given.model}` is no checkpoint, so it names no reference: give one, as "
                "`--reference MODEL`."
            )
    if given.reference:
        speakers.append(_from_model("reference", given.reference, given))
    wishes = {"max_new_tokens": given.max_new_tokens, "temperature": given.temperature}
    wishes = {name: value for name, value in wishes.items() if value is not None}
    wishes["min_new_tokens"] = min(
        sampling.min_new_tokens, wishes.get("max_new_tokens", sampling.max_new_tokens)
    )
    return speakers, replace(sampling, batch_size=given.batch_size, **wishes)


def _from_checkpoint(given: argparse.Namespace) -> tuple[list[_Speaker], SamplingConfig]:
    from ppo_lightning.checkpointing import load_actor, read_models
    from ppo_lightning.models import ReferencePolicy, load_tokenizer
    from ppo_lightning.modules.checkpoint import fingerprint

    models = read_models(given.model, policy_path=given.policy_path)
    tokenizer = load_tokenizer(
        models.policy.path, trust_remote_code=models.policy.trust_remote_code
    )
    actor = load_actor(models, fingerprint=fingerprint).to(_device(given))
    speakers = [_Speaker("policy", nullcontext(actor), tokenizer, models.policy)]
    if given.reference == "":
        reference = ReferencePolicy.build(models.reference, models.policy, actor)
        model = reference.to(_device(given)).causal_lm()
        speakers.append(_Speaker("reference", model, tokenizer, models.policy))
    return speakers, models.sampling


def _from_model(name: str, path: str, given: argparse.Namespace) -> _Speaker:
    from ppo_lightning.configs import PolicyConfig
    from ppo_lightning.models import load_causal_lm, load_tokenizer

    policy = PolicyConfig(path=path)
    model = load_causal_lm(policy).to(_device(given))  # type: ignore[arg-type]
    return _Speaker(name, nullcontext(model), load_tokenizer(path), policy)


def _answers(
    speaker: _Speaker, source: PromptSource, sampling: SamplingConfig, given: argparse.Namespace
) -> Iterator[tuple[str, str]]:
    """Yield (prompt, answer); a prompt's random numbers are the same for every speaker."""
    from ppo_lightning.models import end_token_ids
    from ppo_lightning.rollout import NativeEngine, StopRules, completions_of

    tokenizer = speaker.tokenizer
    batch = _batch(speaker, source, sampling, given)
    with speaker.model as model:
        stops = StopRules(
            end_ids=tuple({*end_token_ids(tokenizer, model), *sampling.stop_token_ids}),
            pad_id=tokenizer.pad_token_id,
            decoder=tokenizer,
        )
        rollout = NativeEngine().generate(
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
    speaker: _Speaker, source: PromptSource, sampling: SamplingConfig, given: argparse.Namespace
) -> PromptBatch:
    import torch

    from ppo_lightning.data import PromptSet, make_prompt_batch
    from ppo_lightning.functional import combine_keys
    from ppo_lightning.models import position_limit

    limit = position_limit(speaker.policy)
    prompts = PromptSet.build(
        source,
        speaker.tokenizer,
        chat=_CHAT[given.chat],  # type: ignore[arg-type]
        system_prompt=given.system_prompt,
        max_prompt_tokens=None if limit is None else limit - sampling.max_new_tokens,
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

    return given.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _print(prompt: str, answers: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"prompt": prompt, **answers}, ensure_ascii=False))
        return
    print(f"prompt: {prompt}")
    for name, answer in answers.items():
        print(f"{name}: {answer}")
    print()
