"""What each pass over the buffer trains: actor and critic, or one of them."""

from __future__ import annotations

from typing import Literal

from ppo_lightning.configs import PPOConfig

Part = Literal["both", "actor", "critic"]
"""Networks that a step trains. The other group has no gradient then: its weights and Adam's moments
stay as they are."""

IDLE: dict[Part, str | None] = {"both": None, "actor": "critic", "critic": "actor"}
"""The group that a step leaves alone."""

_CRITIC: tuple[Part, ...] = ("critic",)


def num_passes(ppo: PPOConfig) -> int:
    """Most passes over a buffer, known before the run: the length of an iteration."""
    in_turn = 2 if ppo.update_order == "in_turn" else 1
    return ppo.num_update_epochs * in_turn + ppo.extra_critic_epochs


def pass_plan(ppo: PPOConfig, *, epochs: int, train_actor: bool) -> tuple[Part, ...]:
    """Say what the passes over this buffer train, in their order; at most ``num_passes``.

    Args:
        ppo: Order of actor and critic, and extra passes of the critic.
        epochs: K in force.
        train_actor: False while the critic warms up.
    """
    parts: tuple[Part, ...] = ("both",)
    if ppo.advantage != "gae":
        parts = ("actor",) if train_actor else ()  # there is no use for a critic
    elif not train_actor:
        parts = ("critic",)
    elif ppo.update_order == "in_turn":
        parts = ("critic", "actor")
    return parts * epochs + _CRITIC * ppo.extra_critic_epochs
