"""The actor of a run as a Hugging Face folder, also where its weights lie in shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ppo_lightning.distributed import is_sharded, rank, whole_on_cpu
from ppo_lightning.errors import ModelError
from ppo_lightning.io import StrPath
from ppo_lightning.models import build_policy, save_model, trained_weights
from ppo_lightning.modules.export_model import as_validated, written_weights


def write_actor(module: Any, folder: StrPath, weights: Mapping[str, Tensor] | None) -> None:
    """Do what ``PPOModule.export`` says.

    Weights that are not in the module's own network are put into one that is built for it.

    Args:
        module: A ``PPOModule``.
        folder: See there.
        weights: See there.

    Raises:
        ModelError: ``weights`` are not those of the actor, or the folder holds something.
    """
    if weights is None and is_sharded(module.export_network):
        with as_validated(module):
            weights = whole_on_cpu(written_weights(module), keep=rank() == 0)
        if rank():
            return
    if weights is None:
        with as_validated(module):
            save_model(module.export_network, module.tokenizer, folder)
        return
    actor = build_policy(replace(module.policy, gradient_checkpointing=False, compile=False))
    report = actor.load_state_dict(dict(weights), strict=False)
    wrong = {*report.unexpected_keys} | (trained_weights(actor).keys() & {*report.missing_keys})
    if wrong:
        raise ModelError(f"`weights` are not those of the actor: see `{min(wrong)}`.")
    save_model(actor, module.tokenizer, folder)
