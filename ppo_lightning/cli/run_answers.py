"""The answers that a run has left in its folder, and the models that can answer again."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_lightning.errors import ConfigError, DataError
from ppo_lightning.io import read_json, read_jsonl

if TYPE_CHECKING:
    from ppo_lightning.data import PromptSource
    from ppo_lightning.data.preferences.candidates import Candidate

_CUT = 4000  # characters at which the reward report cuts a text
_SOURCES = ("samples/iteration_*.jsonl", "rewards/iteration_*.json", "predictions.jsonl")


def answers_of_run(folder: Path) -> list[Candidate]:
    """Read what a run has kept: side-by-side samples, best and worst texts, predictions.

    Args:
        folder: Of the run; of several in ``lightning_logs`` the latest with answers is taken.

    Returns:
        Without repetitions; samples first, of each kind the latest. Answers that a file has cut are
        left out.

    Raises:
        ConfigError: No folder, or there are no answers in it.
        DataError: A file is damaged; names file and line.
    """
    from ppo_lightning.models.runs import run_versions

    if not folder.is_dir():
        raise ConfigError(f"`{folder}` is no folder. Give the folder of a PPO run.")
    for place in (folder, *run_versions(folder)):
        found: dict[str, Candidate] = {}
        for candidate in _candidates(place):  # samples, which have both answers, come first
            found.setdefault(candidate.key, candidate)
        if found:
            return list(found.values())
    names = ", ".join(_SOURCES)
    raise ConfigError(
        f"`{folder}` holds no answers of a PPO run ({names}; there or in lightning_logs/version_*)."
        " Give the folder of a run with held-out prompts or `RewardReport`; or prompts to answer "
        "with its checkpoint, as `--prompts FILE`."
    )


def _candidates(place: Path) -> Iterator[Candidate]:
    for pattern in _SOURCES:
        for file in sorted(place.glob(pattern), reverse=True):
            for row in _rows(file):
                found = _candidate(row, file)
                if found is not None:
                    yield found


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    if file.suffix == ".jsonl":
        yield from (row for _, row in read_jsonl(file))
        return
    report = read_json(file)
    try:
        yield from [*report["best"], *report["worst"]]
    except (KeyError, TypeError) as error:
        message = "is no report of rewards: it lacks `best` and `worst`. Remove it."
        raise DataError(message, path=file) from error


def _candidate(row: Mapping[str, Any], file: Path) -> Candidate | None:
    """Make a candidate of a row of any of the files; None for one without an answer, or cut."""
    from ppo_lightning.data.preferences.candidates import Candidate

    answer = row.get("policy", row.get("response"))
    prompt, messages = row.get("prompt"), row.get("messages")
    if not isinstance(answer, str) or not isinstance(prompt, str) or not answer.strip():
        return None
    cut = len(answer) >= _CUT or (messages is None and len(prompt) >= _CUT)
    if file.parent.name == "rewards" and cut:
        return None
    return Candidate(
        prompt=prompt,
        messages=None if messages is None else tuple(messages),
        policy=answer,
        sft=row.get("reference"),
        score=row.get("policy_score", row.get("raw_score", row.get("score"))),
        gold=row.get("policy_gold", row.get("gold")),
        kl_ref=row.get("policy_kl_ref", row.get("kl_ref")),
        sft_score=row.get("reference_score"),
        sft_gold=row.get("reference_gold"),
        source=f"{file.parent.name}/{file.name}",
    )


def new_answers(given: argparse.Namespace) -> list[Candidate]:
    """Answer prompts with a run's checkpoint, and with the SFT model named or its reference.

    Args:
        given: Options ``prompts``, ``checkpoint``, ``run``, ``seed``, ``device``, ``policy_path``,
            ``sft``.

    Raises:
        ConfigError: There is no checkpoint.
    """
    from ppo_lightning.cli.sample import _answers, _from_checkpoint, _from_model
    from ppo_lightning.data import as_source, render
    from ppo_lightning.data.preferences.candidates import Candidate

    given.model, given.reference = str(checkpoint_of(given)), given.sft or ""
    source = as_source(given.prompts)
    speakers, manner = _from_checkpoint(given)
    if given.sft:
        speakers.append(_from_model("reference", given.sft, given))
    manner = replace(manner, sampling=replace(manner.sampling, batch_size=given.batch_size))
    texts = {one.name: list(_answers(one, source, manner, given)) for one in speakers}
    how: Any = {"chat": manner.chat, "system_prompt": manner.system_prompt}
    asked = [render(raw, speakers[0].tokenizer, **how) for raw in source.read()]
    return [
        Candidate(
            prompt=record.prompt,
            messages=record.messages,
            policy=own,
            sft=sft,
            source=Path(given.model).name,
        )
        for record, (_, own), (_, sft) in zip(
            asked, texts["policy"], texts["reference"], strict=True
        )
    ]


def with_sft_answers(candidates: Sequence[Candidate], given: argparse.Namespace) -> list[Candidate]:
    """Let the SFT model answer where a run has not kept its answer.

    Args:
        candidates: In part without.
        given: Options ``sft``, ``checkpoint``, ``run``, ``seed``, ``device``, ``policy_path``.
    """
    open_ = [candidate for candidate in candidates if candidate.sft is None]
    if not open_:
        return list(candidates)
    answers = iter(_sft_answers(open_, given))
    return [replace(one, sft=next(answers)) if one.sft is None else one for one in candidates]


def _sft_answers(candidates: Sequence[Candidate], given: argparse.Namespace) -> list[str]:
    from ppo_lightning.checkpointing import newest_good, read_models
    from ppo_lightning.cli.sample import _answers, _from_model, _Manner
    from ppo_lightning.configs import SamplingConfig
    from ppo_lightning.data import as_source

    path, sampling = given.sft, SamplingConfig()
    # Answers of another length or temperature would show who wrote them.
    if path is None or given.checkpoint or newest_good([given.run]).path:
        models = read_models(checkpoint_of(given), policy_path=given.policy_path)
        path, sampling = path or models.reference.path or models.policy.path, models.sampling
    else:
        print("no checkpoint says how the run sampled: the SFT model samples by defaults")
    print(f"answering {len(candidates)} prompts with `{path}`")
    source: PromptSource = as_source([candidate.asked for candidate in candidates])
    # What was a chat in the run is one here; a plain prompt was read as it is.
    manner = _Manner(replace(sampling, batch_size=given.batch_size), chat=False)
    speaker = _from_model("sft", path, given)
    return [answer for _, answer in _answers(speaker, source, manner, given)]


def checkpoint_of(given: argparse.Namespace) -> Path:
    """Return the checkpoint that was named, or the newest of the run.

    Raises:
        ConfigError: There is none.
    """
    from ppo_lightning.checkpointing import newest_good

    if given.checkpoint is not None:
        return Path(given.checkpoint)
    newest = newest_good([given.run])
    if newest.path is None:
        raise ConfigError(
            f"`{given.run}` holds no checkpoint that could answer. Name one as `--checkpoint "
            "FILE`, or the SFT model as `--sft MODEL`."
        )
    return newest.path
