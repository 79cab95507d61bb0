"""What a cluster is made of, as far as a plan needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ppo_lightning.configs.checks import require, require_positive, require_within


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """GPUs in nodes. Peaks are those of data sheets; shares say what is attained of them.

    Args:
        flops: Products in 16 bits, dense, a second.
        flops_float32: In float32, a second.
        memory: Of a GPU, in bytes.
        memory_bandwidth: Of a GPU, in bytes a second.
        node_gpus: GPUs of a node.
        node_bandwidth: Between GPUs of a node, one way, in bytes a second for each.
        network_bandwidth: Between nodes, one way, in bytes a second for each GPU.
        latency: Of one collective, in seconds.
        memory_share: Of the memory, what tensors may take; the rest is the driver's, the
            allocator's and the collectives'.
        flops_share: Attained in training and scoring.
        memory_bandwidth_share: Attained in decoding.
        network_share: Attained between GPUs.
    """

    flops: float = 989e12
    flops_float32: float = 67e12
    memory: float = 80e9
    memory_bandwidth: float = 3.35e12
    node_gpus: int = 8
    node_bandwidth: float = 450e9
    network_bandwidth: float = 50e9
    latency: float = 20e-6
    memory_share: float = 0.9
    flops_share: float = 0.4
    memory_bandwidth_share: float = 0.6
    network_share: float = 0.7

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name.endswith("_share"):
                require_within(entry.name, value, 1e-3, 1)
            require_positive(entry.name, value)

    @property
    def usable_memory(self) -> int:
        """Bytes that tensors may take on a GPU."""
        return int(self.memory * self.memory_share)

    def link(self, ranks: int, *, apart: int = 1) -> float:
        """Bytes a second that each of some ranks sends to the next, around a ring.

        Within a node it is the node's own links. A ring over nodes leaves each once: so many ranks
        of it as are in one node bring as many network cards.

        Args:
            ranks: That take part.
            apart: They are every so-manieth rank; 1 is neighbours.
        """
        in_node = max(1, min(ranks, self.node_gpus // apart))
        if ranks * apart <= self.node_gpus:
            return self.node_bandwidth * self.network_share
        across = in_node * self.network_bandwidth
        return min(self.node_bandwidth, across) * self.network_share


# NVIDIA's data sheets: H100 SXM (989 teraflops in bfloat16 without sparsity, 67 in float32, 80 GB,
# 3.35 TB/s, NVLink 900 GB/s both ways together), H200 (the same with 141 GB, 4.8 TB/s), A100 80GB
# SXM (312 and 19.5 teraflops, 2.04 TB/s, NVLink 600 GB/s). Between nodes one card of 400 Gb/s for
# each GPU (A100: 200). The share of products is what Llama 3 was trained with (38 to 43 %,
# arXiv:2407.21783, table 4); the others are round numbers that nobody has measured here.
HARDWARE: Mapping[str, Hardware] = {
    "h100": Hardware(),
    "h200": Hardware(memory=141e9, memory_bandwidth=4.8e12),
    "a100": Hardware(
        flops=312e12,
        flops_float32=19.5e12,
        memory_bandwidth=2.04e12,
        node_bandwidth=300e9,
        network_bandwidth=25e9,
    ),
}
"""By the name that ``--hardware`` takes."""


def hardware_of(words: Sequence[str]) -> Hardware:
    """Read what ``--hardware`` was given.

    Args:
        words: A name of ``HARDWARE``, and ``KEY=NUMBER`` for what differs from it.

    Raises:
        ValueError: Names what is not known, or no number.
    """
    found = HARDWARE["h100"]
    names = [word for word in words if "=" not in word]
    require(len(names) <= 1, f"`--hardware` takes one name, got {' and '.join(names)}.")
    for name in names:
        require(
            name in HARDWARE,
            f"`--hardware {name}` is not known: take one of {', '.join(HARDWARE)}, and KEY=NUMBER "
            "for what differs from it.",
        )
        found = HARDWARE[name]
    changes: dict[str, Any] = dict(_setting(word) for word in words if "=" in word)
    return replace(found, **changes)


def _setting(word: str) -> tuple[str, float | int]:
    key, _, text = word.partition("=")
    known = [entry.name for entry in fields(Hardware)]
    require(key in known, f"`--hardware {word}`: there is no {key}; known are {', '.join(known)}.")
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError(f"`--hardware {word}`: {text!r} is no number.") from error
    if key != "node_gpus":
        return key, value
    require(value == int(value), f"`--hardware {word}` must be a whole number.")
    return key, int(value)
