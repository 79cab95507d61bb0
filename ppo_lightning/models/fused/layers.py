"""Which layers of a model are replaced for speed."""

from __future__ import annotations

from torch import nn

from ppo_lightning.models.fused.linear import fuse_linear
from ppo_lightning.models.fused.norms import fuse_norms
from ppo_lightning.models.fused.rotary import fuse_rotary


def fuse_layers(model: nn.Module) -> None:
    """Replace norms, the turning of queries and keys, and linear layers.

    The first two only where a trial gives the same.

    Args:
        model: Just loaded; its weights may lie on the device ``meta``.
    """
    fuse_norms(model)
    fuse_rotary(model)
    fuse_linear(model)
