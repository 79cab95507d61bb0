"""``ppo-lightning export``: what a checkpoint has trained as a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ppo_lightning.cli.arguments import Arguments
from ppo_lightning.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    options = Arguments(
        prog="ppo-lightning export",
        description="Write what a checkpoint has trained as a Hugging Face folder with its "
        "tokenizer, adapters merged: the actor of PPO, the policy of SFT, or the reward model. The "
        "folder appears only when it is complete.",
    )
    options.add_argument("checkpoint", help="file that `ppo-lightning fit` wrote")
    options.add_argument("folder", help="where to write; new or empty")
    instead = options.add_mutually_exclusive_group()
    instead.add_argument(
        "--critic",
        action="store_true",
        help="write the critic of PPO, as a sequence classifier, instead",
    )
    instead.add_argument(
        "--ema",
        action="store_true",
        help="write the average of the actor's weights that the callback ActorEMA has kept",
    )
    options.add_argument(
        "--overwrite", action="store_true", help="take the place of a model in the folder"
    )
    options.add_argument(
        "--policy-path", help="where the starting model lies now, if it was moved since the run"
    )
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command; see ``parser`` for its options."""
    given = parser().parse_args(arguments)

    from ppo_lightning.checkpointing import checkpoint_kind

    kind = checkpoint_kind(given.checkpoint)
    return _of_ppo(given) if kind == "ppo" else _of_supervised(given)


def _of_ppo(given: argparse.Namespace) -> int:
    from ppo_lightning.checkpointing import export_actor, export_critic, read_models

    models = read_models(given.checkpoint, policy_path=given.policy_path)
    if given.critic:
        export_critic(models, given.folder, overwrite=given.overwrite)
    else:
        export_actor(models, given.folder, overwrite=given.overwrite, ema=given.ema)
    what = "critic" if given.critic else "average of the actor" if given.ema else "actor"
    print(f"{what} written to {given.folder}")
    if what == "actor" and models.ema_validated:
        print(
            "These are the last weights. What `val/…` and gold have judged is the average that "
            "ActorEMA has kept: `--ema` writes it."
        )
    return 0


def _of_supervised(given: argparse.Namespace) -> int:
    from ppo_lightning.checkpointing import export_supervised, read_supervised

    stray = next((name for name in ("critic", "ema") if getattr(given, name)), None)
    if stray is not None:
        raise ConfigError(f"`--{stray}` is for checkpoints of PPO; leave it out.")
    models = read_supervised(given.checkpoint, source_path=given.policy_path)
    export_supervised(models, given.folder, overwrite=given.overwrite)
    what = "policy" if models.kind == "sft" else "reward model"
    print(f"{what} written to {given.folder}")
    if models.unfinished:
        print(models.unfinished)
    return 0
