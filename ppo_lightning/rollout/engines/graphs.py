"""Steps of slots as CUDA graphs: launched as one, where the host would launch kernel by kernel.

A graph is fixed in its shapes and addresses. So there is one for each bucket of slots and columns,
and what changes goes in and comes out through buffers that stay where they are.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

Step = Callable[[Tensor, Tensor, int], Tensor]
"""Reads a token in each of the first slots: ids and lengths, ``[N]`` long on the model's device,
and the columns that are looked at; returns logits ``[N, V]``. Twice the same is the same."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records what a function asks of the device without doing it, and returns what does it. Raises
``RuntimeError`` where that cannot be recorded."""

COLUMNS = 128
"""Columns are looked at in multiples of it."""

_PLAIN_STEPS = 2  # in a bucket before it is recorded: libraries set themselves up, short visits end
_TOLERANCE = 1e-2


class StepGraphs:
    """Runs steps, and replays those of a bucket that goes on.

    A recording is believed only once its first replay has said what the plain step said. If one
    fails, all steps from there on are plain. The graphs share their memory and live as long as
    this object.

    Args:
        step: What is recorded.
        count: Slots.
        width: Most tokens of a sequence.
        device: Of the model.
        capture: See ``Capture``.
    """

    def __init__(
        self, step: Step, count: int, width: int, device: torch.device, capture: Capture
    ) -> None:
        self._step, self._capture = step, capture
        self._count, self._width = count, width
        self._ids, self._lengths = torch.zeros(2, count, dtype=torch.long, device=device)
        self._logits: Tensor | None = None
        self._visits: Counter[tuple[int, int]] = Counter()
        self._replays: dict[tuple[int, int], Replay] = {}
        self._recording = True

    def __call__(self, ids: Tensor, lengths: Tensor, span: int) -> Tensor:
        """Read one more token in each of the first slots.

        Slots behind them, up to the bucket's end, get a token too: they must hold nothing.

        Args:
            ids: On the host. ``[N]`` long.
            lengths: Tokens that each slot holds already, on the host. ``[N]`` long.
            span: One more than the largest length.

        Returns:
            Logits after the tokens, good until the next call. ``[N, V]``.
        """
        count = len(ids)
        slots = min(slots_of(count), self._count)
        bucket = slots, min(-(-span // COLUMNS) * COLUMNS, self._width)
        for buffer, values in ((self._ids, ids), (self._lengths, lengths)):
            _fill(buffer[:count], values)
            buffer[count:slots].zero_()
        self._run(bucket)
        assert self._logits is not None
        return self._logits[:count]

    def _run(self, bucket: tuple[int, int]) -> None:
        if (replay := self._replays.get(bucket)) is not None:
            replay()
            return
        self._plain(bucket)
        self._visits[bucket] += 1
        if self._recording and self._visits[bucket] == _PLAIN_STEPS:
            self._record(bucket)

    def _plain(self, bucket: tuple[int, int]) -> None:
        slots, span = bucket
        logits = self._step(self._ids[:slots], self._lengths[:slots], span)
        if self._logits is None:
            self._logits = logits.new_empty(self._count, logits.shape[1])
        self._logits[:slots] = logits

    def _record(self, bucket: tuple[int, int]) -> None:
        assert self._logits is not None
        expected = self._logits[: bucket[0]].clone()
        try:
            replay = self._capture(lambda: self._plain(bucket))
            replay()
            found = self._logits[: bucket[0]]
            if torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                self._replays[bucket] = replay
                return
            reason = "a replay says otherwise than the step that was recorded"
        except RuntimeError as error:  # a step that waits for the device, or no memory left
            reason = str(error).partition("\n")[0]
        log.warning("decoding goes on without CUDA graphs: %s", reason)
        self._recording = False
        self._replays.clear()
        self._plain(bucket)


def slots_of(count: int) -> int:
    """Round slots up to a power of two, or to one and a half times such."""
    whole = 1 << max(0, count - 1).bit_length()
    return whole * 3 // 4 if count <= whole * 3 // 4 else whole


def _fill(buffer: Tensor, values: Tensor) -> None:
    if buffer.is_cuda:
        buffer.copy_(values.pin_memory(), non_blocking=True)
    else:
        buffer.copy_(values)


def can_be_recorded(model: nn.Module, device: torch.device) -> bool:
    """Whether steps of a model may become graphs: on a GPU, whole, and watched by nobody.

    What hooks do (sharding, offloading) happens when a step is recorded, not when it is replayed.
    """
    return device.type == "cuda" and is_whole_on(model, device)


def is_whole_on(model: nn.Module, device: torch.device) -> bool:
    """Whether a model's weights lie on one device and no hook takes part in its forward pass."""
    watched = any(
        part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
        for part in model.modules()
    )
    return not watched and all(weight.device == device for weight in model.parameters())


def cuda_capture() -> Capture:
    """Record with ``torch.cuda.graph``, all graphs in one pool of memory: one runs at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # Other threads (of data loaders, say) may go on to ask for memory meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
        return graph.replay

    return capture
