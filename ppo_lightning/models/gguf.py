"""Weights in a GGUF file, unpacked once into a plain Hugging Face folder.

Unpacking takes some twenty seconds for a model of 135M parameters, reading the folder one. So the
folder is kept, under a name made from the file's contents.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_lightning.errors import ModelError, first_line

CACHE_VARIABLE = "PPO_LIGHTNING_CACHE"
_FORMAT = "v1"  # part of the folder's name: raise it when unpacking changes


def plain_folder(file: Path) -> Path:
    """Return a folder with the model and tokenizer of a GGUF file, in float32.

    It is made at the first call for a file and kept in the user's cache: ``$PPO_LIGHTNING_CACHE``,
    else ``$XDG_CACHE_HOME/ppo_lightning``, else ``~/.cache/ppo_lightning``. Where that cannot be
    written, it lasts as long as the process. Several processes may do this at once.

    Raises:
        ModelError: The file cannot be read as a language model.
    """
    size, changed = file.stat().st_size, file.stat().st_mtime_ns
    name = f"{file.stem}-{_FORMAT}-{size}-{_digest(file, size, changed)}"
    folder = cache_folder() / "gguf" / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder.parent))
    except OSError:
        return _unkept_folder(file)
    try:
        _unpack(file, work)
        work.chmod(0o755)
        _take_name(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    """Where this package keeps what would be slow to make again."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "ppo_lightning"


@cache
def _digest(file: Path, size: int, changed: int) -> str:
    """Checksum of a file; ``size`` and ``changed`` are there so that a new file is read anew."""
    with file.open("rb") as stream:
        checksum = hashlib.sha256()
        while block := stream.read(1 << 20):
            checksum.update(block)
    return checksum.hexdigest()[:16]


def _take_name(work: Path, folder: Path) -> None:
    """Give the finished folder its name in one step, unless another process was faster."""
    try:
        work.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


@cache
def _unkept_folder(file: Path) -> Path:
    """Unpack into a folder that goes away with the process."""
    folder = Path(tempfile.mkdtemp(prefix="ppo_lightning-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _unpack(file, folder)
    return folder


def _unpack(file: Path, folder: Path) -> None:
    """Write the plain folder.

    A model that was loaded from GGUF counts as quantised and refuses to be saved, so its weights
    move into one that was not.
    """
    try:
        source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except Exception as error:  # whatever a reader of a foreign format may stumble over
        raise ModelError(
            f"{file} cannot be read as a language model: {first_line(error)} GGUF files need the "
            "package `gguf` and a family that transformers can convert."
        ) from error
    config = loaded.config
    del config.quantization_config
    with torch.device("meta"):
        plain: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
