"""What stands beside a model that was trained here."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from ppo_lightning.configs import LoraConfig, PolicyConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import attach_lora, load_causal_lm, load_tokenizer, save_model
from ppo_lightning.models.card import (
    Ancestor,
    ModelCard,
    ancestor_of,
    make_card,
    read_card,
    tokenizer_digests,
    was_changed,
    weights_fingerprint,
    with_source,
    write_card,
)
from tests.helpers.tiny_models import build_gpt2, build_llama


def copy_of(folder, target):
    shutil.copytree(folder, target)
    return target


def test_a_card_comes_back_as_it_was_written(tmp_path):
    card = ModelCard(
        kind="reward",
        fingerprint="ab",
        made_from=(Ancestor(path="runs/sft", kind="sft", fingerprint="cd"), Ancestor(path="gpt2")),
        tokenizer="ef",
        chat_template="",
        settings={"plain_prompts": "chat", "max_length": None},
    )
    (tmp_path / "config.json").write_text("{}")
    write_card(tmp_path, card)
    assert read_card(str(tmp_path)) == card
    assert card.ancestor("sft").path == "runs/sft"
    assert card.ancestor("ppo") is None


def test_a_model_of_others_has_none(tiny_gpt2_dir):
    assert read_card(str(tiny_gpt2_dir)) is None
    assert read_card("owner/name-on-the-hub") is None
    assert weights_fingerprint("owner/name-on-the-hub") == ""
    assert ancestor_of(str(tiny_gpt2_dir)).kind == ""


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"made_from": [{"from": "x"}]}'])
def test_a_damaged_card_is_named_with_the_way_out(tmp_path, content):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "ppo_lightning.json").write_text(content)
    with pytest.raises(ModelError, match=r"ppo_lightning\.json.*remove the file"):
        read_card(str(tmp_path))


def test_a_fingerprint_is_of_the_weights_and_of_nothing_else(tiny_gpt2_dir, tmp_path):
    own = weights_fingerprint(str(tiny_gpt2_dir))
    assert own == weights_fingerprint(str(build_gpt2(tmp_path / "same")))
    assert own != weights_fingerprint(str(build_gpt2(tmp_path / "other", seed=1)))
    copied = copy_of(tiny_gpt2_dir, tmp_path / "copy")
    (copied / "generation_config.json").write_text("{}")
    assert weights_fingerprint(str(copied)) == own


def test_it_does_not_matter_over_how_many_files_they_are_spread(tiny_llama_dir, tmp_path):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert weights_fingerprint(str(tmp_path / "sharded")) == weights_fingerprint(
        str(tiny_llama_dir)
    )


def test_training_of_any_layer_shows(tiny_llama_dir, tmp_path):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    own = weights_fingerprint(str(tiny_llama_dir))
    for number, weight in enumerate(model.parameters()):
        with torch.no_grad():
            weight.mul_(1.001)
            model.save_pretrained(tmp_path / str(number))
            weight.div_(1.001)
        assert weights_fingerprint(str(tmp_path / str(number))) != own


def test_an_adapter_is_told_by_its_own_weights_and_its_bases(tiny_llama_dir, tmp_path):
    def adapter(name, base, seed):
        torch.manual_seed(seed)
        model = attach_lora(load_causal_lm(PolicyConfig(path=str(base))), LoraConfig(rank=2))
        model.peft_config["default"].base_model_name_or_path = str(base)
        model.save_pretrained(tmp_path / name)
        return weights_fingerprint(str(tmp_path / name))

    other_base = build_llama(tmp_path / "base", seed=3)
    found = [adapter("a", tiny_llama_dir, 0), adapter("b", tiny_llama_dir, 1)]
    assert len({*found, adapter("c", other_base, 0), weights_fingerprint(str(tiny_llama_dir))}) == 4
    assert adapter("d", tiny_llama_dir, 0) == found[0]


def test_weights_of_another_format_have_one_too(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    first = weights_fingerprint(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"Weights")
    assert "" != first != weights_fingerprint(str(tmp_path))


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ModelError, match=r"model\.safetensors` cannot be read"):
        weights_fingerprint(str(tmp_path))


def test_tokenizer_and_template_have_digests_of_their_own(tiny_llama_dir, tiny_gpt2_dir, tmp_path):
    vocabulary, template = tokenizer_digests(str(tiny_llama_dir))
    assert tokenizer_digests(str(tiny_gpt2_dir))[1] == ""  # it has none
    tokenizer = load_tokenizer(str(tiny_llama_dir))
    tokenizer.chat_template = "{{ messages }}"
    copied = copy_of(tiny_llama_dir, tmp_path / "copy")
    tokenizer.save_pretrained(copied)
    assert tokenizer_digests(str(copied))[0] == vocabulary
    assert tokenizer_digests(str(copied))[1] != template
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (copied / name).unlink()
    assert tokenizer_digests(str(copied)) == ("", "")


def test_ancestors_reach_back_to_the_base_and_a_change_is_noticed(tiny_llama_dir, tmp_path):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    tokenizer = load_tokenizer(str(tiny_llama_dir))
    folders = {}
    source = str(tiny_llama_dir)
    for kind in ("sft", "reward"):
        folder = folders[kind] = tmp_path / kind
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        save_model(model, tokenizer, folder)
        origin = ancestor_of(source)
        write_card(folder, make_card(folder, kind=kind, source=origin, settings={}))
        source = str(folder)
    card = read_card(str(folders["reward"]))
    assert [(model.kind, model.path) for model in card.made_from] == [
        ("sft", str(folders["sft"])),
        ("", str(tiny_llama_dir)),
    ]
    assert card.made_from[0].fingerprint == weights_fingerprint(str(folders["sft"]))
    base = Ancestor(path=str(tiny_llama_dir), fingerprint="of then")
    assert with_source(card, base) == replace(card, made_from=(base,))
    assert with_source(card, None).made_from == ()
    assert not was_changed(str(folders["reward"]))
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    model.save_pretrained(folders["reward"])
    assert was_changed(str(folders["reward"]))
    assert not was_changed(str(tiny_llama_dir))
    assert json.loads((folders["sft"] / "ppo_lightning.json").read_text())["format_version"] == 1
