"""What a checkpoint of PPO holds besides Lightning's own entries.

Actor and critic are in ``state_dict``; with adapters only the adapters and the critic. Frozen
models are never saved: they come from their source again, and fingerprints tell whether it still
holds the same weights. Only tensors and plain containers, so that ``weights_only`` loading works.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ppo_lightning.errors import CheckpointError
from ppo_lightning.models import fingerprint

KEY = "ppo_lightning"
FORMAT_VERSION = 2
PPO = "ppo"
"""Kind of the runs whose checkpoints name none."""
REFERENCE = "`reference.path`"
"""Name of the reference among the models beside the module."""


def frozen_names(module: nn.Module) -> set[str]:
    """Parameters that are not trained: they are left out of checkpoints."""
    names = module.named_parameters(remove_duplicate=False)  # tied weights have two names
    return {name for name, p in names if not p.requires_grad}


def pack_checkpoint(
    checkpoint: dict[str, Any],
    module: nn.Module,
    *,
    complete: bool,
    extra: Mapping[str, Any],
    beside: Mapping[str, str],
    kind: str = PPO,
) -> None:
    """Take the frozen weights out and add this project's entry.

    Args:
        checkpoint: Lightning's, changed in place.
        module: The LightningModule.
        complete: Whether the iteration has ended: others cannot be resumed.
        extra: Plain containers to keep.
        beside: Fingerprints of the frozen models that are no part of the module, by the name that
            messages use; see ``check_beside``.
        kind: Of the run: ``ppo``, ``sft`` or ``reward``.
    """
    frozen = frozen_names(module)
    weights = checkpoint["state_dict"]
    checkpoint["state_dict"] = {k: v for k, v in weights.items() if k not in frozen}
    checkpoint[KEY] = {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "complete": complete,
        "fingerprint": fingerprint(module),
        "beside": dict(beside),
        **extra,
    }


def unpack_checkpoint(
    checkpoint: dict[str, Any], module: nn.Module, *, kind: str = PPO
) -> Mapping[str, Any]:
    """Check a checkpoint, and put the running model's frozen weights in for strict loading.

    Returns:
        This project's entry.

    Raises:
        CheckpointError: Not one of ours, cut short, without critic, or of other models.
    """
    entry = checkpoint.get(KEY)
    if entry is None:
        raise CheckpointError(
            "The checkpoint was not written by PPOModule; to start from a model, set "
            "`model.init_args.policy.path` to its folder."
        )
    if entry["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint has format {entry['format_version']}, this version reads up to "
            f"{FORMAT_VERSION}: update ppo-lightning."
        )
    if entry["format_version"] < FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint has format {entry['format_version']}, of an earlier version; this one "
            f"reads {FORMAT_VERSION}. Resume with the version that wrote it, or `ppo-lightning "
            "export` the actor and start a new run from its folder."
        )
    if entry.get("kind", PPO) != kind:
        raise CheckpointError(
            f"The checkpoint is of a run of another kind ({entry.get('kind', PPO)}, this one is "
            f"{kind}). To start from its model, export it and name the folder in the config."
        )
    if not entry["complete"]:
        raise CheckpointError(
            "The checkpoint was written inside an iteration and cannot be resumed: the buffer is "
            "not part of it. Resume from one written at the end of an iteration."
        )
    if entry["fingerprint"] != fingerprint(module):
        raise CheckpointError(_other_base(entry))
    _add_frozen(checkpoint, module)
    _refuse_other_models(checkpoint["state_dict"], module, entry)
    _require_all(checkpoint["state_dict"], module)
    return entry  # type: ignore[no-any-return]


def _other_base(entry: Mapping[str, Any]) -> str:
    slot = "backbone" if entry.get("kind") == "reward" else "policy"
    source = entry.get("models", {}).get(slot, {}).get("path")
    former = f" (then `{source}`)" if source else ""
    return (
        "The frozen base weights differ from those that the checkpoint was trained on: "
        f"`{slot}.path`{former} points to another model, its weights have changed, or `dtype`, "
        f"`quantization` or `lora` (its layers) of `{slot}` is another. A run's "
        "folder means the model of its latest run: to take an earlier one, give its own path, "
        "such as `runs/sft/lightning_logs/version_0/model`."
    )


def check_beside(entry: Mapping[str, Any], beside: Mapping[str, str]) -> None:
    """Compare the frozen models that are no part of the module: the reference, learned rewards.

    Args:
        entry: This project's, of the checkpoint that is resumed.
        beside: Fingerprints of the running models. A name that only one side has is not compared.

    Raises:
        CheckpointError: One of them has other weights than the checkpoint was trained with.
    """
    saved = entry.get("beside", {})
    changed = [name for name in beside if saved.get(name, beside[name]) != beside[name]]
    if changed:
        former = "Give the former model"
        if REFERENCE in changed:
            former += ", or `RefreshReference` in `trainer.callbacks` if it was there"
        raise CheckpointError(
            f"{' and '.join(changed)}: other weights than those that the checkpoint was trained "
            f"with, so the run would not be the same one. {former}; to go on with another, "
            "`ppo-lightning export` the actor and start a new run from its folder."
        )


def _add_frozen(checkpoint: dict[str, Any], module: nn.Module) -> None:
    frozen = frozen_names(module)
    current = {k: v for k, v in module.state_dict().items() if k in frozen}
    checkpoint["state_dict"] = {**current, **checkpoint["state_dict"]}


def _refuse_other_models(
    weights: Mapping[str, Any], module: nn.Module, entry: Mapping[str, Any]
) -> None:
    """Tell a checkpoint of another policy or critic from one that lacks something.

    A critic's weights that are simply unknown may be those of another kind of critic: then this
    one's are missing.
    """
    own = module.state_dict()
    for name, value in weights.items():
        of_critic = _is_critics(name)
        if name in own and own[name].shape != value.shape:
            found = f"`{name}` is {list(value.shape)} there and {list(own[name].shape)} here"
        elif name not in own and not of_critic:
            found = f"it holds `{name}`, which this one has not"
        else:
            continue
        what, setting = ("critic", "critic_model") if of_critic else ("policy", "policy")
        path = entry.get("models", {}).get(setting, {}).get("path")
        former = f" It was trained from `{path}`." if path else ""
        raise CheckpointError(
            f"The checkpoint is of another {what} than `{setting}` describes: {found}.{former} "
            f"Give the former settings of `model.init_args.{setting}` to resume it, or leave "
            "`ckpt_path` out to start a new run."
        )


def _is_critics(name: str) -> bool:
    return "critic" in name or "value_head" in name


def _require_all(weights: Mapping[str, Any], module: nn.Module) -> None:
    missing = [name for name in module.state_dict() if name not in weights]
    if not missing:
        return
    critic = [name for name in missing if _is_critics(name)]
    what = "the critic's weights" if critic else f"{len(missing)} weights"
    raise CheckpointError(
        f"The checkpoint lacks {what} (such as `{(critic or missing)[0]}`), so the run cannot be "
        "resumed exactly. To start a new run with a new critic from its actor, `ppo-lightning "
        "export` the actor and set `model.init_args.policy.path` to the folder."
    )
