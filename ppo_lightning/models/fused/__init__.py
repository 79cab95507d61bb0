"""Layers that compute the same in fewer operations, in the place of a family's.

Nothing is assumed of a family but names: whether ours does what its layer does is found out by
trying both on a few rows. Linear layers need no trial: they are torch's or transformers' own.
"""

from ppo_lightning.models.fused.classes import family_of
from ppo_lightning.models.fused.gates import FusedGate, gated, recompute_gates
from ppo_lightning.models.fused.layers import fuse_layers
from ppo_lightning.models.fused.linear import FusedConv1D, FusedLinear
from ppo_lightning.models.fused.norms import FusedNorm, rms_norm
from ppo_lightning.models.fused.rotary import FusedRotary, turned

__all__ = [
    "FusedConv1D",
    "FusedGate",
    "FusedLinear",
    "FusedNorm",
    "FusedRotary",
    "family_of",
    "fuse_layers",
    "gated",
    "recompute_gates",
    "rms_norm",
    "turned",
]
