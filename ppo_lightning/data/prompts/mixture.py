"""Several sources in fixed shares."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heapify, heapreplace

import numpy as np

from ppo_lightning.data.prompts.feeds import Keys, Prompt, PromptFeed
from ppo_lightning.data.prompts.raw import RawPrompt
from ppo_lightning.data.prompts.reader import PromptReader
from ppo_lightning.data.prompts.sources import Prompts, PromptSource, as_source
from ppo_lightning.functional.random import combine_keys

__all__ = ["MixtureFeed", "MixturePart", "MixturePrompts", "mixed_order"]

log = logging.getLogger(__name__)

_MIXTURE = 0x6D6978  # keeps these keys apart from all others
_PHASES = 1 << 32


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One source of a mixture.

    Args:
        source: Its prompts.
        weight: Its share, against the weights of the others.
        name: What it is called in the log and in the metrics of its prompts; None takes its number.
    """

    source: Prompts
    weight: float = 1.0
    name: str | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"`weight` must be a finite number above 0, got {self.weight}.")


class MixturePrompts(PromptSource):
    """Prompts of several sources in fixed shares.

    Each part goes through a shuffled order of its own, again and again. Any stretch of the
    mixture has its share of each part, to within one prompt a part. (A part that is streamed may
    then drop some: the shares are of the prompts that are drawn.)

    As held-out prompts a mixture is all prompts of all parts, each once.

    Args:
        parts: The sources with their weights.
    """

    def __init__(self, parts: list[MixturePart]) -> None:
        if not parts:
            raise ValueError("`parts` must name at least one source.")
        names = [part.name or f"part {number}" for number, part in enumerate(parts)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"`parts` must have names of their own, got two of {twice!r}.")
        self.parts = parts
        self.names = names
        self.sources = [as_source(part.source) for part in parts]

    def read(self) -> list[RawPrompt]:
        """Return the prompts of all parts, one part after the other."""
        return list(self.iterate())

    def iterate(self) -> Iterator[RawPrompt]:
        """Yield what ``read`` returns."""
        for source in self.sources:
            yield from source.iterate()
        self.num_skipped = sum(source.num_skipped for source in self.sources)

    def feed(self, reader: PromptReader) -> MixtureFeed:
        """Return the mixed order."""
        feeds = [source.feed(reader) for source in self.sources]
        weights = [part.weight for part in self.parts]
        for name, feed, weight in zip(self.names, feeds, weights, strict=True):
            share = weight / sum(weights)
            log.info(
                "mixture: %s has %d prompts, %.1f %% of those drawn", name, len(feed), 100 * share
            )
        return MixtureFeed(feeds, weights, names=self.names)


class MixtureFeed(PromptFeed):
    """The order of a mixture; see ``PromptFeed``. Its prompts have the name of their part.

    Args:
        feeds: The order of each part.
        weights: The weight of each.
        names: What each is called in the log, and the ``group`` of its prompts.
    """

    def __init__(
        self, feeds: Sequence[PromptFeed], weights: Sequence[float], *, names: Sequence[str]
    ) -> None:
        self.feeds = feeds
        self.weights = weights
        self.names = names

    def __len__(self) -> int:
        return sum(map(len, self.feeds))

    def keys(self) -> Keys | None:
        """Numbers of the prompts of the parts where they are known."""
        known = [keys for feed in self.feeds if (keys := feed.keys()) is not None]
        return np.concatenate(known) if known else None

    def at(self, position: int, count: int, *, seed: int) -> list[Prompt | None]:
        """Return the prompts of a stretch of the mixed order; see ``PromptFeed``."""
        order = mixed_order(self.weights, position, count, seed=seed)
        found: list[Prompt | None] = [None] * count
        drawn: dict[str, int] = {}
        for part, (feed, name) in enumerate(zip(self.feeds, self.names, strict=True)):
            places = [place for place, (chosen, _) in enumerate(order) if chosen == part]
            if places:
                first = order[places[0]][1]  # the others follow it in the part's own order
                own_seed = combine_keys(seed, _MIXTURE, part)
                prompts = feed.at(first, len(places), seed=own_seed)
                for place, prompt in zip(places, prompts, strict=True):
                    found[place] = prompt and (replace(prompt[0], group=name), prompt[1])
            drawn[name] = len(places)
        log.debug("mixture: drawn at position %d: %s", position, drawn)
        return found


def mixed_order(
    weights: Sequence[float], position: int, count: int, *, seed: int
) -> list[tuple[int, int]]:
    """Return a stretch of the endless order that mixes parts in exact shares.

    The k-th prompt of part i is due at the time (k + uᵢ) / wᵢ, where the shares w sum to 1 and the
    phases u in (0, 1) come from the seed; the order is that of the times. Before any time t part i
    has had w t prompts, rounded up or down, so no share is ever off by more than the number of
    parts. Computed in whole numbers, and so the same on every machine.

    Args:
        weights: Above 0.
        position: Where the stretch begins.
        count: Its length.
        seed: Of the phases.

    Returns:
        ``count`` pairs: number of the part, and position in the part's own order.
    """
    # A float as it was written: 0.1 is a tenth, not the nearest binary fraction.
    exact = [Fraction(str(float(weight))) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    phases = [
        Fraction(combine_keys(seed, _MIXTURE, part) % (_PHASES - 1) + 1, _PHASES)
        for part in range(len(shares))
    ]
    # By this time no more than `position` prompts were due, and at most two a part fewer.
    time = max(0, position - len(shares))
    had = [
        max(0, math.ceil(time * share - phase)) for share, phase in zip(shares, phases, strict=True)
    ]
    due = [
        ((had[part] + phases[part]) / share, part, had[part]) for part, share in enumerate(shares)
    ]
    heapify(due)
    order: list[tuple[int, int]] = []
    for place in range(sum(had), position + count):
        when, part, number = due[0]
        heapreplace(due, (when + 1 / shares[part], part, number + 1))
        if place >= position:
            order.append((part, number))
    return order
