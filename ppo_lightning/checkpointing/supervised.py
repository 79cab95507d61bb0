"""From a checkpoint of ``SFTModule`` or ``RewardModule`` to the model that it trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ppo_lightning.checkpointing.contents import read_whole, rebuilt
from ppo_lightning.checkpointing.entry import KEY
from ppo_lightning.checkpointing.rebuild import check_frozen, load_trained
from ppo_lightning.configs import BackboneConfig, PolicyConfig
from ppo_lightning.errors import CheckpointError
from ppo_lightning.models import (
    add_end_id,
    base_causal_lm,
    build_policy,
    build_scorer,
    load_tokenizer,
    use_template,
)
from ppo_lightning.models.pad_token import cut_at_front

_NETWORK = "network."


@dataclass(frozen=True, kw_only=True)
class SupervisedModels:
    """What a checkpoint of supervised training says.

    Args:
        path: The checkpoint.
        kind: ``sft`` or ``reward``.
        config: How the network was built.
        weights: Trained weights, by their names in the network.
        fingerprint: Of the frozen weights beside them; empty where there are none.
        chat_template: That the run gave the tokenizer; None left it its own.
        settings: For the model's card.
        unfinished: What export within the run does to the model and this cannot, in words.
    """

    path: Path
    kind: str
    config: PolicyConfig
    weights: Mapping[str, Tensor]
    fingerprint: str
    chat_template: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    unfinished: str = ""

    @property
    def source(self) -> str:
        """Path of the model that the training began with."""
        return self.config.path


def read_supervised(path: str | Path, *, source_path: str | None = None) -> SupervisedModels:
    """Read a checkpoint; only tensors and plain containers are taken from it.

    Args:
        path: File that the Trainer wrote.
        source_path: Where the starting model lies now, if it was moved since.

    Raises:
        CheckpointError: No such file, not one of these two modules, or of a newer version.
    """
    path = Path(path)
    checkpoint = read_whole(path)
    entry = checkpoint.get(KEY, {})
    kind, models = entry.get("kind"), entry.get("models", {})
    if kind == "sft" and "policy" in models:
        config: PolicyConfig = rebuilt(PolicyConfig, models["policy"], path)
    elif kind == "reward" and "backbone" in models:
        config = rebuilt(BackboneConfig, models["backbone"], path)
    else:
        raise CheckpointError(f"`{path}` was not written by SFTModule or RewardModule.")
    config = replace(
        config, path=source_path or config.path, gradient_checkpointing=False, compile=False
    )
    state = checkpoint["state_dict"]
    return SupervisedModels(
        path=path,
        kind=kind,
        config=config,
        weights={k.removeprefix(_NETWORK): v for k, v in state.items() if k.startswith(_NETWORK)},
        fingerprint=entry.get("fingerprint", ""),
        chat_template=models.get("chat_template"),
        settings=models.get("settings", {}),
        unfinished=_NOT_NORMALISED if models.get("normalize_scores") else "",
    )


_NOT_NORMALISED = (
    "Scores are as they were trained: `normalize_scores` is done where the training pairs are at "
    "hand, at the end of the run."
)


def load_supervised(models: SupervisedModels) -> tuple[nn.Module, Any]:
    """Build the network with its trained weights, and its tokenizer.

    Args:
        models: From ``read_supervised``.

    Returns:
        Network, adapters left on it; tokenizer, with the chat template of the run.

    Raises:
        CheckpointError: Weights are missing, or the frozen ones have changed.
        ModelError: The starting model cannot be loaded.
    """
    config = models.config
    scorer = isinstance(config, BackboneConfig)
    network = build_scorer(config) if isinstance(config, BackboneConfig) else build_policy(config)
    tokenizer = load_tokenizer(config.path, trust_remote_code=config.trust_remote_code)
    if models.chat_template is not None:
        use_template(tokenizer, models.chat_template)
    if models.chat_template is not None and not scorer:
        add_end_id(base_causal_lm(network), int(tokenizer.eos_token_id or 0))
    if models.fingerprint:
        check_frozen(nn.ModuleDict({"network": network}), models.fingerprint, models)
    load_trained(network, models.weights, models)
    if scorer:
        cut_at_front(tokenizer, models.settings.get("max_length"))
    return network.eval(), tokenizer
