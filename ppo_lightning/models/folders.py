"""What lies in a model's folder, before anything of it is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppo_lightning.errors import DataError, ModelError, first_line
from ppo_lightning.io import read_json

ADAPTER_CONFIG = "adapter_config.json"


def has_tokenizer(folder: str) -> bool:
    """Whether there is a file of one; without, transformers makes up an empty one for GPT-2."""
    names = [file.name for file in Path(folder).iterdir()]
    return any("token" in name or "vocab" in name or name.endswith(".model") for name in names)


def is_adapter(folder: str) -> bool:
    """Whether it holds an adapter rather than a model."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def adapter_base(folder: str) -> str:
    """Name the model that an adapter belongs to."""
    base = read_json(Path(folder) / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base:
        raise ModelError(
            f"`{folder}/{ADAPTER_CONFIG}` does not name its base model; set "
            "`base_model_name_or_path` there, or give a folder with the adapter merged."
        )
    return str(base)


def require_readable_config(folder: str) -> None:
    """Insist that ``config.json``, where there is one, is an object.

    Model and tokenizer are both chosen by it, and transformers says of either that it is missing.

    Args:
        folder: A folder, or the name of a model on the hub.

    Raises:
        ModelError: Names file, line and column.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        return
    try:
        config = read_json(path)
    except DataError as error:
        raise ModelError(str(error)) from error
    if not isinstance(config, dict):
        raise ModelError(f"`{path}` must hold an object `{{...}}`, as `save_pretrained` writes it.")


def unreadable(path: str, kind: str, error: BaseException) -> ModelError:
    """Say that transformers could not load something, and why.

    Args:
        path: As the user gave it.
        kind: ``model`` or ``tokenizer``.
        error: Of transformers.
    """
    if re.fullmatch(r"[\w.-]+", path) and isinstance(error, OSError) and not Path(path).exists():
        return ModelError(
            f"`{path}` is neither a folder here nor a model from the hub: {first_line(error)} Give "
            f"the path of a folder (relative paths start at {Path.cwd()}), `package:NAME`, or a "
            "hub name while the hub can be reached."
        )
    return ModelError(
        f"no {kind} can be loaded from `{path}`: {first_line(error)} Give a folder "
        "that holds one (with `config.json`), `package:NAME`, or a hub name while the hub can be "
        "reached."
    )


@contextmanager
def named(setting: str) -> Iterator[None]:
    """Put the setting that names a model in front of what is wrong with that model."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"`{setting}`: {error}") from error
