"""``ppo-lightning check-reward``: known-good against known-bad answers, for any reward."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ppo_lightning.cli.arguments import Arguments
from ppo_lightning.errors import ConfigError

if TYPE_CHECKING:
    from ppo_lightning.rewards import Reward
    from ppo_lightning.rewards.perturbations import Answered
    from ppo_lightning.rewards.separation import JudgedPair, Separation
    from ppo_lightning.types import Message

_SLICE = 256  # answers that a component is given at once
_MOST_SHOWN = 100  # characters of a text in the list of the worst

KINDS = ("shuffled", "truncated", "repeated", "off-topic", "empty", "echo")


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    options = Arguments(
        prog="ppo-lightning check-reward",
        description="Let a reward score good answers beside bad ones, made from them or your own, "
        "and say whether it can tell them apart. Exit code 0: every kind is told apart; 1: one is "
        "not; 2: something cannot be read.",
    )
    options.add_argument(
        "model", nargs="?", help="reward model: a run of it, a folder, hub name or package:NAME"
    )
    options.add_argument(
        "--component",
        metavar="FILE",
        help="check this component instead: YAML or JSON with `class_path` and `init_args`",
    )
    options.add_argument(
        "--texts", metavar="FILE", help="good answers: `prompt` and `response`, or `messages`"
    )
    options.add_argument(
        "--pairs", metavar="FILE", help="your own: `prompt`, `chosen` (good) and `rejected` (bad)"
    )
    _add_checks(options)
    _add_model(options)
    return options


def _add_checks(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--perturb",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        metavar="KIND",
        help=f"how good answers are made bad: {', '.join(KINDS)}; all of them by default",
    )
    options.add_argument(
        "--min-separation",
        type=float,
        default=0.7,
        help="share of pairs in which the good answer must score higher (default 0.7)",
    )
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--limit", type=int, help="take at most so many answers, and pairs")
    options.add_argument("--worst", type=int, default=2, help="examples to print of each kind")
    options.add_argument("--output", metavar="FILE", help="write all numbers as JSON")
    options.add_argument(
        "--batch-size", dest="max_batch", type=int, default=32, help="texts in a forward pass"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command; see ``parser`` for its options."""
    given = parser().parse_args(arguments)
    _check(given)
    cases = _cases(given)  # before anything is loaded

    import torch

    from ppo_lightning.cli.sample import _device
    from ppo_lightning.rewards.separation import separation, too_low, worries

    component = _component(given)
    component.setup(torch.device(_device(given)))
    scored = _scored(component, cases)
    component.close()
    skips = {case.kind: case.skipped for case in cases}
    found = [separation(kind, pairs, skipped=skips[kind]) for kind, pairs in scored.items()]
    said = worries(found, scored, min_separation=given.min_separation)
    print(_table(found, given.min_separation))
    for line in _worst(scored, given.worst):
        print(line)
    for line in said:
        print(f"warning: {line}")
    if given.output:
        _write(given, found, said)
    return int(any(too_low(one, given.min_separation) for one in found))


@dataclass(frozen=True, eq=False)  # one is itself: turns are dictionaries, which have no hash
class _Question:
    """Something that is asked: a plain prompt or the turns of a chat."""

    prompt: str
    messages: tuple[Message, ...] | None


@dataclass(frozen=True)
class _Case:
    """The pairs of one kind, before they are scored: (question, good, bad)."""

    kind: str
    pairs: list[tuple[_Question, str, str]]
    skipped: int = 0


def _check(given: argparse.Namespace) -> None:
    if (given.model is None) == (given.component is None):
        raise ConfigError("give either a reward model or `--component FILE`.")
    if given.texts is None and given.pairs is None:
        raise ConfigError("give good answers as `--texts FILE`, pairs as `--pairs FILE`, or both.")
    if not 0 < given.min_separation <= 1:
        raise ConfigError(f"`--min-separation` must lie in (0, 1], got {given.min_separation}.")
    for name in ("limit", "max_batch"):
        value = getattr(given, name)
        if value is not None and value < 1:
            option = {"max_batch": "batch-size"}.get(name, name)
            raise ConfigError(f"`--{option}` must be at least 1, got {value}.")


def _component(given: argparse.Namespace) -> Reward:
    from ppo_lightning.cli.serve_reward import _of_file, _of_model

    return _of_model(given) if given.component is None else _of_file(given)


def _add_model(options: argparse.ArgumentParser) -> None:
    from ppo_lightning.cli.serve_reward import _add_model as add

    add(options)


# ---------------------------------------------------------------------- the pairs


def _cases(given: argparse.Namespace) -> list[_Case]:
    cases = []
    if given.texts is not None:
        cases += _made_bad(given)
    if given.pairs is not None:
        cases.append(_own_pairs(given))
    return cases


def _made_bad(given: argparse.Namespace) -> list[_Case]:
    from ppo_lightning.rewards.perturbations import perturbed

    good = _good_answers(given)
    items = [_answered(question, response) for question, response in good]
    cases = []
    for kind in dict.fromkeys(given.perturb):
        bad = perturbed(kind, items, seed=given.seed)
        rows = zip(good, bad, strict=True)
        pairs = [(question, text, b) for (question, text), b in rows if b is not None]
        cases.append(_Case(kind, pairs, skipped=len(good) - len(pairs)))
    return cases


def _good_answers(given: argparse.Namespace) -> list[tuple[_Question, str]]:
    from ppo_lightning.data import as_records, read_examples
    from ppo_lightning.data.demonstrations.demonstration import demonstration_of

    def read(record: Any) -> tuple[_Question, str]:
        found = demonstration_of(record)
        if found.text is not None:
            raise record.error("holds a `text` alone: give `prompt` and `response`, or `messages`.")
        if found.messages is None:
            return _Question(found.prompt or "", None), found.response or ""
        return _asked(found.messages[:-1]), found.messages[-1]["content"]

    return read_examples(as_records(given.texts), read)[: given.limit]


def _own_pairs(given: argparse.Namespace) -> _Case:
    from ppo_lightning.data import as_records
    from ppo_lightning.data.preferences.pairs import read_pairs

    found = read_pairs(as_records(given.pairs), identical="drop")[: given.limit]
    pairs = []
    for pair in found:
        for rejected in pair.rejected:
            question = _before_answer(pair.prompt, pair.chosen)
            pairs.append((question, pair.chosen[-1]["content"], rejected[-1]["content"]))
    return _Case("pairs", pairs)


def _before_answer(prompt: str | tuple[Message, ...], answer: tuple[Message, ...]) -> _Question:
    """What stands before the last turn of an answer."""
    if isinstance(prompt, str):
        if len(answer) == 1:
            return _Question(prompt, None)
        prompt = ({"role": "user", "content": prompt},)
    return _asked((*prompt, *answer[:-1]))


def _asked(turns: tuple[Message, ...]) -> _Question:
    asked = [turn["content"] for turn in turns if turn["role"] == "user"]
    return _Question(asked[-1] if asked else "", turns)


def _answered(question: _Question, response: str) -> Answered:
    from ppo_lightning.rewards.perturbations import Answered

    turns = question.messages
    about = question.prompt if turns is None else "\n".join(turn["content"] for turn in turns)
    return Answered(prompt=question.prompt, response=response, about=about)


# ---------------------------------------------------------------------- the scores


def _scored(component: Reward, cases: Sequence[_Case]) -> dict[str, list[JudgedPair]]:
    """Score every text once, however many pairs it is in."""
    from ppo_lightning.rewards.separation import JudgedPair

    texts = dict.fromkeys(
        (question, text)
        for case in cases
        for question, good, bad in case.pairs
        for text in (good, bad)
    )
    scores = dict(zip(texts, _scores(component, list(texts)), strict=True))
    return {
        case.kind: [
            JudgedPair(q.prompt, good, bad, scores[q, good], scores[q, bad])
            for q, good, bad in case.pairs
        ]
        for case in cases
    }


def _scores(component: Reward, texts: list[tuple[_Question, str]]) -> Iterator[float]:
    from ppo_lightning.rewards import scores_of
    from ppo_lightning.rewards.perturbations import words
    from ppo_lightning.types import Completions

    numbers: dict[str, int] = {}
    for start in range(0, len(texts), _SLICE):
        part = texts[start : start + _SLICE]
        # Components that count tokens are given a number for each word.
        ids = [[numbers.setdefault(word, len(numbers)) for word in words(t)] for _, t in part]
        completions = Completions(
            prompts=[question.prompt for question, _ in part],
            messages=[question.messages for question, _ in part],
            responses=[text for _, text in part],
            prompt_ids=[()] * len(part),
            response_ids=ids,
            truncated=[False] * len(part),
            metadata=[{}] * len(part),
        )
        name = type(component).__name__
        yield from scores_of(component, name, completions, on_nonfinite="drop").tolist()


# ---------------------------------------------------------------------- what is said


def _table(found: Sequence[Separation], min_separation: float) -> str:
    """Lay the kinds out, one a line."""
    from ppo_lightning.rewards.separation import too_low

    lines = [
        f"{'bad answers':<12}{'pairs':>6}{'skipped':>8}  {'good > bad':<22}{'gap in spreads':>14}"
    ]
    for one in found:
        share = f"{one.share:.3f} [{one.low:.3f}, {one.high:.3f}]" if one.pairs else "-"
        gap = "-" if one.gap is None else f"{one.gap:+.2f}"
        verdict = "not told apart" if too_low(one, min_separation) else "ok"
        lines.append(
            f"{one.kind:<12}{one.pairs:>6}{one.skipped:>8}  {share:<22}{gap:>14}  {verdict}"
        )
    return "\n".join(lines)


def _worst(scored: Mapping[str, Sequence[JudgedPair]], most: int) -> Iterator[str]:
    """Quote the pairs in which the bad answer wins by most."""
    for kind, pairs in scored.items():
        lost = sorted(
            (p for p in pairs if math.isfinite(p.gap) and p.gap <= 0), key=lambda p: p.gap
        )
        for pair in lost[:most]:
            yield (
                f"worst of {kind}: prompt {_short(pair.prompt)}\n"
                f"  good {pair.good_score:+.4g} {_short(pair.good)}\n"
                f"  bad  {pair.bad_score:+.4g} {_short(pair.bad)}"
            )


def _short(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…")


def _write(given: argparse.Namespace, found: Sequence[Separation], said: Sequence[str]) -> None:
    from ppo_lightning.io import finite, write_json_atomic
    from ppo_lightning.rewards.separation import too_low

    report = {
        "reward": given.model or given.component,
        "texts": given.texts,
        "pairs": given.pairs,
        "seed": given.seed,
        "min_separation": given.min_separation,
        "kinds": [asdict(one) | {"ok": not too_low(one, given.min_separation)} for one in found],
        "warnings": list(said),
    }
    write_json_atomic(given.output, finite(report))
