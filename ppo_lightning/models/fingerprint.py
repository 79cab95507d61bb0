"""A short digest of weights, to notice that a model is not the one it was."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from ppo_lightning.distributed import gather_objects, lies_in_rows, local, shape_of, whole

_ENDS = 32


def fingerprint(module: nn.Module) -> str:
    """Digest of the frozen weights: names, shapes, and the first and last values of each.

    To be called on all ranks where weights lie in shards.

    Returns:
        Hexadecimal, or ``""`` where nothing is frozen.
    """
    named = sorted(module.named_parameters())
    frozen = [(name, weight) for name, weight in named if not weight.requires_grad]
    digest = hashlib.sha256()
    for (name, weight), (first, last) in zip(frozen, _ends([w for _, w in frozen]), strict=True):
        ends = torch.cat([first[:_ENDS], last[-_ENDS:]]).float()
        digest.update(f"{name}{tuple(shape_of(weight))}".encode())
        digest.update(ends.numpy().tobytes())
    return digest.hexdigest() if frozen else ""


def _ends(weights: list[nn.Parameter]) -> list[tuple[Tensor, Tensor]]:
    """First and last values of each weight, on the CPU; those of all its shards one by one."""
    own = []
    for weight in weights:
        # In more dimensions a rank's part is no run of rows.
        rows = weight if lies_in_rows(weight) else whole(weight)
        rows = rows.detach()
        flat = local(rows).flatten()
        own.append((flat[:_ENDS].cpu(), flat[-_ENDS:].cpu()))
    cut = [lies_in_rows(weight) for weight in weights]
    if not any(cut):
        return own
    parts = gather_objects([own])
    return [
        (torch.cat([part[i][0] for part in parts]), torch.cat([part[i][1] for part in parts]))
        if cut[i]
        else own[i]
        for i in range(len(weights))
    ]
