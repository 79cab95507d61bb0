"""DeepSpeed's ZeRO as a strategy of Lightning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ppo_lightning.checkpointing.entry import frozen_names
from ppo_lightning.configs.checks import require
from ppo_lightning.distributed import is_sharded, leave_together, use_offload, whole_on_cpu
from ppo_lightning.errors import ConfigError
from ppo_lightning.modules.sharded_strategy import check_shardable
from ppo_lightning.modules.zero_optimizer import ZeROOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterator

STAGES = {"deepspeed": 2} | {f"deepspeed_stage_{stage}": stage for stage in (1, 2, 3)}
"""Values of ``trainer.strategy`` that mean a stage."""


class ZeROStrategy(DDPStrategy):
    """Cut moments (stage 1), gradients (2) and weights (3) over ranks: DeepSpeed's ZeRO.

    Weights, gradients and moments are in float32; ``trainer.precision: bf16-mixed`` computes in
    bfloat16. Checkpoints are files with all weights and moments in one piece, as those of every
    other strategy: a run may go on from one with another strategy, or another number of ranks.

    Args:
        stage: 1, 2 or 3.
        zero: More settings of DeepSpeed's ``zero_optimization``, such as the sizes of buckets.
        process_group_backend: ``nccl`` or ``gloo``; None takes what suits the device.
        timeout: Longest wait for another rank.
    """

    def __init__(
        self,
        stage: int = 2,
        zero: Mapping[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        require(stage in (1, 2, 3), f"`stage` must be 1, 2 or 3, got {stage}.")
        for name in zero or {}:
            if name == "stage" or name.startswith("offload"):
                raise ConfigError(
                    f"`zero.{name}` cannot be set here: "
                    + ("set `stage`." if name == "stage" else "states and weights stay on the GPU.")
                )
        if find_spec("deepspeed") is None:
            raise ConfigError(
                "`trainer.strategy`: DeepSpeed is not installed; `pip install "
                "'ppo-lightning[deepspeed]'`, or set `fsdp`, which cuts as stage 3 does."
            )
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.stage, self.zero = stage, dict(zero or {})

    @override
    def configure_ddp(self) -> None:
        """Do nothing: DeepSpeed wraps the networks once there is an optimiser."""

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        networks = getattr(self.lightning_module, "networks", None)
        if networks is None:
            raise ConfigError(
                "`trainer.strategy`: DeepSpeed trains PPO alone; set `ddp` for other modules."
            )
        base: Optimizer = self.optimizers[0]
        groups = [list(group["params"]) for group in base.param_groups]
        _check(self.lightning_module, groups, self.stage)
        warnings.filterwarnings("ignore", "`torch.distributed.", FutureWarning)
        with _quiet():
            engine = self._engine(networks, base)
        self.optimizers = [ZeROOptimizer(engine, base, groups)]
        use_offload(getattr(engine.optimizer, "parameter_offload", None))

    def _engine(self, networks: Any, base: Optimizer) -> Any:
        if self.root_device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at the import
        import deepspeed

        deepspeed.utils.logging.logger.setLevel("ERROR")
        if self.root_device.type == "cpu":
            # An all-reduce by shared memory that it would compile at every start.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        engine, *_ = deepspeed.initialize(
            model=networks,
            optimizer=base,
            config={
                "train_micro_batch_size_per_gpu": 1,  # for its logs
                "gradient_accumulation_steps": 1,  # said before each pass
                "gradient_clipping": 0.0,  # by the norm of both networks, where not 0
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": self.stage, **self.zero},
            },
            dist_init_required=False,
        )
        return engine

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        found: Any = self.optimizers[0]
        found.backward(closure_loss)
        return closure_loss

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """State of the module, whole on the first rank; of frozen weights maybe without numbers."""
        module: Any = self.lightning_module
        if not is_sharded(module):
            return super().lightning_module_state_dict()
        frozen = frozen_names(module)
        state = module.state_dict(keep_vars=True)
        trained = {name: value for name, value in state.items() if name not in frozen}
        found = whole_on_cpu(trained, keep=self.is_global_zero)
        return {name: found.get(name, value).detach() for name, value in state.items()}

    @override
    def teardown(self) -> None:
        use_offload()
        module: Any = self.lightning_module
        ended = module is not None and module.trainer.state.status == TrainerStatus.RUNNING
        for optimizer in self.optimizers:
            if isinstance(optimizer, ZeROOptimizer):
                optimizer.engine.destroy()  # or its hooks would stay on the weights
        if ended and is_sharded(module):  # after an error ranks may not wait for each other
            leave_together(module)
        super().teardown()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.optimizers[0].state_dict()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed's use of older names to itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _check(module: Any, groups: list[list[Any]], stage: int) -> None:
    """Refuse what has not been made to work with DeepSpeed.

    Raises:
        ConfigError: Names the setting.
    """
    check_shardable(module.policy, module.optimizer_config, module.engine, by="DeepSpeed")
    other = {str(p.dtype).removeprefix("torch.") for group in groups for p in group} - {"float32"}
    if other:
        raise ConfigError(
            f"`policy.dtype`: DeepSpeed trains weights in float32, and some are "
            f"{', '.join(sorted(other))}: set `float32`."
        )
    for callback in module.trainer.callbacks if stage == 3 else ():
        if getattr(callback, "reads_weights", False):
            raise ConfigError(
                f"{type(callback).__name__} cannot be used with `deepspeed_stage_3`: leave it out, "
                "or set `trainer.strategy: fsdp`, which cuts the same, or `deepspeed_stage_2`."
            )
