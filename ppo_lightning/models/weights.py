"""A model's weights: all of them there, and all of them numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.utils import logging

from ppo_lightning.configs import DType, PolicyConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models.bars import without_bars
from ppo_lightning.models.folders import unreadable
from ppo_lightning.models.skeleton import is_weightless, skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of transformers, of a file that is cut short, and of one whose tensors have other shapes.
_FAILURES = (
    OSError,
    ValueError,
    ImportError,
    RuntimeError,
    EOFError,
    SafetensorError,
    UnpicklingError,
)


def read_weights(
    auto: Any,
    source: PolicyConfig,
    folder: str,
    config: Any,
    dtype: DType,
    *,
    new_head: bool = False,
) -> PreTrainedModel:
    """Load a model with its weights; under ``without_weights`` one that has none.

    Args:
        auto: Class of transformers that picks the model's own.
        source: How it is loaded, and its path as the user gave it.
        folder: Where it lies.
        config: Of transformers.
        dtype: Of the weights.
        new_head: What comes after the trunk may be missing, or of another shape: the family's own
            start stands there then.

    Raises:
        ModelError: The file cannot be read, lacks weights, which would be random, or holds some
            that are not finite.
    """
    options: dict[str, Any] = {
        "config": config,
        "dtype": getattr(torch, dtype),
        "trust_remote_code": source.trust_remote_code,
        "output_loading_info": True,
    }
    # Left alone, transformers takes sdpa where the family has it; asked for it by name, it
    # refuses the other families.
    if source.attn_implementation not in (None, "sdpa"):
        options["attn_implementation"] = source.attn_implementation
    if is_weightless():
        return skeleton(auto, options)
    if new_head:
        options["ignore_mismatched_sizes"] = True
    quiet = without_bars() if Path(folder).is_dir() else nullcontext()
    with reading(source.path), quiet, _without_report() if new_head else nullcontext():
        model, report = auto.from_pretrained(folder, **options)
    absent = {*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])}
    if new_head:
        absent = {name for name in absent if not _after_trunk(model, name)}
    if missing := sorted(absent):
        raise ModelError(
            f"`{source.path}` lacks weights of a {type(model).__name__}: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}. They would be random; give a folder that was "
            "saved from such a model."
        )
    require_finite(model, source.path)
    return model  # type: ignore[no-any-return]


def _after_trunk(model: Any, name: str) -> bool:
    """Whether a weight belongs to a classifier's head, to which a pooler leads."""
    return not name.startswith(f"{model.base_model_prefix}.") or "pooler" in name


@contextmanager
def _without_report() -> Iterator[None]:
    """Silence the table of new and unused weights: both are meant."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Say of a file that cannot be read whose it is.

    Args:
        path: Of the model, as the user gave it.

    Raises:
        ModelError: In the place of what transformers, PEFT or safetensors raise.
    """
    try:
        yield
    except _FAILURES as error:
        raise unreadable(path, "model", error) from error


def require_finite(model: nn.Module, path: str) -> None:
    """Insist that every weight is a number.

    Args:
        model: Just loaded.
        path: As the user gave it.

    Raises:
        ModelError: Names the first tensor that holds another.
    """
    bad = [name for name, weights in model.named_parameters() if not _is_finite(weights)]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ModelError(
            f"`{path}` holds weights that are nan or infinite, in `{bad[0]}`{more}: the training "
            "that wrote it went wrong, or its dtype was too small. Give an earlier checkpoint."
        )


def _is_finite(weights: torch.Tensor) -> bool:
    """Whether all are; by the two extremes, which a nan becomes, for want of a copy's memory."""
    if weights.numel() == 0 or weights.is_meta:
        return True
    low, high = weights.detach().aminmax()
    return bool(low.isfinite() & high.isfinite())
