"""``ppo_lightning.json`` beside a model that was trained here: what it is, made from what.

A step of the chain SFT, reward model, PPO reads it to tell whether its inputs belong together.
Fingerprints are of the files, so they say the same whatever loads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_lightning import __version__
from ppo_lightning.errors import DataError, ModelError
from ppo_lightning.io import read_json, write_json_atomic
from ppo_lightning.models.folders import adapter_base, has_tokenizer, is_adapter
from ppo_lightning.models.loading import load_tokenizer
from ppo_lightning.models.locate import local_path
from ppo_lightning.models.weight_files import sampled_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CARD = "ppo_lightning.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """A model that another one was made from.

    Args:
        path: As the config gave it.
        kind: As its own card says; empty for a model that was not trained here.
        fingerprint: Of its weights; empty where they are no local files.
    """

    path: str
    kind: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What ``ppo_lightning.json`` says.

    Args:
        kind: ``sft``, ``reward``, ``ppo``, or what a module of the user's own calls it.
        fingerprint: Of the weights beside it, when they were written.
        made_from: The model that the training began with, then that model's own, and so on.
        tokenizer: Digest of the vocabulary; empty without a tokenizer.
        chat_template: Digest of the template; empty without one.
        settings: What else the module has to say.
        version: Of the package that wrote it.
    """

    kind: str
    fingerprint: str
    made_from: tuple[Ancestor, ...] = ()
    tokenizer: str = ""
    chat_template: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    version: str = __version__

    def ancestor(self, kind: str) -> Ancestor | None:
        """Return the nearest model of a kind that it was made from; None if there is none."""
        return next((model for model in self.made_from if model.kind == kind), None)


def read_card(path: str) -> ModelCard | None:
    """Read the card of a model.

    Args:
        path: As in ``PolicyConfig``.

    Returns:
        None for a model without one: it was not trained here.

    Raises:
        ModelError: There is no such model, or the card is not readable.
    """
    file = Path(local_path(path)) / CARD
    if not file.is_file():
        return None
    try:
        content = read_json(file)
        made_from = tuple(Ancestor(**model) for model in content["made_from"])
        names = ("kind", "fingerprint", "tokenizer", "chat_template", "settings", "version")
        return ModelCard(**{name: content[name] for name in names}, made_from=made_from)
    except (DataError, KeyError, TypeError) as error:
        raise ModelError(
            f"`{file}` is no card that this version can read ({error}). Update ppo-lightning, or "
            "remove the file: the model is then taken for one of unknown origin."
        ) from error


def make_card(
    folder: Path, *, kind: str, source: Ancestor | None, settings: Mapping[str, Any]
) -> ModelCard:
    """Describe a model that has just been written.

    Args:
        folder: With weights and tokenizer.
        kind: See ``ModelCard``.
        source: From ``ancestor_of``, taken when the training began.
        settings: See ``ModelCard``.
    """
    tokenizer, template = tokenizer_digests(str(folder))
    return ModelCard(
        kind=kind,
        fingerprint=weights_fingerprint(str(folder)),
        made_from=_line_of(source),
        tokenizer=tokenizer,
        chat_template=template,
        settings=dict(settings),
    )


def with_source(card: ModelCard, source: Ancestor | None) -> ModelCard:
    """Let a card name another origin; what it says of the weights stays.

    Args:
        card: Of a model.
        source: See ``make_card``.
    """
    return replace(card, made_from=_line_of(source))


def write_card(folder: Path, card: ModelCard) -> None:
    """Put a card beside a model."""
    write_json_atomic(folder / CARD, {"format_version": FORMAT_VERSION, **asdict(card)})


def ancestor_of(path: str) -> Ancestor:
    """Name a model as the origin of another one, with its present weights.

    Args:
        path: As in ``PolicyConfig``.
    """
    card = read_card(path)
    kind = "" if card is None else card.kind
    return Ancestor(path=path, kind=kind, fingerprint=weights_fingerprint(path))


def was_changed(path: str) -> bool:
    """Whether a model's weights are others than those that its card was written for."""
    card = read_card(path)
    return card is not None and card.fingerprint != weights_fingerprint(path)


def weights_fingerprint(path: str) -> str:
    """Digest of a model's weight files: names, shapes and some values of every tensor.

    It does not depend on how the weights are spread over files. An adapter's is also its base's.

    Args:
        path: As in ``PolicyConfig``.

    Returns:
        Hexadecimal; ``""`` for a hub name, whose files are not at hand.

    Raises:
        ModelError: There is no such model, or a file is damaged.
    """
    folder = Path(local_path(path))
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for line in sorted(sampled_lines(folder)):
        digest.update(line)
    if is_adapter(str(folder)):
        digest.update(weights_fingerprint(adapter_base(str(folder))).encode())
    return digest.hexdigest()


def tokenizer_digests(path: str) -> tuple[str, str]:
    """Digests of a model's vocabulary and of its chat template; empty where it has none.

    Args:
        path: As in ``PolicyConfig``.
    """
    folder = local_path(path)
    if Path(folder).is_dir() and not is_adapter(folder) and not has_tokenizer(folder):
        return "", ""
    return digests_of(load_tokenizer(path))


def digests_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Digests of a tokenizer's vocabulary and of its chat template."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    template = tokenizer.chat_template
    return _sha(vocabulary), _sha(json.dumps(template)) if template else ""


def _line_of(source: Ancestor | None) -> tuple[Ancestor, ...]:
    """Return a model and what it was made from itself."""
    if source is None:
        return ()
    card = read_card(source.path)
    return (source, *(() if card is None else card.made_from))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
