"""What a process on a CPU takes beside its tensors, as measured on Linux."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import NamedTuple

from ppo_lightning.modules.host_memory import KEPT_BYTES

LIBRARIES = 24 * 2**20
"""What a load first uses after the imports, in bytes: the Trainer, a family's modules."""

ADAPTER_LIBRARY = 10 * 2**20
"""The same of PEFT."""

QUANTISER_LIBRARY = 46 * 2**20
"""The same of bitsandbytes, which PEFT imports where it is installed."""

KERNELS = 24 * 2**20
"""What the first passes use: the kernels of oneDNN and their buffers, the stacks of threads."""

VOCABULARY_ENTRY = 500
"""Of the tokenizers that are loaded, for each token."""


class HeapShares(NamedTuple):
    """What glibc's allocator takes beside tensors that come and go.

    It gives blocks below 32 MiB back to the system from the end of its heap only, and new tensors
    seldom fit into the gaps. What is at the end it keeps, see ``modules.host_memory``.

    Attributes:
        own: In parts of the tensors of this stage.
        before: In parts of what the tensors of a stage before took beyond those of this one.
    """

    own: float
    before: float


PLAIN = HeapShares(0.4, 1.0)
MIXED = HeapShares(0.75, 1.0)
"""Where small tensors are kept between large ones that are not: with adapters, and in
``bf16-mixed``."""

RECOMPUTED = HeapShares(0.75, 1.0)
"""Where activations are made again, and gradients are kept between them."""

MAPPED = HeapShares(0.05, 0.0)
"""Where large blocks are mapped one by one, see ``MAPPING``."""

MAPPING = "MALLOC_MMAP_THRESHOLD_"
"""Environment variable of glibc: blocks of so many bytes are mapped, and given back when freed."""

_FIXED = (MAPPING, "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")


def maps_blocks(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether glibc keeps to mapping large blocks, which it else unlearns when one is freed."""
    return any(name in environment for name in _FIXED)


def process_bytes(
    passing: int,
    before: int,
    shares: HeapShares,
    *,
    vocabulary: int,
    adapted: bool,
    computes: bool,
) -> dict[str, int]:
    """Predict what is not tensors at the peak of a stage.

    Args:
        passing: Bytes of the tensors of this stage alone.
        before: The most there were of such in a stage before.
        shares: Of the stage.
        vocabulary: Tokens that the actor knows.
        adapted: Whether it has adapters.
        computes: Whether a pass has been made.
    """
    libraries = LIBRARIES + VOCABULARY_ENTRY * vocabulary
    libraries += computes * KERNELS
    if adapted:
        libraries += ADAPTER_LIBRARY + (QUANTISER_LIBRARY if find_spec("bitsandbytes") else 0)
    kept = min(max(before - passing, 0), KEPT_BYTES)
    return {"libraries": libraries, "heap": int(shares.own * passing + shares.before * kept)}
