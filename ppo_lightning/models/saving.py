"""Writing models as plain Hugging Face folders."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ppo_lightning.errors import ModelError
from ppo_lightning.io import StrPath, naming
from ppo_lightning.models.adapters import is_adapted, merged_copy
from ppo_lightning.models.bars import without_bars
from ppo_lightning.models.settings import original_config, settings_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def save_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: StrPath,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model and its tokenizer as a folder that transformers loads.

    Dropout, cache and sampling settings are those of the folder that the model came from; an
    adapter is merged, in a copy. The folder appears under its name only when complete.

    Args:
        model: Of transformers or PEFT.
        tokenizer: None leaves it out.
        folder: Where to; new, or empty.
        state_dict: Weights to write instead of the model's, where those lie in shards; of a model
            without an adapter.

    Raises:
        ModelError: The folder holds something already.
    """
    target = Path(folder)
    if target.is_dir() and any(target.iterdir()):
        raise ModelError(f"`{target}` is not empty; give a new folder to save the model to.")
    plain: Any = merged_copy(model) if is_adapted(model) else model
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with _file_errors(target), original_config(plain), without_bars():
            plain.save_pretrained(work, state_dict=state_dict)
        with _file_errors(target):
            _write_generation(plain, work)
            if tokenizer is not None:
                tokenizer.save_pretrained(work)
        work.chmod(0o755)
        work.replace(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _file_errors(folder: Path) -> Iterator[None]:
    """Tell errors of the file system as such, with the folder: safetensors has its own for them."""
    try:
        with naming(folder):
            yield
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None or isinstance(error, OSError):
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), os.fspath(folder)) from error


def _write_generation(model: nn.Module, folder: Path) -> None:
    """Write the original sampling settings, past a check that some published ones fail."""
    generation = settings_of(model).generation
    if generation is not None:
        generation.to_json_file(folder / "generation_config.json")
