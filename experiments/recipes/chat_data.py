"""Chats of two people in five parts that share no chat: SFT, reward model, judge, PPO, held out.

The texts come from the package ``chitchat-dataset`` when the recipe runs. A chat's part is drawn by
a hash of its key. The first of two neighbouring turns is called the user's, the second the
assistant's: either of the two people may be either.

============  ======  ===========================================================
part          share   for
============  ======  ===========================================================
``sft``       12 %    demonstrations: four turns, of which two are learned
``reward``    40 %    pairs of the reward model
``judge``     26 %    the judge
``prompts``   6 %     prompts of PPO
``held_out``  16 %    SFT's perplexity, accuracy of reward model and judge, and the
                      prompts whose answers are judged
============  ======  ===========================================================

A pair is three turns with the reply that really came next, and one that did not. Held-out ones take
it from another chat with just as many words, so that length gives nothing away.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.recipes.common import write_jsonl
from ppo_lightning.errors import ConfigError
from ppo_lightning.io import read_json

PACKAGE = "chitchat_dataset"

SHARES: Mapping[str, float] = {
    "sft": 0.12,
    "reward": 0.40,
    "judge": 0.26,
    "prompts": 0.06,
    "held_out": 0.16,
}

Record = dict[str, Any]

_FEW = 3  # words of a reply that would do anywhere


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything.

    Args:
        demonstrations: Of SFT, four turns each.
        held_out_demonstrations: Of its validation.
        pairs: Of the reward model.
        held_out_pairs: At most; there is one from each held-out chat.
        judge: Turns with their replies, for the judge.
        prompts: Of PPO.
        held_out_prompts: Whose answers are judged.
        hard: Share of the reward model's pairs whose wrong reply is made of the pair's own words.
        generic: Share whose wrong reply is of one to three words, the real one of four or more.
        same_length: Share of the rest whose wrong reply has as many words as the real one.
    """

    demonstrations: int = 800
    held_out_demonstrations: int = 128
    pairs: int = 4000
    held_out_pairs: int = 1000
    judge: int = 40_000
    prompts: int = 640
    held_out_prompts: int = 128
    hard: float = 0.25
    generic: float = 0.15
    same_length: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A turn, and up to three turns before it.

    Args:
        chat: Key of its chat.
        context: The turns before, the oldest first.
        text: The turn itself.
    """

    chat: str
    context: tuple[str, ...]
    text: str

    @property
    def words(self) -> int:
        """How long it is."""
        return len(self.text.split())

    def messages(self) -> list[dict[str, str]]:
        """The turns before it as a chat that ends with the user's."""
        return as_messages(self.context, last="user")


def _learned_pairs(replies: Sequence[Reply], sizes: Sizes, draw: random.Random) -> list[Record]:
    """Pairs for the reward model, with short replies among them."""
    short = [reply for reply in replies if _is_short(reply, words=1)]
    found = pairs(
        short[: sizes.pairs],
        short,
        draw,
        hard=sizes.hard,
        generic=sizes.generic,
        same_length=sizes.same_length,
    )
    return list(found)


def make_data(folder: Path, sizes: Sizes, *, seed: int = 0) -> Record:
    """Write all files of the recipe.

    Returns:
        Counts, for the report.
    """
    draw = random.Random(seed)
    parts = read_chats()
    replies = {part: list(_replies(chats)) for part, chats in parts.items()}
    for found in replies.values():
        draw.shuffle(found)
    close = {part: [r for r in found if _is_short(r)] for part, found in replies.items()}
    prompts = one_of_each(_brief(close["prompts"]), per_chat=40)[: sizes.prompts]
    asked = {reply.context[-1] for reply in prompts}
    fresh = [reply for reply in _brief(close["held_out"]) if reply.context[-1] not in asked]
    questions = one_of_each(fresh)[: sizes.held_out_prompts]
    files: dict[str, Sequence[Record]] = {
        "demonstrations": _demonstrations(parts["sft"], draw)[: sizes.demonstrations],
        "val_demonstrations": _demonstrations(parts["held_out"], draw)[
            : sizes.held_out_demonstrations
        ],
        "pairs": _learned_pairs(replies["reward"], sizes, draw),
        "val_pairs": list(
            pairs(one_of_each(close["held_out"])[: sizes.held_out_pairs], close["held_out"], draw)
        ),
        "judge": [
            {"context": reply.context, "reply": reply.text}
            for reply in replies["judge"][: sizes.judge]
        ],
        "prompts": [{"messages": reply.messages()} for reply in prompts],
        "val_prompts": [{"messages": reply.messages(), "human": reply.text} for reply in questions],
        "val_replies": [
            {"messages": [*reply.messages(), {"role": "assistant", "content": reply.text}]}
            for reply in questions
        ],
    }
    for name, records in files.items():
        write_jsonl(folder / f"{name}.jsonl", records)
    return {
        "files": {name: len(records) for name, records in files.items()},
        "chats": {part: len(chats) for part, chats in parts.items()},
        "longer reply is the real one": longer_wins(files["val_pairs"]),
    }


def read_chats() -> dict[str, dict[str, list[str]]]:
    """Return the turns of all chats, by part and key.

    Raises:
        ConfigError: The package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"the chats come from the package `{PACKAGE}`, which is not installed. `make recipes` "
            "installs it, as does `pip install chitchat-dataset`."
        )
    parts: dict[str, dict[str, list[str]]] = {part: {} for part in SHARES}
    for key, chat in read_json(Path(spec.origin).with_name("dataset.json")).items():
        turns = [" ".join(" ".join(said["text"] for said in m).split()) for m in chat["messages"]]
        parts[part_of(key)][key] = turns
    return parts


def part_of(key: str) -> str:
    """Return who may read a chat."""
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") / 2**32
    for part, share in SHARES.items():
        place -= share
        if place < 0:
            return part
    return part


def as_messages(turns: Sequence[str], *, last: str) -> list[dict[str, str]]:
    """Give the turns of two people roles, the last one the role ``last``."""
    other = "assistant" if last == "user" else "user"
    roles = [last if (len(turns) - n) % 2 else other for n in range(len(turns))]
    return [{"role": r, "content": text} for r, text in zip(roles, turns, strict=True)]


def pairs(
    replies: Iterable[Reply],
    others: Sequence[Reply],
    draw: random.Random,
    *,
    hard: float = 0.0,
    generic: float = 0.0,
    same_length: float = 1.0,
) -> Iterator[Record]:
    """Set a wrong reply against each real one.

    Args:
        replies: The real ones.
        others: Where wrong ones are taken from: another chat's, with as many words.
        draw: Random numbers.
        hard: Share of pairs whose wrong reply is a turn of the same chat said once more, or the
            words of the real one in another order. What pays for relevance alone pays for these.
        generic: Share of pairs whose wrong reply is one of three words at most, against a real one
            of four or more. Most of those ("yes", "I see") fit anywhere a little, and a policy
            finds out that they are safe.
        same_length: Share of the others whose wrong reply has as many words. Pairs of any lengths
            are what ties the scores of short and long replies together.
    """
    of_length: dict[int, list[Reply]] = defaultdict(list)
    for reply in others:
        of_length[reply.words].append(reply)
    brief = [reply for reply in others if reply.words <= _FEW]
    for reply in replies:
        lot, wrong = draw.random(), None
        if lot < hard:
            wrong = _hard(reply, draw)
        elif lot < hard + generic and reply.words > _FEW and brief:
            wrong = _other(reply, brief, draw)
        if wrong is None:
            found = of_length[reply.words] if draw.random() < same_length else others
            wrong = _other(reply, found, draw)
        if wrong is not None:
            yield {"messages": reply.messages(), "chosen": reply.text, "rejected": wrong}


def _hard(reply: Reply, draw: random.Random) -> str | None:
    if draw.random() < 0.5:
        said = [turn for turn in reply.context if len(turn.split()) > 2]
        found = draw.choice(said) if said else ""
    else:
        words = reply.text.split()
        draw.shuffle(words)
        found = " ".join(words)
    return found if found and found != reply.text else None


def _other(reply: Reply, found: Sequence[Reply], draw: random.Random) -> str | None:
    for _ in range(20):
        other = draw.choice(found)
        if other.chat != reply.chat and other.text.lower() != reply.text.lower():
            return other.text
    return None


def one_of_each(replies: Iterable[Reply], *, per_chat: int = 1) -> list[Reply]:
    """Keep so many of each chat: what is held out should be independent."""
    taken: dict[str, int] = defaultdict(int)
    kept = []
    for reply in replies:
        taken[reply.chat] += 1
        if taken[reply.chat] <= per_chat:
            kept.append(reply)
    return kept


def longer_wins(found: Iterable[Record]) -> float:
    """How often the longer text of a pair, in characters, is the real reply."""
    signs = [len(pair["chosen"]) - len(pair["rejected"]) for pair in found]
    return sum((sign > 0) + 0.5 * (sign == 0) for sign in signs) / max(len(signs), 1)


def _replies(chats: Mapping[str, Sequence[str]]) -> Iterator[Reply]:
    for key, turns in chats.items():
        for n in range(1, len(turns)):
            if 1 <= len(turns[n].split()) <= 40:
                yield Reply(chat=key, context=tuple(turns[max(0, n - 3) : n]), text=turns[n])


def _is_short(reply: Reply, *, words: int = 3) -> bool:
    """Three short turns before it, and short itself: cheap to read, and to be answered."""
    lengths = [len(turn.split()) for turn in reply.context]
    return (
        len(lengths) == 3
        and max(lengths) <= 25
        and sum(lengths) <= 40
        and words <= reply.words <= 18
    )


def _brief(replies: Iterable[Reply], *, words: int = 30) -> list[Reply]:
    """Keep what is cheap to read, once more."""
    return [r for r in replies if sum(len(turn.split()) for turn in r.context) <= words]


def _demonstrations(chats: Mapping[str, Sequence[str]], draw: random.Random) -> list[Record]:
    """Stretches of four turns, the first one the user's."""
    found = []
    for turns in chats.values():
        start = 0
        while start + 4 <= len(turns):
            four = turns[start : start + 4]
            lengths = [len(turn.split()) for turn in four]
            answers = [lengths[1], lengths[3]]
            fits = min(lengths) >= 1 and min(answers) >= 2 and max(answers) <= 18
            if fits and max(lengths) <= 25 and sum(lengths) <= 55:
                found.append({"messages": as_messages(four, last="assistant")})
                start += 4
            else:
                start += 1
    draw.shuffle(found)
    return found
