"""Plain folders that say what the original said."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import (
    build_actor_critic,
    load_causal_lm,
    load_tokenizer,
    policy_logprobs,
    save_model,
)
from tests.helpers.sequences import sequences_of
from tests.helpers.tiny_models import build_gpt2, build_llama
from tests.unit.models.conftest import build_phi

BATCH = sequences_of([[5, 9, 11]], [[20, 13, 17, 2]])
OWN = {
    build_gpt2: {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3, "use_cache": False},
    build_llama: {"attention_dropout": 0.1},
    build_phi: {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attention_dropout": 0.1},
}


@pytest.mark.parametrize("build", OWN)
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_t10_t12_t21_the_folder_keeps_its_settings(build, lora, tmp_path: Path):
    folder = build(tmp_path / "in", **OWN[build])
    # Sampling settings without sampling: such files are about, and transformers won't write them.
    written = {"temperature": 0.6, "top_p": 0.8, "do_sample": False, "eos_token_id": [2, 7]}
    (folder / "generation_config.json").write_text(json.dumps(written))
    policy = PolicyConfig(path=str(folder), lora=lora, gradient_checkpointing=True)
    networks = build_actor_critic(policy, CriticConfig(kind="shared"))
    save_model(networks.actor, load_tokenizer(str(folder)), tmp_path / "out")
    old, new = (json.loads((d / "config.json").read_text()) for d in (folder, tmp_path / "out"))
    assert new == old
    assert OWN[build].items() <= new.items()
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert {name: getattr(generation, name) for name in written} == written
    assert all(networks.causal_lm.config.to_dict()[n] == 0 for n in OWN[build] if "drop" in n)


def test_the_folder_holds_weights_and_tokenizer(family_dir: Path, tmp_path: Path):
    model = load_causal_lm(PolicyConfig(path=str(family_dir)))
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    save_model(model, load_tokenizer(str(family_dir)), tmp_path / "new" / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "out")
    ids = torch.tensor([[5, 9, 11, 20]])
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    text = "hello world, the cat"
    old, new = (AutoTokenizer.from_pretrained(d) for d in (family_dir, tmp_path / "new" / "out"))
    assert new(text)["input_ids"] == old(text)["input_ids"]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out"]


def test_t54_tied_weights_save_load_and_move_together(tmp_path: Path):
    folder = build_gpt2(tmp_path / "in")
    model = load_causal_lm(PolicyConfig(path=str(folder)))
    save_model(model, None, tmp_path / "step0")
    for turn in range(2):
        loaded = load_causal_lm(PolicyConfig(path=str(tmp_path / f"step{turn}")))
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        before = loaded.lm_head.weight.detach().clone()
        policy_logprobs(loaded, BATCH, temperature=1.0).logprobs.sum().backward()
        torch.optim.SGD(loaded.parameters(), lr=0.1).step()
        assert not torch.equal(loaded.lm_head.weight, before)
        assert torch.equal(loaded.lm_head.weight, loaded.transformer.wte.weight)
        save_model(loaded, None, tmp_path / f"step{turn + 1}")
        again = load_causal_lm(PolicyConfig(path=str(tmp_path / f"step{turn + 1}")))
        assert torch.equal(
            policy_logprobs(again, BATCH, temperature=1.0).logprobs,
            policy_logprobs(loaded, BATCH, temperature=1.0).logprobs,
        )


def test_weights_may_come_from_elsewhere(tiny_model_dir: Path, tmp_path: Path):
    model = load_causal_lm(PolicyConfig(path=str(tiny_model_dir)))
    gathered = {name: weight * 2 for name, weight in model.state_dict().items()}
    save_model(model, None, tmp_path / "out", state_dict=gathered)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(w, gathered[n]) for n, w in again.state_dict().items())


def test_a_folder_in_use_is_left_alone(tiny_llama_dir: Path, tmp_path: Path):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="is not empty"):
        save_model(model, None, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_nothing_is_left_half_written(tiny_llama_dir: Path, tmp_path: Path, monkeypatch):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    kept = model.config

    def fail(folder, **_):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(model, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        save_model(model, None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert model.config is kept


@pytest.mark.parametrize("message", ["I/O error: No space left on device (os error 28)", None])
def test_a_full_disk_names_the_folder_and_leaves_nothing(
    tiny_gpt2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str | None
):
    model = load_causal_lm(PolicyConfig(path=str(tiny_gpt2_dir)))

    def full(*args: Any, **kwargs: Any) -> None:  # safetensors has an error of its own
        raise SafetensorError(message) if message else OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(type(model), "save_pretrained", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save_model(model, None, tmp_path / "out")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []
