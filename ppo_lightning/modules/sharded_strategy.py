"""FSDP2 as a strategy of Lightning: weights, gradients and moments in shards."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.optim import Optimizer
from typing_extensions import override

from ppo_lightning.checkpointing import (
    is_in_parts,
    made_whole,
    read_checkpoint,
    read_parts,
    why_not,
    write_parts,
)
from ppo_lightning.configs import OptimizerConfig, PolicyConfig
from ppo_lightning.configs.checks import require_at_least
from ppo_lightning.distributed import use_replicas, whole_on_cpu
from ppo_lightning.errors import ConfigError
from ppo_lightning.modules.placing import brought, states_placed
from ppo_lightning.rollout import BackgroundEngine, RolloutEngine

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FSDP2Strategy(ModelParallelStrategy):
    """Cut weights, gradients and moments over all ranks (FSDP2): ``trainer.strategy: fsdp``.

    A block is put together where it is computed; the whole actor, for a rollout. Checkpoints are
    files with all weights in one piece, as those of every other strategy, unless asked otherwise: a
    run may go on from one with another strategy, or another number of ranks.

    Args:
        tensor_parallel_size: Ranks that hold a model between them, each a part of every layer
            (tensor parallel); they take the same responses. On one machine, best.
        sharded_checkpoints: Write checkpoints in parts: a folder to which every rank writes its
            share, so that none needs the room for all weights. Every strategy reads both kinds.
        process_group_backend: ``nccl`` or ``gloo``; None takes what suits the device.
        timeout: Longest wait for another rank.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        sharded_checkpoints: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        require_at_least("tensor_parallel_size", tensor_parallel_size, 1)
        self.sharded_checkpoints = sharded_checkpoints
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @override
    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        peers = int(self._tensor_parallel_size)
        if self.world_size % peers:
            raise ConfigError(
                f"`tensor_parallel_size` ({peers}) must divide the number of processes "
                f"({self.world_size}): set another, or other `trainer.devices`."
            )
        self._data_parallel_size = self.world_size // peers
        # What our networks return is not written to.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._tensor_parallel_size != 1:
            mesh = self.device_mesh
            use_replicas(mesh.get_group("data_parallel"), mesh.get_group("tensor_parallel"))

    @override
    def teardown(self) -> None:
        use_replicas()
        super().teardown()

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # weights are cut in `configure_model`, which comes before

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        own = module.state_dict()
        weights = {
            name: brought(weight, own[name]) if name in own else weight
            for name, weight in checkpoint["state_dict"].items()
        }
        module.load_state_dict(weights, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return optimizer.state_dict()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(states_placed(state, optimizer))
            _optimizer_to_device(optimizer, self.root_device)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        path = self.broadcast(filepath)
        if self.sharded_checkpoints:
            write_parts(checkpoint, path)
        else:
            found = whole_on_cpu(checkpoint, keep=self.is_global_zero)
            Strategy.save_checkpoint(self, found, path, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        path = self.broadcast(checkpoint_path)
        if not is_in_parts(path):
            if why_not(path) is None:  # mapped: each rank reads its own parts of the weights
                return dict(read_checkpoint(path))
            return Strategy.load_checkpoint(self, path, weights_only)
        # Weights and moments are read when it is known which part of them is this rank's.
        cut = ("state_dict", "optimizer_states")
        return {k: v if k in cut else made_whole(v) for k, v in read_parts(path).items()}


_OPTIMIZERS = ("AdamW", "Adam", "SGD")
"""Those that step shards as they step whole weights, as tests have seen."""


def mesh_of(trainer: Any) -> DeviceMesh | None:
    """Ranks that weights are to be cut over, as FSDP2Strategy lays them out; None without it."""
    strategy = None if trainer is None else trainer.strategy
    return strategy.device_mesh if isinstance(strategy, FSDP2Strategy) else None


def check_shardable(
    policy: PolicyConfig,
    optimizer: OptimizerConfig,
    engine: RolloutEngine,
    *,
    peers: int = 1,
    by: str = "weights in shards",
) -> None:
    """Refuse what has not been made to work with weights, or their moments, cut over ranks.

    Args:
        policy: The actor's.
        optimizer: Of both networks.
        engine: Samples responses.
        peers: Ranks that hold a model between them.
        by: What cuts them, for the message.

    Raises:
        ConfigError: Names the setting.
    """
    unknown = {
        "policy.quantization": policy.quantization is not None,
        "policy.compile": policy.compile,
        "optimizer.offload": optimizer.offload,
        "engine.init_args.dtype": engine.dtype is not None,
        f"optimizer.name: {optimizer.name}": optimizer.name not in _OPTIMIZERS,
    }
    if peers > 1 and isinstance(engine, BackgroundEngine):
        raise ConfigError(
            f"`engine` cannot be a {type(engine).__name__} with `tensor_parallel_size` ({peers}): "
            "its process would need whole layers. Leave out one of them."
        )
    for setting, given in unknown.items():
        if given:
            raise ConfigError(
                f"`{setting}` cannot be used with {by}: leave it out, or set "
                "`trainer.strategy: ddp`."
            )
