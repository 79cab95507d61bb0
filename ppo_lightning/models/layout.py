"""How the tokens of a batch lie before a model, and which of its states are asked about.

Packed, they lie in one row without padding, a prompt with several responses once for all of them;
otherwise in rows of one length. Either way the model is asked about N states only: those that a
response token comes after. What it says is written back into the ``[B, R]`` shape that everything
else works with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_lightning.functional import first_alike, last_index, position_ids, rounded_up
from ppo_lightning.models.attention import Packing
from ppo_lightning.models.inputs import ModelInputs, packed_inputs
from ppo_lightning.types import Sequences, TrunkStates


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Input of one forward pass, and the places of what is asked.

    Args:
        inputs: Packed rows, or padded ones.
        places: State before each scored token, counted over all rows of the input. ``[N]`` long.
        last_places: State after the last token of each row that has a scored one; empty where it
            was not asked for. ``[M]`` long.
        targets: The scored tokens. ``[N]`` long.
        cells: Their places in the ``[B, R]`` of the response, read row by row. ``[N]`` long.
        last_rows: Rows of ``last_places``. ``[M]`` long.
        shape: ``(B, R)``.
        trunk: What the model's frozen blocks make of the input, where that is known. ``[1, T, H]``,
            of padded rows ``[B, S, H]``.
        rows: All places and last places once, in order, and fillers among them up to a round
            number; None where that is every token of the input. ``[K]`` long.
    """

    inputs: ModelInputs
    places: Tensor
    last_places: Tensor
    targets: Tensor
    cells: Tensor
    last_rows: Tensor
    shape: tuple[int, int]
    trunk: Tensor | None = None
    rows: Tensor | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequences,
        *,
        packed: bool,
        final: bool = False,
        multiple: int = 1,
        trunk: TrunkStates | None = None,
    ) -> TokenLayout:
        """Lay sequences out.

        The ids under padding are replaced, so that any number may stand there.

        Args:
            sequences: Prompts and responses.
            packed: Without padding.
            final: Whether the state after the last token is asked about too. Without, that token
                is not read at all: there is nothing after it that it could predict.
            multiple: Packed, their number is made one of this by tokens that nobody sees.
            trunk: What the model's frozen blocks make of the sequences, if known.
        """
        scored, prompt = sequences.response_mask, sequences.prompt_ids.shape[1]
        real = sequences.attention_mask
        if not final:
            real = _without_last(real, prompt)
        ids = sequences.input_ids.masked_fill(~real, 0)
        grid = _Packed(real, ids, prompt, multiple) if packed else _Padded(real, ids)
        states = None if trunk is None else trunk.at(grid.cells)
        cells = scored.flatten().nonzero()[:, 0]
        rows, columns = cells // scored.shape[1], cells % scored.shape[1]
        last = last_index(scored)
        last_rows = (last >= 0).nonzero()[:, 0] if final else last[:0]
        places = grid.places(rows, prompt - 1 + columns)
        last_places = grid.places(last_rows, prompt + last[last_rows])
        size = grid.inputs.input_ids.numel()
        return cls(
            inputs=grid.inputs,
            places=places,
            last_places=last_places,
            targets=sequences.response_ids.flatten()[cells],
            cells=cells,
            last_rows=last_rows,
            shape=(scored.shape[0], scored.shape[1]),
            trunk=states,
            rows=_rows_of(torch.cat([places, last_places]), size, multiple),
        )

    @property
    def asked(self) -> Tensor:
        """All places that are asked about, the last ones behind the others. ``[N + M]`` long."""
        return torch.cat([self.places, self.last_places]) if len(self.last_rows) else self.places

    def on_tokens(self, values: Tensor) -> Tensor:
        """Write a value of each scored token into the response's shape, 0 elsewhere.

        Args:
            values: ``[N, ...]``.

        Returns:
            ``[B, R, ...]``.
        """
        rows, width = self.shape
        empty = values.new_zeros(rows * width, *values.shape[1:])
        return empty.index_copy(0, self.cells, values).view(rows, width, *values.shape[1:])

    def on_rows(self, values: Tensor) -> Tensor:
        """Write a value of each last state into its row, 0 in a row without any.

        Args:
            values: ``[M]``.

        Returns:
            ``[B]``.
        """
        return values.new_zeros(self.shape[0]).index_copy(0, self.last_rows, values)


def read_whole(
    sequences: Sequences, *, packed: bool, multiple: int = 1
) -> tuple[ModelInputs, Tensor]:
    """Lay every token out, the last ones too, for a pass that none of them is asked about.

    Args:
        sequences: Prompts and responses.
        packed: As in ``TokenLayout.of``.
        multiple: Likewise.

    Returns:
        The input, and the number of each token among those that are read, any at padding.
        ``[B, P + R]`` long.
    """
    real, prompt = sequences.attention_mask, sequences.prompt_ids.shape[1]
    ids = sequences.input_ids.masked_fill(~real, 0)
    grid = _Packed(real, ids, prompt, multiple) if packed else _Padded(real, ids)
    rows, columns = (torch.arange(n, device=real.device) for n in real.shape)
    places = grid.places(rows[:, None], columns[None])
    return grid.inputs, places.clamp(0, grid.inputs.input_ids.numel() - 1)


class _Padded:
    """A ``[B, S]`` grid as it is."""

    def __init__(self, real: Tensor, ids: Tensor) -> None:
        used = int(real.any(0).nonzero().max()) + 1
        ids, mask, positions = (x[:, :used] for x in (ids, real.long(), position_ids(real)))
        self.inputs = ModelInputs(ids, mask, positions)
        self._size, self._width = real.shape, used

    @property
    def cells(self) -> Tensor:
        """Place in the grid, read row by row, of each token of the input. ``[B, used]`` long."""
        rows, width = self._size
        numbers = torch.arange(rows * width, device=self.inputs.input_ids.device)
        return numbers.view(rows, width)[:, : self._width]

    def places(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Number of some tokens among those that are read."""
        return rows * self._width + columns


class _Packed:
    """The real tokens of a ``[B, S]`` grid, one row after the other.

    A prompt that stands in several rows is read once: in the first of them, its leader.

    Args:
        real: Tokens to read. ``[B, S]`` bool.
        ids: Of all. ``[B, S]`` long.
        prompt: Columns of prompts.
        multiple: Their number is made one of this.
    """

    def __init__(self, real: Tensor, ids: Tensor, prompt: int, multiple: int) -> None:
        self._prompt, self._width = prompt, real.shape[1]
        self._leaders = first_alike(ids[:, :prompt], real[:, :prompt])
        own = self._leaders == torch.arange(len(real), device=real.device)
        kept = real.clone()
        kept[:, :prompt] &= own[:, None]
        if multiple > 1:
            filler = _filler(real, kept, multiple)
            rows = torch.arange(len(real), len(real) + len(filler), device=real.device)
            real, kept = torch.cat([real, filler]), torch.cat([kept, filler])
            ids = torch.cat([ids, ids.new_zeros(filler.shape, dtype=ids.dtype)])
            self._leaders = torch.cat([self._leaders, rows])
        self._numbers = kept.flatten().cumsum(0) - 1
        taken, positions = kept.flatten().nonzero()[:, 0], position_ids(real)
        packing = Packing.of(real.sum(1)) if own.all() else self._shared(real, kept, positions)
        self.inputs = packed_inputs(ids.flatten()[taken], positions.flatten()[taken], packing)
        self.cells = taken[None]  # in the grid, of each token of the input; [1, T]

    def places(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Number of some tokens among those that are read."""
        rows = self._leaders[rows].where(columns < self._prompt, rows)
        return self._numbers[rows * self._width + columns]

    def _shared(self, real: Tensor, kept: Tensor, positions: Tensor) -> Packing:
        lengths = tuple(real.sum(1).tolist())
        rows, columns = real.nonzero().unbind(1)
        cells = rows * max(lengths) + positions[rows, columns]
        count = len(lengths) * max(lengths)
        # Padding reads tokens in turn: if all read one, their gradients of 0 would queue up at it.
        tokens = torch.arange(count, device=real.device) % int(kept.sum())
        tokens[cells] = self.places(rows, columns)
        return Packing(lengths, cells[kept[rows, columns]], tokens)


def _rows_of(asked: Tensor, size: int, multiple: int) -> Tensor | None:
    """List the tokens that are asked about, and others up to a round number.

    Args:
        asked: Some of them several times. ``[N]`` long.
        size: Tokens that there are.
        multiple: Of ``rounded_up``.

    Returns:
        ``[K]`` long, in order, each once; None if it would be all.
    """
    taken = torch.zeros(size, dtype=torch.bool, device=asked.device).index_fill_(0, asked, True)
    count = int(taken.sum())
    wanted = rounded_up(max(count, 1), multiple)  # none at all is a shape that layers may not know
    if wanted >= size:
        return None
    taken[(~taken).nonzero()[: wanted - count, 0]] = True
    return taken.nonzero()[:, 0]


def _without_last(real: Tensor, prompt: int) -> Tensor:
    """Take the last token of each response away; prompts stay whole. ``[B, S]`` bool."""
    kept = real.clone()
    if real.shape[1] > prompt:
        kept[:, prompt:-1] &= real[:, prompt + 1 :]
        kept[:, -1] = False
    return kept


def _filler(real: Tensor, kept: Tensor, multiple: int) -> Tensor:
    """Rows of tokens that nobody sees, none longer than the longest of those that there are.

    Args:
        real: Tokens of each row. ``[B, S]`` bool.
        kept: Those that are read. ``[B, S]`` bool.
        multiple: Their number is rounded up to one of this, see ``rounded_up``.

    Returns:
        ``[C, S]`` bool, C may be 0.
    """
    count, longest = torch.stack([kept.sum(), real.sum(1).max()]).tolist()
    missing = rounded_up(count, multiple) - count
    starts = torch.arange(0, missing, max(longest, 1), device=real.device)
    lengths = (missing - starts).clamp_max(longest)
    taken: Tensor = torch.arange(real.shape[1], device=real.device) < lengths[:, None]
    return taken
