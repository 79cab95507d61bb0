"""From a run's checkpoint to models that stand on their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4

from torch import nn

from ppo_lightning.checkpointing.contents import CheckpointModels
from ppo_lightning.checkpointing.rebuild import load_actor, load_critic
from ppo_lightning.checkpointing.supervised import SupervisedModels, load_supervised
from ppo_lightning.errors import CheckpointError
from ppo_lightning.models import base_scorer, load_tokenizer, save_model
from ppo_lightning.models.card import ancestor_of, make_card, write_card
from ppo_lightning.models.pad_token import use_distinct_pad


def export_actor(
    models: CheckpointModels,
    folder: str | Path,
    *,
    overwrite: bool = False,
    ema: bool = False,
) -> None:
    """Write the actor as a Hugging Face folder with its tokenizer and card; adapters are merged.

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
    _save(actor, _tokenizer(models), Path(folder), kind="ppo", source=models.source)


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
    source = models.source if models.critic.path is None else models.critic.path
    _save(classifier, tokenizer, Path(folder), kind="critic", source=source)


def export_supervised(
    models: SupervisedModels, folder: str | Path, *, overwrite: bool = False
) -> None:
    """Write the model that ``SFTModule`` or ``RewardModule`` has trained, as at the run's end.

    Args:
        models: From ``read_supervised``.
        folder: New or empty; it appears only when complete.
        overwrite: Take the place of a model that is there.

    Raises:
        CheckpointError: The folder holds something already, or see ``load_supervised``.
    """
    _check_target(Path(folder), overwrite)
    network, tokenizer = load_supervised(models)
    scores = models.kind == "reward"
    with use_distinct_pad(base_scorer(network), tokenizer) if scores else nullcontext():
        _save(
            network,
            tokenizer,
            Path(folder),
            kind=models.kind,
            source=models.source,
            settings=models.settings,
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


def _save(
    model: nn.Module,
    tokenizer: Any,
    folder: Path,
    *,
    kind: str,
    source: str,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write model, tokenizer and card elsewhere, and let them take the folder's name at the end."""
    work = folder.with_name(f".{folder.name}.{uuid4().hex}.new")
    try:
        save_model(model, tokenizer, work)
        origin = ancestor_of(source)
        write_card(work, make_card(work, kind=kind, source=origin, settings=settings or {}))
        with _earlier_aside(folder):
            work.rename(folder)
    finally:
        rmtree(work, ignore_errors=True)


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
