"""What a checkpoint of PPO says of its networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor

from ppo_lightning.checkpointing.entry import KEY, PPO
from ppo_lightning.checkpointing.parts import made_whole
from ppo_lightning.checkpointing.reading import read_checkpoint
from ppo_lightning.configs import (
    CriticConfig,
    LoraConfig,
    PolicyConfig,
    ReferenceConfig,
    SamplingConfig,
)
from ppo_lightning.errors import CheckpointError

EMA_STATE = "ActorEMA"
"""Where a checkpoint keeps the average of the actor's weights, among the callbacks' states."""

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class CheckpointModels:
    """What a checkpoint says of its networks.

    Args:
        path: The checkpoint.
        policy: How the actor was loaded.
        critic: How the critic was.
        reference: How the reference was.
        sampling: How responses were sampled.
        weights: Trained weights, by their names in the LightningModule.
        fingerprint: Of the frozen weights beside them; empty where there are none.
        chat: Whether plain prompts were turns of a chat, as the data module takes it.
        system_prompt: First turn of every chat without one.
        ema: Average of the actor's trained weights, by their names in the actor; empty without the
            callback ``ActorEMA``.
        ema_validated: Whether it is the average that answered the held-out prompts.
    """

    path: Path
    policy: PolicyConfig
    critic: CriticConfig
    reference: ReferenceConfig
    sampling: SamplingConfig
    weights: Mapping[str, Tensor]
    fingerprint: str
    chat: bool | Literal["auto"] = "auto"
    system_prompt: str | None = None
    ema: Mapping[str, Tensor] = field(default_factory=dict)
    ema_validated: bool = False

    @property
    def source(self) -> str:
        """Path of the model that the actor began as."""
        return self.policy.path

    def weights_of(self, prefix: str) -> dict[str, Tensor]:
        """Return the weights whose names begin with ``prefix``, without it."""
        return {k.removeprefix(prefix): v for k, v in self.weights.items() if k.startswith(prefix)}


def checkpoint_kind(path: str | Path) -> str:
    """Say of what kind of run a checkpoint is: ``ppo``, ``sft`` or ``reward``.

    Raises:
        CheckpointError: No such file, or not one of ours.
    """
    entry = read_whole(Path(path)).get(KEY)
    if not isinstance(entry, Mapping):
        raise CheckpointError(
            f"`{path}` was not written by a module of ppo-lightning: it does not name its models."
        )
    return str(entry.get("kind", PPO))


def read_models(path: str | Path, *, policy_path: str | None = None) -> CheckpointModels:
    """Read a checkpoint; only tensors and plain containers are taken from it.

    Args:
        path: File that the Trainer wrote.
        policy_path: Where the starting model lies now, if it was moved since.

    Raises:
        CheckpointError: No such file, not one of ours, or of a newer version.
    """
    path = Path(path)
    checkpoint = read_whole(path)
    entry = checkpoint.get(KEY)
    if not isinstance(entry, Mapping) or "models" not in entry or entry.get("kind", PPO) != PPO:
        raise CheckpointError(
            f"`{path}` was not written by PPOModule: it does not name its models."
        )
    models = entry["models"]
    average = checkpoint.get("callbacks", {}).get(EMA_STATE, {})
    policy = rebuilt(PolicyConfig, models["policy"], path)
    return CheckpointModels(
        path=path,
        policy=policy if policy_path is None else replace(policy, path=policy_path),
        critic=rebuilt(CriticConfig, models["critic_model"], path),
        reference=rebuilt(ReferenceConfig, models["reference"], path),
        sampling=rebuilt(SamplingConfig, models["sampling"], path),
        weights=checkpoint["state_dict"],
        fingerprint=entry.get("fingerprint", ""),
        ema=average.get("weights", {}),
        ema_validated=bool(average.get("validated", average)),
        **_prompting(checkpoint),
    )


def _prompting(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the data module, whatever its class, left about prompts; maybe nothing."""
    names = ("chat", "system_prompt")
    parts = [part for part in checkpoint.values() if isinstance(part, Mapping)]
    found = [part for part in parts if all(name in part for name in names)]
    return {name: found[0][name] for name in names} if found else {}


def read_whole(path: Path) -> Mapping[str, Any]:
    """Read a checkpoint of Lightning.

    Raises:
        CheckpointError: No such file, or it is none.
    """
    try:
        checkpoint: Mapping[str, Any] = made_whole(read_checkpoint(path))
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint `{path}` {error}.") from error
    if "state_dict" not in checkpoint:
        raise CheckpointError(f"`{path}` is not a checkpoint of Lightning.")
    return checkpoint


def rebuilt(kind: type[Config], settings: Mapping[str, Any], path: Path) -> Config:
    """Make a config of the plain values in a checkpoint.

    Args:
        kind: Its class.
        settings: By field.
        path: The checkpoint, for the message.

    Raises:
        CheckpointError: A field is unknown to this version.
    """
    values = dict(settings)
    if values.get("lora") is not None:
        values["lora"] = LoraConfig(**values["lora"])
    try:
        return kind(**values)
    except TypeError as error:
        raise CheckpointError(
            f"`{path}` has settings that this version does not know ({error}). Use the version of "
            "ppo-lightning that wrote it."
        ) from error
