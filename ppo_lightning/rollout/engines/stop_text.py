"""Stop strings: whether a response has come to contain one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_lightning.configs import SamplingConfig
from ppo_lightning.rollout.engines.base import Decoded, Decoder, StopRules

_REACH = 8
"""Characters that decoding anew from some token may write otherwise there, and that a further token
may still change at the end: "##" of word pieces, the space before "n't"."""

_BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet

_UNANCHORED = {"'", _BROKEN}
"""These may depend on tokens at any distance: bytes in a row are all broken where one is, and of
" ' ' ' " every other quote loses its blanks where spaces are cleaned up."""


class TextStops:
    """Watches responses as they grow, of which it decodes the last tokens only.

    The answer is that of the whole text: a tail begins so far back that a string which was not in
    the text before must lie in it, and what is found is looked for in the whole text as well. Where
    there is nothing to hold on to, as in a page of quotes or broken characters, the tail grows.

    Args:
        strings: Any of them ends a response. At least one.
        decoder: Tokenizer.
    """

    def __init__(self, strings: Sequence[str], decoder: Decoder) -> None:
        self._strings, self._decoder = tuple(strings), decoder
        self._anchors = max(map(len, strings)) + _REACH
        self._tails: dict[int, tuple[int, int]] = {}  # row: its start, and when to move that
        # A tail may not hold the byte that breaks those after it.
        self._whole = any(_BROKEN in string for string in strings)

    @classmethod
    def build(cls, sampling: SamplingConfig, stops: StopRules) -> TextStops | None:
        """Make one for the responses of a batch, or None where no text ends them.

        Raises:
            ValueError: There are stop strings, but no tokenizer.
        """
        if not sampling.stop_strings:
            return None
        if stops.decoder is None:
            raise ValueError("`stop_strings` needs a tokenizer to look for them.")
        return cls(sampling.stop_strings, stops.decoder)

    def ended(self, rows: Tensor, out: Decoded) -> Tensor:
        """Say which responses contain a stop string by now.

        Args:
            rows: Responses to look at. ``[N]`` long.
            out: What they hold.

        Returns:
            ``[N]`` bool.
        """
        lengths = out.lengths[rows].tolist()
        found = [
            self.contains(row, out.ids[row, :length])
            for row, length in zip(rows.tolist(), lengths, strict=True)
        ]
        return torch.tensor(found, dtype=torch.bool, device=rows.device)

    def contains(self, row: int, ids: Tensor) -> bool:
        """Say whether a response contains a stop string, which it did not when last asked.

        Args:
            row: Its number.
            ids: All its tokens. ``[T]`` long.
        """
        start, limit = self._tails.get(row, (0, 2 * self._anchors))
        tail = ids[start:].tolist()
        if self._found(tail) and (start == 0 or self._found(ids.tolist())):
            return True
        if len(tail) >= limit and not self._whole:
            self._tails[row] = self._shortened(start, tail)
        return False

    def _found(self, ids: list[int]) -> bool:
        text = self._text(ids)
        return any(string in text for string in self._strings)

    def _shortened(self, start: int, tail: list[int]) -> tuple[int, int]:
        """Let go of the first half of a tail, if the other holds enough to go on from."""
        half = len(tail) // 2
        kept = sum(letter not in _UNANCHORED for letter in self._text(tail[half:]))
        if kept >= self._anchors:
            return start + half, 2 * self._anchors
        return start, 2 * len(tail)

    def _text(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)
