"""Buffers on disk: an update can be run again on the very buffer that it ran on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.errors import DataError
from ppo_lightning.io import open_atomic
from ppo_lightning.types import Experience, Sequences

FORMAT_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class DumpedBuffer:
    """A buffer, and how its update cut it.

    Args:
        experience: The buffer of one rank.
        num_minibatches: Optimiser steps in one pass.
        num_epochs: Passes.
        seed: Of the shuffles.
        response_mask: Tokens that were sampled, also of responses that the losses do not count.
            What frozen blocks make of them is not written: it is made again, of all of them.
            ``[B, R]`` bool, or None.
    """

    experience: Experience
    num_minibatches: int
    num_epochs: int
    seed: int
    response_mask: Tensor | None = None


def save_buffer(dumped: DumpedBuffer, path: str | Path) -> None:
    """Write a buffer as plain tensors and numbers; the file appears whole or not at all."""
    bare = replace(dumped.experience.sequences, trunk=None)
    dumped = replace(dumped, experience=replace(dumped.experience, sequences=bare))
    content = {"format_version": FORMAT_VERSION, **_on_cpu(asdict(dumped))}
    with open_atomic(path) as file:
        torch.save(content, file)


def load_buffer(path: str | Path) -> DumpedBuffer:
    """Read what ``save_buffer`` wrote.

    Raises:
        DataError: The file is missing, or is no buffer of this project.
    """
    try:
        content: dict[str, Any] = torch.load(path, weights_only=True)
        if content.pop("format_version") != FORMAT_VERSION:
            raise ValueError("of another version")
        fields = content.pop("experience")
        sequences = Sequences(**fields.pop("sequences"))
        return DumpedBuffer(experience=Experience(sequences=sequences, **fields), **content)
    except FileNotFoundError as error:
        raise DataError("there is no such file.", path=path) from error
    except Exception as error:
        raise DataError(
            f"this is no buffer that ppo-lightning wrote ({type(error).__name__}); give a file "
            "that the `DumpBuffers` callback made.",
            path=path,
        ) from error


def _on_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _on_cpu(part) for name, part in value.items()}
    return value.detach().cpu().contiguous() if isinstance(value, Tensor) else value
