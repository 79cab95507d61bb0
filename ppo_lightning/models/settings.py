"""What a model's folder says and a run must not obey, remembered for the export.

Dropout would make two passes over the same tokens differ, and sampling settings of the folder
would bias the rollout; yet the exported folder should say what the original said.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTRIBUTE = "_folder_settings"
_NOISY = ("drop", "jitter")


@dataclass(frozen=True, kw_only=True)
class FolderSettings:
    """Settings as the folder had them.

    Args:
        noise: Dropout and the like, by (name of the sub-config or "", attribute).
        generation: Sampling settings; None for models that do not generate.
    """

    noise: Mapping[tuple[str, str], float] = field(default_factory=dict)
    generation: GenerationConfig | None = None


def settings_of(model: nn.Module) -> FolderSettings:
    """Return what the model's folder said; nothing for a model that was made in memory."""
    return getattr(model, _ATTRIBUTE, FolderSettings())


def keep_settings(model: nn.Module, settings: FolderSettings) -> None:
    """Remember what the model's folder said."""
    setattr(model, _ATTRIBUTE, settings)


def silence_config(config: Any) -> dict[tuple[str, str], float]:
    """Set every dropout of a config to 0, nested configs too; return what was there.

    Models read some of these when they are built and others in each pass, so the config has to
    change before the model is made.
    """
    noise: dict[tuple[str, str], float] = {}
    for part_name, part in _parts(config):
        for name, value in list(vars(part).items()):
            if _is_noise(name, value):
                noise[part_name, name] = value
                setattr(part, name, 0.0)
    return noise


def silence_modules(model: nn.Module) -> None:
    """Set to 0 what no config rules: dropout layers, and numbers that modules keep for it."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if _is_noise(name, value):
                setattr(module, name, 0.0)


def neutral_generation(settings: GenerationConfig) -> GenerationConfig:
    """Keep the token ids of generation settings and nothing that shapes the distribution."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=settings.bos_token_id,
        eos_token_id=copy.copy(settings.eos_token_id),
        pad_token_id=settings.pad_token_id,
    )


def add_end_id(model: Any, end_id: int) -> None:
    """Let generation end at one more token, here and in the folder that is written.

    Args:
        model: Of transformers, just loaded.
        end_id: Such as the end of a turn in a chat template that the model did not have.
    """
    settings = settings_of(model)
    for generation in (getattr(model, "generation_config", None), settings.generation):
        if generation is None:
            continue
        known = generation.eos_token_id
        listed = [] if known is None else known if isinstance(known, list) else [known]
        if end_id not in listed:
            generation.eos_token_id = [*listed, end_id] if listed else end_id


@contextmanager
def original_config(model: PreTrainedModel) -> Iterator[None]:
    """Show the folder's own dropout in ``model.config`` while the model is being saved."""
    shown = copy.deepcopy(model.config)
    parts = dict(_parts(shown))
    for (part_name, name), value in settings_of(model).noise.items():
        setattr(parts[part_name], name, value)
    kept, model.config = model.config, shown
    try:
        yield
    finally:
        model.config = kept


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    """A config and the configs inside it."""
    yield "", config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield name, part


def _is_noise(name: str, value: object) -> bool:
    return isinstance(value, float) and value != 0.0 and any(word in name for word in _NOISY)
