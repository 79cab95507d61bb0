"""The start-up review: gathers the settings of a run, and says what was found, once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal

from ppo_lightning.diagnostics import Advice, RunSettings, advice_text, review
from ppo_lightning.distributed import rank
from ppo_lightning.errors import ConfigError

Mode = Literal["off", "warn", "error"]


def review_run(module: Any, mode: Mode) -> None:
    """Review the settings of a ``PPOModule`` that is about to be fitted.

    Args:
        module: Attached to its trainer, with its networks loaded.
        mode: ``guards.advice``.

    Raises:
        ConfigError: ``mode`` is ``error`` and something was found that is likely to hurt.
    """
    trainer = module.trainer
    settings = RunSettings(
        ppo=module.ppo,
        kl=module.kl,
        actor=module.actor,
        critic=module.critic,
        sampling=module.sampling,
        buffer=getattr(getattr(trainer, "datamodule", None), "buffer", None),
        lora=module.policy.lora is not None,
        shared_critic=module.critic_model.kind == "shared",
        num_parameters=sum(p.numel() for p in module.networks.actor.parameters()),
        planned_steps=module.planned_steps(),
    )
    say(review(settings), mode)


def check_together(module: Any) -> None:
    """Refuse settings of a ``PPOModule`` and its data module that make no sense together.

    Raises:
        ConfigError: A law that compares the responses to one prompt, where there is one only.
    """
    buffer = getattr(getattr(module.trainer, "datamodule", None), "buffer", None)
    if buffer is None or buffer.responses_per_prompt > 1:
        return
    comparing = {
        f"ppo.advantage: {module.ppo.advantage}": module.ppo.advantage != "gae",
        "ppo.drop_flat_prompts": module.ppo.drop_flat_prompts,
        "reward_processing.normalize: group": (
            module.reward_pipeline.processing.normalize == "group"
        ),
    }
    for setting, asked in comparing.items():
        if asked:
            raise ConfigError(
                f"`model.init_args.{setting}` compares the responses to one prompt: set "
                "`data.init_args.buffer.responses_per_prompt` to 2 or more."
            )


def say(found: Iterable[Advice], mode: Mode) -> None:
    """Warn of what was found, or raise, as ``guards.advice`` says; to be called on all ranks.

    All find the same, so all raise or none does; the warning is the first rank's.

    Raises:
        ConfigError: ``mode`` is ``error`` and it is more than a note.
    """
    found = list(found)
    if mode == "off" or not found:
        return
    if mode == "error" and any(advice.severity == "warning" for advice in found):
        raise ConfigError(advice_text(found))
    if rank() == 0:
        warnings.warn(advice_text(found), stacklevel=2)
