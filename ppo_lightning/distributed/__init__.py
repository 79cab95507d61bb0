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
from ppo_lightning.distributed.shards import (
    as_shard,
    gathered,
    is_shard,
    is_sharded,
    local,
    mapped,
    placed_like,
    shard,
    whole,
    whole_on_cpu,
)

__all__ = [
    "all_reduce_max",
    "all_reduce_sum",
    "any_rank",
    "as_shard",
    "fault_point",
    "gather_objects",
    "gathered",
    "is_distributed",
    "is_shard",
    "is_sharded",
    "local",
    "mapped",
    "max_over_ranks",
    "owned_indices",
    "placed_like",
    "rank",
    "shard",
    "shares_gradients",
    "whole",
    "whole_on_cpu",
    "world_size",
]
