"""``ppo-lightning export-pairs``: a run's answers as pairs to label, and labels as training pairs.

The reward model that is trained on them anew has then seen what this policy does to please the old
one.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_lightning.cli.arguments import Arguments
from ppo_lightning.errors import ConfigError

if TYPE_CHECKING:
    from ppo_lightning.data.preferences.candidates import Candidate


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    options = Arguments(
        prog="ppo-lightning export-pairs",
        description="Write the best scored and the suspicious answers of a PPO run beside the SFT "
        "model's, in random order, for people to choose from: they set `choice` to a, b, tie or "
        "skip. Scores and who wrote what go to a second file. With --labels: turn labelled files "
        "into pairs that PreferenceDataModule reads.",
    )
    options.add_argument("run", nargs="?", help="folder of a PPO run")
    options.add_argument("--output", default="pairs.jsonl", help="file to label (pairs.jsonl)")
    options.add_argument("--num", type=int, default=100, help="pairs to write at most (100)")
    options.add_argument("--seed", type=int, default=0, help="of the order, and of new answers")
    options.add_argument("--overwrite", action="store_true", help="take the place of the file")
    options.add_argument("--checkpoint", help="of the run; by default its newest one")
    options.add_argument(
        "--prompts", metavar="FILE", help="answer these with the checkpoint, instead of reading"
    )
    options.add_argument(
        "--reward", metavar="MODEL", help="reward model that scores answers of --prompts"
    )
    options.add_argument(
        "--sft", metavar="MODEL", help="answers where the run kept none; else the run's reference"
    )
    options.add_argument("--policy-path", help="where a checkpoint's starting model lies now")
    options.add_argument("--batch-size", type=int, default=16, help="prompts answered at once")
    options.add_argument("--device", help="cpu or cuda; by default a GPU if there is one")
    labels = options.add_argument_group("labels back")
    labels.add_argument(
        "--labels", nargs="+", metavar="FILE", help="labelled files; several are a vote"
    )
    labels.add_argument("--to", metavar="FILE", help="where to write the training pairs")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command; see ``parser`` for its options."""
    given = parser().parse_args(arguments)
    given.greedy = False  # as sampling commands know it
    _check(given)
    return _convert(given) if given.labels else _export(given)


def _check(given: argparse.Namespace) -> None:
    if (given.run is None) == (given.labels is None):
        raise ConfigError("give either the folder of a run, or `--labels FILE --to FILE`.")
    if (given.labels is None) != (given.to is None):
        raise ConfigError("`--labels FILE` and `--to FILE` belong together.")
    for name in ("num", "batch_size"):
        if getattr(given, name) < 1:
            option = name.replace("_", "-")
            raise ConfigError(f"`--{option}` must be at least 1, got {getattr(given, name)}.")
    if given.reward is not None and given.prompts is None:
        raise ConfigError("`--reward` scores new answers: it needs `--prompts FILE`.")
    if given.overwrite:
        return
    output = Path(given.to or given.output)
    if output.exists():
        raise ConfigError(
            f"`{output}` exists, and may hold labels. Give another name, or `--overwrite`."
        )
    if given.to is None and (key_file := _key_file(output)).exists():
        raise ConfigError(
            f"`{key_file}` exists: it says who wrote which in an earlier `{output.name}`. Give "
            "another `--output`, or `--overwrite`."
        )


def _key_file(output: Path) -> Path:
    """Where it stands who wrote which."""
    return output.with_name(f"{output.stem}.key{output.suffix}")


# ---------------------------------------------------------------------- a run's answers


def _export(given: argparse.Namespace) -> int:
    from ppo_lightning.cli.run_answers import answers_of_run, new_answers, with_sft_answers
    from ppo_lightning.data.preferences.candidates import choose
    from ppo_lightning.data.preferences.labels import blind_pairs

    found = new_answers(given) if given.prompts else answers_of_run(Path(given.run))
    usable = [one for one in _scored(found, given) if _can_differ(one)]
    picked = choose(usable, given.num)
    answered = with_sft_answers([candidate for candidate, _ in picked], given)
    rows = [
        (candidate, why)
        for candidate, (_, why) in zip(answered, picked, strict=True)
        if _can_differ(candidate)
    ]
    if not rows:
        raise ConfigError(
            f"`{given.run}`: every answer is empty, or the same as the SFT model's: there is "
            "nothing to choose from."
        )
    shown, aside = blind_pairs(rows, seed=given.seed)
    output = Path(given.output)
    key_file = _key_file(output)
    _write(key_file, aside)  # first: a file to label never stands there without it
    _write(output, shown)
    _tell(rows, dropped=len(found) - len(usable) + len(picked) - len(rows), given=given)
    print(f"who wrote which, and their scores: {key_file} (not for those who label)")
    return 0


def _can_differ(one: Candidate) -> bool:
    """Whether there is something to choose; an answer that is still to be made may be different."""
    if not one.policy.strip():
        return False
    return one.sft is None or bool(one.sft.strip() and one.sft.strip() != one.policy.strip())


def _scored(found: list[Candidate], given: argparse.Namespace) -> list[Candidate]:
    """Score new answers with the reward model that was named."""
    if given.reward is None:
        return found
    import torch

    from ppo_lightning.cli.sample import _device
    from ppo_lightning.rewards import SequenceClassifierReward, scores_of

    reward = SequenceClassifierReward(given.reward, batch_size=given.batch_size)
    reward.setup(torch.device(_device(given)))

    def ask(responses: list[str]) -> list[float]:
        completions = _completions(found, responses)
        scores: list[float] = scores_of(reward, "reward", completions, on_nonfinite="drop").tolist()
        return scores

    own, sft = ask([c.policy for c in found]), ask([c.sft or "" for c in found])
    reward.close()
    rows = zip(found, own, sft, strict=True)
    return [replace(c, score=score, sft_score=other) for c, score, other in rows]


def _completions(found: Sequence[Candidate], responses: list[str]) -> Any:
    from ppo_lightning.types import Completions

    count = len(found)
    return Completions(
        prompts=[candidate.prompt for candidate in found],
        messages=[candidate.messages for candidate in found],
        responses=responses,
        prompt_ids=[()] * count,
        response_ids=[()] * count,
        truncated=[False] * count,
        metadata=[{}] * count,
    )


def _tell(
    rows: Sequence[tuple[Candidate, Sequence[str]]], *, dropped: int, given: argparse.Namespace
) -> None:
    reasons = Counter(reason for _, why in rows for reason in why)
    listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    print(f"{len(rows)} pairs written to {given.output}" + (f": {listed}" if listed else ""))
    if dropped:
        print(f"{dropped} answers left out: empty, or the same as the SFT model's")
    print(
        "set `choice` of each line to a, b, tie or skip, then: ppo-lightning export-pairs "
        f"--labels {given.output} --to labelled_pairs.jsonl"
    )


# ---------------------------------------------------------------------- labels


def _convert(given: argparse.Namespace) -> int:
    from ppo_lightning.data import as_records
    from ppo_lightning.data.preferences.labels import read_labels

    labels = read_labels([as_records(file) for file in given.labels])
    if not labels.pairs:
        raise ConfigError(
            f"{' and '.join(given.labels)}: every label is a tie or a skip, so there is no pair to "
            "learn from."
        )
    _write(Path(given.to), labels.pairs)
    print(
        f"{len(labels.pairs)} pairs written to {given.to} ({labels.ties} ties, {labels.skipped} "
        f"skipped, {labels.unlabelled} without a label); add it to `data.init_args.pairs`"
    )
    return 0


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    from ppo_lightning.io import as_jsonl, write_text_atomic

    write_text_atomic(path, as_jsonl(rows))
