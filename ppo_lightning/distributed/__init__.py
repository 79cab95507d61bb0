"""What spans ranks: sums, agreed decisions, and who owns which response."""

from ppo_lightning.distributed.faults import fault_point
from ppo_lightning.distributed.indices import owned_indices
from ppo_lightning.distributed.reduce import (
    all_reduce_max,
    all_reduce_sum,
    any_rank,
    gather_objects,
    is_distributed,
    max_over_ranks,
    rank,
    shares_gradients,
    world_size,
)

__all__ = [
    "all_reduce_max",
    "all_reduce_sum",
    "any_rank",
    "fault_point",
    "gather_objects",
    "is_distributed",
    "max_over_ranks",
    "owned_indices",
    "rank",
    "shares_gradients",
    "world_size",
]
