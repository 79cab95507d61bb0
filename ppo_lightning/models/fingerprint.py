"""A short digest of weights, to notice that a model is not the one it was."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def fingerprint(module: nn.Module) -> str:
    """Digest of the frozen weights: names, shapes, and the first and last values of each.

    Returns:
        Hexadecimal, or ``""`` where nothing is frozen.
    """
    digest, found = hashlib.sha256(), False
    for name, parameter in sorted(module.named_parameters()):
        if parameter.requires_grad:
            continue
        found = True
        flat = parameter.detach().flatten()
        ends = torch.cat([flat[:32], flat[-32:]]).float().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(ends.numpy().tobytes())
    return digest.hexdigest() if found else ""
