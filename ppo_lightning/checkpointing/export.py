"""From a run's checkpoint to models that stand on their own.

A checkpoint holds the weights that were trained and the settings that the networks were built with;
frozen weights come from their source again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal, TypeVar
from uuid import uuid4

import torch
from torch import Tensor, nn

from ppo_lightning.checkpointing.entry import KEY
from ppo_lightning.checkpointing.reading import read_checkpoint
from ppo_lightning.configs import (
    CriticConfig,
    LoraConfig,
    PolicyConfig,
    ReferenceConfig,
    SamplingConfig,
)
from ppo_lightning.errors import CheckpointError
from ppo_lightning.models import (
    ValueNetwork,
    attach_lora,
    fingerprint,
    is_adapted,
    load_causal_lm,
    load_tokenizer,
    load_value_network,
    merged_copy,
    save_model,
    trained_weights,
)

_ACTOR = "networks.actor."
_CRITIC = "networks.critic."
_VALUE_HEAD = "networks.value_head."

EMA_STATE = "ActorEMA"
"""Where a checkpoint keeps the average of the actor's weights, among the callbacks' states."""

Config = TypeVar("Config", PolicyConfig, CriticConfig, ReferenceConfig, SamplingConfig)


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

    def weights_of(self, prefix: str) -> dict[str, Tensor]:
        """Return the weights whose names begin with ``prefix``, without it."""
        return {k.removeprefix(prefix): v for k, v in self.weights.items() if k.startswith(prefix)}


def read_models(path: str | Path, *, policy_path: str | None = None) -> CheckpointModels:
    """Read a checkpoint; only tensors and plain containers are taken from it.

    Args:
        path: File that the Trainer wrote.
        policy_path: Where the starting model lies now, if it was moved since.

    Raises:
        CheckpointError: No such file, not one of ours, or of a newer version.
    """
    path = Path(path)
    checkpoint = _read(path)
    entry = checkpoint.get(KEY)
    if not isinstance(entry, Mapping) or "models" not in entry:
        raise CheckpointError(
            f"`{path}` was not written by PPOModule: it does not name its models."
        )
    models = entry["models"]
    average = checkpoint.get("callbacks", {}).get(EMA_STATE, {})
    policy = _rebuilt(PolicyConfig, models["policy"], path)
    return CheckpointModels(
        path=path,
        policy=policy if policy_path is None else replace(policy, path=policy_path),
        critic=_rebuilt(CriticConfig, models["critic_model"], path),
        reference=_rebuilt(ReferenceConfig, models["reference"], path),
        sampling=_rebuilt(SamplingConfig, models["sampling"], path),
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


def load_actor(models: CheckpointModels, *, ema: bool = False) -> nn.Module:
    """Build the actor and load its trained weights; adapters are left on it.

    Args:
        models: From ``read_models``.
        ema: Take the average of its weights (callback ``ActorEMA``) instead of the last ones.

    Raises:
        CheckpointError: Weights are missing, or the frozen ones have changed.
        ModelError: The starting model cannot be loaded.
    """
    if ema and not models.ema:
        raise CheckpointError(
            f"`{models.path}` holds no average of the actor's weights: train with the callback "
            "`ppo_lightning.callbacks.ActorEMA`, or leave out `--ema`."
        )
    policy = replace(models.policy, gradient_checkpointing=False)
    actor: nn.Module = load_causal_lm(policy)
    if policy.lora is not None:
        actor = attach_lora(actor, policy.lora)  # type: ignore[arg-type]
    if models.fingerprint:
        _check_frozen(actor, models)
    _load_trained(actor, models.weights_of(_ACTOR), models)
    if ema:
        _load_average(actor, models)
    return actor.eval()


def load_critic(models: CheckpointModels, actor: nn.Module | None = None) -> ValueNetwork:
    """Build the critic and load its trained weights.

    Args:
        models: From ``read_models``.
        actor: From ``load_actor``; needed where the critic is a head on its trunk, which is then
            shared, or copied and merged where it has adapters.

    Raises:
        CheckpointError: Weights are missing.
        ModelError: The starting model cannot be loaded.
    """
    if models.critic.kind == "separate":
        settings = replace(models.critic, gradient_checkpointing=False)
        critic = load_value_network(settings, replace(models.policy, gradient_checkpointing=False))
        _load_trained(critic, models.weights_of(_CRITIC), models)
        critic.eval()
        return critic
    if actor is None:
        raise ValueError("`actor` is needed: the critic is a head on its trunk.")
    trunk: Any = merged_copy(actor) if is_adapted(actor) else actor
    critic = ValueNetwork.from_causal_lm(trunk, head_init="zero")
    _load_trained(critic.head, models.weights_of(_VALUE_HEAD), models)
    critic.eval()
    return critic


def export_actor(
    models: CheckpointModels,
    folder: str | Path,
    *,
    overwrite: bool = False,
    ema: bool = False,
) -> None:
    """Write the actor as a Hugging Face folder with its tokenizer; adapters are merged.

    Args:
        models: From ``read_models``.
        folder: New or empty; it appears only when complete.
        overwrite: Take the place of a model that is there.
        ema: See ``load_actor``.

    Raises:
        CheckpointError: The folder holds something already, or see ``load_actor``.
    """
    _check_target(Path(folder), overwrite)
    actor = load_actor(models, ema=ema)
    _save(actor, models, Path(folder))


def export_critic(
    models: CheckpointModels,
    folder: str | Path,
    *,
    overwrite: bool = False,
) -> None:
    """Write the critic as a sequence classifier with the actor's tokenizer.

    Its score at the last token is V after the whole text.

    Args:
        models: From ``read_models``.
        folder: New or empty; it appears only when complete.
        overwrite: Take the place of a model that is there.

    Raises:
        CheckpointError: The folder holds something already, or see ``load_actor``.
        ModelError: The family has no sequence classifier.
    """
    _check_target(Path(folder), overwrite)
    shared = models.critic.kind == "shared"
    actor = load_actor(models) if shared else None
    critic = load_critic(models, actor)
    tokenizer = _tokenizer(models)
    classifier = critic.as_sequence_classifier(pad_token_id=tokenizer.pad_token_id)
    _save(classifier, models, Path(folder))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        checkpoint = read_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint `{path}` {error}.") from error
    if "state_dict" not in checkpoint:
        raise CheckpointError(f"`{path}` is not a checkpoint of Lightning.")
    return checkpoint


def _rebuilt(kind: type[Config], settings: Mapping[str, Any], path: Path) -> Config:
    """Make a config of the plain values in a checkpoint."""
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


def _load_trained(
    module: nn.Module, weights: Mapping[str, Tensor], models: CheckpointModels
) -> None:
    """Load every trained weight; only frozen ones may be left as they are."""
    _check_shapes(module, weights, models)
    report = module.load_state_dict(dict(weights), strict=False)
    parameters = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    missing = [name for name in report.missing_keys if name not in frozen]
    if missing or report.unexpected_keys:
        name = (missing or report.unexpected_keys)[0]
        what = "lacks" if missing else "has the unknown weight"
        raise CheckpointError(
            f"`{models.path}` {what} `{name}`: it does not fit the model that it names, "
            f"`{models.policy.path}`."
        )


def _check_shapes(
    module: nn.Module, weights: Mapping[str, Tensor], models: CheckpointModels
) -> None:
    """Refuse another architecture before torch lists each of its weights."""
    for name, weight in module.state_dict().items():
        found = weights.get(name)
        if found is not None and found.shape != weight.shape:
            raise CheckpointError(
                f"`{models.path}` does not fit `{models.policy.path}`: `{name}` is "
                f"{list(found.shape)} in the checkpoint and {list(weight.shape)} in the model. "
                "Give the folder of the model that was trained as `--policy-path`."
            )


@torch.no_grad()
def _load_average(actor: nn.Module, models: CheckpointModels) -> None:
    """Put the average in the place of every trained weight; tied weights follow."""
    trained = trained_weights(actor)
    if {k: v.shape for k, v in trained.items()} != {k: v.shape for k, v in models.ema.items()}:
        raise CheckpointError(
            f"the average of the actor's weights in `{models.path}` does not fit its actor."
        )
    for name, weight in trained.items():
        weight.copy_(models.ema[name])


def _check_frozen(actor: nn.Module, models: CheckpointModels) -> None:
    """Compare the frozen weights by their names in the LightningModule."""
    networks = nn.ModuleDict({"actor": actor})
    if fingerprint(nn.ModuleDict({"networks": networks})) != models.fingerprint:
        raise CheckpointError(
            f"the weights of `{models.policy.path}` differ from those that `{models.path}` was "
            "trained on. Give the folder of the right model as `--policy-path`."
        )


def _tokenizer(models: CheckpointModels) -> Any:
    policy = models.policy
    return load_tokenizer(policy.path, trust_remote_code=policy.trust_remote_code)


def _check_target(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that must not be written to, before anything is loaded."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"`{folder}` is a file. Give the name of a new folder.")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(
            f"`{folder}` is not empty. Give a new folder, or `--overwrite` to replace the model "
            "in it."
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"`{folder}` holds no model (there is no `config.json`), so it is not overwritten. "
            "Give another folder."
        )


def _save(model: nn.Module, models: CheckpointModels, folder: Path) -> None:
    with _earlier_aside(folder):
        save_model(model, _tokenizer(models), folder)


@contextmanager
def _earlier_aside(folder: Path) -> Iterator[None]:
    """Move a model's folder out of the way, and back if what comes in its place fails."""
    if not folder.is_dir() or not any(folder.iterdir()):
        yield
        return
    aside = folder.with_name(f".{folder.name}.{uuid4().hex}.old")
    folder.rename(aside)
    try:
        yield
    except BaseException:
        aside.rename(folder)
        raise
    rmtree(aside)
