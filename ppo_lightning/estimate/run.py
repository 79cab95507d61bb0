"""What a run does, as far as its memory depends on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ppo_lightning.configs import (
    BufferConfig,
    CriticConfig,
    DType,
    KLConfig,
    OptimizerConfig,
    PolicyConfig,
    PPOConfig,
    Quantization,
    ReferenceConfig,
    SamplingConfig,
)
from ppo_lightning.configs.checks import require, require_at_least
from ppo_lightning.estimate.strategy import Strategy

Device = Literal["cpu", "cuda"]

_COMPUTES = {
    "32-true": "float32",
    "32": "float32",
    "64-true": "float64",
    "64": "float64",
    "bf16-mixed": "bfloat16",
    "16-mixed": "float16",
}


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A learned reward.

    Args:
        name: Of the component.
        path: As in ``SequenceClassifierReward``, as for the rest.
        dtype: Of the weights.
        batch_size: Most texts in a forward pass.
        batch_tokens: Most tokens in a forward pass.
        max_length: Most tokens of a text.
        quantization: ``int8``, ``nf4``, or None.
        trust_remote_code: Run code that the folder carries.
    """

    name: str
    path: str
    dtype: DType = "float32"
    batch_size: int = 16
    batch_tokens: int | None = None
    max_length: int | None = None
    quantization: Quantization | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """A PPO run, at its largest: every prompt is the longest, every response uses its budget.

    Args:
        policy: The actor.
        prompt_tokens: Of the longest prompt.
        critic_model: The value network.
        reference: The frozen model.
        sampling: How responses are sampled.
        ppo: Objective and microbatches.
        kl: Penalty towards the reference.
        optimizer: Of actor and critic.
        buffer: Responses of an iteration, over all ranks.
        rewards: Learned ones; rules take next to nothing.
        precision: Of the Trainer.
        device: What the networks lie on.
        ranks: Processes.
        strategy: What they share besides the responses.
        tensor_limit: Most ranks that could compute a layer together, as far as is known.
        mapped: Of a CPU: whether large blocks are mapped, see ``ppo_lightning.estimate.process``.
    """

    policy: PolicyConfig
    prompt_tokens: int
    critic_model: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    rewards: tuple[RewardModel, ...] = ()
    precision: str = "32-true"
    device: Device = "cpu"
    ranks: int = 1
    strategy: Strategy = field(default_factory=Strategy)
    tensor_limit: int = 1
    mapped: bool = False

    def __post_init__(self) -> None:
        require_at_least("prompt_tokens", self.prompt_tokens, 1)
        require_at_least("ranks", self.ranks, 1)
        require(
            self.ranks % self.strategy.tensor == 0,
            f"`--tensor-parallel {self.strategy.tensor}` does not divide the {self.ranks} ranks "
            "of `trainer.devices` and `trainer.num_nodes`.",
        )
        require(
            self.precision in _COMPUTES,
            f"`precision` must be one of {', '.join(_COMPUTES)} for an estimate, "
            f"got {self.precision!r}.",
        )

    @property
    def data_ranks(self) -> int:
        """Ranks that read different responses."""
        return self.ranks // self.strategy.tensor

    @property
    def is_alone(self) -> bool:
        """Whether it is of one process."""
        return self.ranks == 1

    @property
    def shares_gradients(self) -> bool:
        """Whether ranks add gradients up: they then last as long as an update."""
        return self.strategy.kind != "single"

    @property
    def takes_process(self) -> bool:
        """Whether what a process on a CPU takes is part of the estimate.

        It was measured where every process holds whole networks, on one machine.
        """
        return self.device == "cpu" and self.strategy.kind in ("single", "ddp")

    @property
    def num_responses(self) -> int:
        """Of an iteration on one rank, at most."""
        return -(-self.buffer.num_responses // self.data_ranks)

    @property
    def minibatch_rows(self) -> int:
        """Responses of the largest minibatch on one rank."""
        return -(-self.num_responses // self.buffer.num_minibatches)

    @property
    def kept_bytes(self) -> int:
        """Of a rollout between the stages: ids, masks and some ten columns of numbers."""
        return 64 * self.num_responses * self.sampling.max_new_tokens

    @property
    def mixed_dtype(self) -> str | None:
        """What products are computed in where that is not the weights' own dtype."""
        return _COMPUTES[self.precision] if "mixed" in self.precision else None
