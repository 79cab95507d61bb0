"""Folders that hold less than a model: cut files, broken configs, weights that are no numbers."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig, ReferenceConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import (
    ReferencePolicy,
    attach_lora,
    load_causal_lm,
    load_tokenizer,
    load_value_network,
    position_limits,
)

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_llama_dir, tmp_path / "model")


def load(folder: Path):
    return load_causal_lm(PolicyConfig(path=str(folder)))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def spoil(file: Path, name: str, value: float) -> None:
    weights = load_file(file)
    weights[name].view(-1)[-1] = value
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("size", [0, 7, 1000, -1])
def test_a_file_that_was_cut_short_is_told_as_such(folder: Path, size: int):
    cut(folder / WEIGHTS, size)
    with pytest.raises(ModelError, match=rf"no model can be loaded from `{folder}`: .+ Give a fol"):
        load(folder)


def test_tensors_of_other_shapes_are_told_as_such(folder: Path):
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": 48'))
    with pytest.raises(ModelError, match=f"no model can be loaded from `{folder}`"):
        load(folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers_are_named(folder: Path, value: float):
    name = "model.layers.1.mlp.down_proj.weight"
    spoil(folder / WEIGHTS, name, value)
    with pytest.raises(ModelError, match=rf"`{folder}` holds weights that are nan .*`{name}`:"):
        load(folder)


def test_an_adapter_is_read_with_the_same_care(folder: Path, tmp_path: Path):
    saved = tmp_path / "adapter"
    attach_lora(load(folder), LoraConfig(rank=2)).save_pretrained(saved)
    spoil(saved / "adapter_model.safetensors", _last(saved), torch.nan)
    with pytest.raises(ModelError, match=f"`{saved}` holds weights that are nan"):
        load(saved)
    cut(saved / "adapter_model.safetensors", 10)
    with pytest.raises(ModelError, match=f"no model can be loaded from `{saved}`"):
        load(saved)


def _last(saved: Path) -> str:
    return sorted(load_file(saved / "adapter_model.safetensors"))[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "llama",\n', r"config\.json:2:1: is not valid JSON"),
        ("[]", "hold an object"),
    ],
)
def test_a_broken_config_is_not_called_a_missing_tokenizer(folder: Path, text: str, said: str):
    (folder / "config.json").write_text(text)
    for read in (lambda: load_tokenizer(str(folder)), lambda: load(folder)):
        with pytest.raises(ModelError, match=said):
            read()


def test_the_setting_that_names_a_missing_model_is_told(tiny_llama_dir: Path):
    policy = PolicyConfig(path=str(tiny_llama_dir))
    lost, own = CriticConfig(path="no/where"), CriticConfig()
    with pytest.raises(ModelError, match=r"^`critic_model\.path`: no model .*`no/where`"):
        position_limits(policy, lost, ReferenceConfig())
    with pytest.raises(ModelError, match=r"^`reference\.path`: no model .*`no/where`"):
        position_limits(policy, own, ReferenceConfig(path="no/where"))
    with pytest.raises(ModelError, match=r"^`critic_model\.path`: no model .*`no/where`"):
        load_value_network(lost, policy)
    with pytest.raises(ModelError, match=r"^`reference\.path`: no model .*`no/where`"):
        ReferencePolicy.build(ReferenceConfig(path="no/where"), policy, load(tiny_llama_dir))
