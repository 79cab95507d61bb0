"""The judge of the chat recipe: which reply came next? Bags of words, trained from nothing.

Two towers, one for the turns before and one for the reply, each a weighted sum of vectors of words
(of a reply also of two neighbouring words) through a small network; the product of the two says how
well they fit. It shares neither architecture, nor start, nor chats with the reward model.

Among 512 replies, the one that came next must win (the contrastive loss of Henderson et al. 2017,
arXiv:1705.00652, section 4.4); it must also win against its own words in another order. Two towers
cannot learn that an echo is no reply: one of the last turn ranked above 0.996 of real replies, and
as a wrong one in training still above 0.987. So what a reply only repeats is not read (``fresh``).
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from ppo_lightning.io import read_json, write_json_atomic
from ppo_lightning.models.fingerprint import fingerprint
from ppo_lightning.rewards import Reward
from ppo_lightning.types import Completions, Message

TURNS = 3
"""How many turns before the reply are read."""

_WORD = re.compile(r"\w+(?:['’]\w+)*|[?!]")
_MOST_WORDS = 60
_POOL = 256  # real replies that an answer has to compete with
_RUN = 3  # words in a row that nobody says again by chance
_STRANGE = "* *"  # two neighbours that nobody has been seen to say
_STRANGE_WEIGHT = 0.3

Pair = tuple[tuple[str, ...], str]
"""The turns before, the oldest first, and the reply."""


class ReplyRanker(nn.Module):
    """How well a reply fits the turns before it, from -1 to 1.

    Args:
        words: The vocabulary, words and neighbours, with weights: what is rare says more.
        width: Of the vectors.
        word_dropout: Share of words that are hidden in training.
    """

    def __init__(
        self, words: Mapping[str, float], *, width: int = 300, word_dropout: float = 0.5
    ) -> None:
        super().__init__()
        self.numbers = {word: n for n, word in enumerate(words, start=1)}  # 0 is any other word
        self.width = width
        self.word_dropout = word_dropout
        self.register_buffer("weights", torch.tensor([0.0, *words.values()]))
        self.vectors = nn.EmbeddingBag(len(words) + 1, width, mode="sum", padding_idx=0)
        self.turns = nn.Parameter(torch.tensor([0.4, 0.6, 1.0]))  # later ones matter more
        self.before, self.reply = (_tower(width) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("pool", torch.zeros(_POOL, width))
        with torch.no_grad():
            self.vectors.weight.normal_(std=0.1)[0] = 0

    def fits(self, contexts: Sequence[Sequence[str]], replies: Sequence[str]) -> Tensor:
        """Score replies by what they say anew, each after its own turns. ``[B]``."""
        own = [fresh(r, c[-TURNS:]) for r, c in zip(replies, contexts, strict=True)]
        return (self.contexts(contexts) * self.replies(own)).sum(1)

    def outranked(self, contexts: Sequence[Sequence[str]], replies: Sequence[str]) -> Tensor:
        """Share of 256 real replies to something else that fit these turns less well. ``[B]``.

        A reply that says nothing anew is outranked by all of them.
        """
        own, others = self.fits(contexts, replies)[:, None], self.contexts(contexts) @ self.pool.T
        shares = (own > others).float().mean(1) + (own == others).float().mean(1) / 2
        new = [bool(fresh(r, c[-TURNS:])) for r, c in zip(replies, contexts, strict=True)]
        return shares * torch.tensor(new)

    def contexts(self, contexts: Sequence[Sequence[str]]) -> Tensor:
        """Unit vectors of the turns before. ``[B, width]``."""
        turns = [("",) * (TURNS - len(c)) + tuple(c) for c in (c[-TURNS:] for c in contexts)]
        bags = self._bags([words_of(turn) for chat in turns for turn in chat])
        summed = (bags.view(len(turns), TURNS, self.width) * self.turns[None, :, None]).sum(1)
        return functional.normalize(summed + self.before(summed), dim=-1)

    def replies(self, replies: Sequence[str]) -> Tensor:
        """Unit vectors of replies. ``[B, width]``."""
        bags = self._bags([words_of(text) + self._neighbours(text) for text in replies])
        return functional.normalize(bags + self.reply(bags), dim=-1)

    def _neighbours(self, text: str) -> list[str]:
        return [two if two in self.numbers else _STRANGE for two in neighbours_of(text)]

    def _bags(self, texts: Sequence[Sequence[str]]) -> Tensor:
        """Weighted sums of vectors, over the length of the weights. ``[B, width]``."""
        rows = [[self.numbers.get(word, 0) for word in words] or [0] for words in texts]
        flat = torch.tensor([number for row in rows for number in row])
        lengths = torch.tensor([len(row) for row in rows])
        weights = self.weights[flat]  # type: ignore[index]
        if self.training:
            weights = weights * (torch.rand(len(flat)) >= self.word_dropout)
        summed = self.vectors(flat, lengths.cumsum(0) - lengths, per_sample_weights=weights)
        owner = torch.arange(len(rows)).repeat_interleave(lengths)
        squares = torch.zeros(len(rows)).index_add_(0, owner, weights.square())
        return summed / squares.sqrt().clamp(min=1)[:, None]  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None:
        """Write weights and words."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / "judge.safetensors")
        words = dict(zip(self.numbers, self.weights[1:].tolist(), strict=True))  # type: ignore[index]
        write_json_atomic(folder / "judge.json", {"width": self.width, "words": words})

    @classmethod
    def load(cls, folder: Path) -> ReplyRanker:
        """Read what ``save`` has written, ready to judge."""
        kept = read_json(folder / "judge.json")
        ranker = cls(kept["words"], width=kept["width"])
        ranker.load_state_dict(load_file(folder / "judge.safetensors"))
        return ranker.eval().requires_grad_(False)


def _tower(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.3), nn.Linear(width, 256), nn.Tanh(), nn.Linear(256, width))


def words_of(text: str) -> list[str]:
    """Return words and question or exclamation marks, at most 60."""
    return _WORD.findall(text.lower())[:_MOST_WORDS]


def neighbours_of(text: str) -> list[str]:
    """Return each two words that follow each other; ``^`` begins a text, ``$`` ends it."""
    words = ["^", *words_of(text), "$"]
    return [f"{one} {after}" for one, after in itertools.pairwise(words)]


def fresh(reply: str, turns: Sequence[str]) -> str:
    """Return the words of a reply that are more than a repetition.

    A run of three or more words that one of the turns has too is left out; so is everything where
    one turn has all the words of a reply, three at least, in whatever order.
    """
    words, said = words_of(reply), [words_of(turn) for turn in turns]
    if len(words) >= _RUN and any(set(words) <= set(turn) for turn in said):
        return ""
    runs = {tuple(turn[n : n + _RUN]) for turn in said for n in range(len(turn) - _RUN + 1)}
    repeated = {
        n + step
        for n in range(len(words) - _RUN + 1)
        if tuple(words[n : n + _RUN]) in runs
        for step in range(_RUN)
    }
    return " ".join(word for n, word in enumerate(words) if n not in repeated)


def train(
    pairs: Sequence[Pair], *, epochs: int = 7, batch: int = 512, seed: int = 0
) -> ReplyRanker:
    """Train a judge on real replies; the same one for the same pairs and seed.

    Args:
        pairs: At least a batch of them.
        epochs: Passes over them.
        batch: Pairs among which each reply has to find its own turns, and the other way round.
        seed: Of start, order and dropout.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ranker = ReplyRanker(_vocabulary(pairs))
        optimizer = torch.optim.AdamW(ranker.parameters(), lr=1e-3, weight_decay=0.1)
        draw = random.Random(seed)
        for _ in range(epochs):
            for numbers in torch.randperm(len(pairs)).split(batch):
                loss = _loss(ranker, [pairs[n] for n in numbers.tolist()], draw)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        ranker.eval().requires_grad_(False)
        chosen = torch.randperm(len(pairs))[:_POOL].tolist()
        pool = ranker.replies([pairs[number][1] for number in chosen])
        ranker.pool[: len(pool)] = pool  # type: ignore[index]
    return ranker


def _loss(ranker: ReplyRanker, pairs: Sequence[Pair], draw: random.Random) -> Tensor:
    before, replies = (list(column) for column in zip(*pairs, strict=True))
    mixed = [_mixed(reply, draw) for reply in replies]
    candidates = ranker.replies(replies + [text for text in mixed if text])
    scores = ranker.scale.exp() * ranker.contexts(before) @ candidates.T
    own = torch.arange(len(pairs))
    among_replies = functional.cross_entropy(scores, own)
    among_turns = functional.cross_entropy(scores[:, : len(pairs)].T, own)
    return (among_replies + among_turns) / 2


def _mixed(reply: str, draw: random.Random) -> str:
    """Return the words in another order; nothing where there is no other one."""
    words = reply.split()
    draw.shuffle(words)
    mixed = " ".join(words)
    return "" if words_of(mixed) == words_of(reply) else mixed


def _vocabulary(pairs: Sequence[Pair], *, min_count: int = 3) -> dict[str, float]:
    """Words and neighbours of at least three texts, by how seldom they are, from 0 to 1."""
    texts = [text for before, reply in pairs for text in (before[-1], reply)]
    words = _weights((words_of(text) for text in texts), len(texts), min_count)
    neighbours = _weights((neighbours_of(reply) for _, reply in pairs), len(pairs), min_count)
    return words | neighbours | {_STRANGE: _STRANGE_WEIGHT}


def _weights(texts: Iterable[Sequence[str]], count: int, min_count: int) -> dict[str, float]:
    found = Counter(part for text in texts for part in set(text))
    top = math.log(count)
    return {
        part: math.log(count / often) / top
        for part, often in found.most_common()
        if often >= min_count
    }


class ReplyRankReward(Reward):
    """Share of random real replies that fit the chat less well than the answer: from 0 to 1.

    A reply to something else gets 0.5 on average.

    Args:
        path: Folder of the judge.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._ranker: ReplyRanker | None = None

    def setup(self, device: torch.device) -> None:
        """Read the judge; it runs on the CPU, wherever the policy does."""
        if self._ranker is None:
            self._ranker = ReplyRanker.load(Path(self.path))

    def fingerprint(self) -> str:
        """Digest of the judge's weights."""
        return "" if self._ranker is None else fingerprint(self._ranker)

    def close(self) -> None:
        """Let go of the judge."""
        self._ranker = None

    def __call__(self, completions: Completions) -> Tensor:
        """Score each response. ``[B]`` float32."""
        self.setup(torch.device("cpu"))
        assert self._ranker is not None
        rows = zip(completions.messages, completions.prompts, strict=True)
        contexts = [contents(chat) if chat else (prompt,) for chat, prompt in rows]
        return self._ranker.outranked(contexts, completions.responses)


def contents(chat: Sequence[Message | Mapping[str, Any]]) -> tuple[str, ...]:
    """Return what the two people of a chat have said."""
    return tuple(str(turn["content"]) for turn in chat if turn["role"] in ("user", "assistant"))
