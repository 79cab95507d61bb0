"""Weights in a GGUF file, as packages carry them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_lightning.configs import PolicyConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import gguf, load_causal_lm, load_tokenizer, local_path, save_model
from tests.helpers.tiny_models import CHATML, WIDE

HIDDEN, HEADS, INNER = 32, 2, 64
BYTES = [chr(c) for c in range(33, 127)]  # enough of the byte-level alphabet for these tests
TOKENS = ["<unk>", "<s>", "<|im_end|>", *BYTES, "Ġ", "Ġt", "he"]
MERGES = ["Ġ t", "h e"]
KINDS = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(TOKENS) - 3)


def write_gguf(path: Path) -> LlamaForCausalLM:
    """Write a Llama with tied embeddings and a byte-level tokenizer; return the same model."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=64,
        initializer_range=WIDE,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types(KINDS)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    for name, weight in _tensors(model).items():
        writer.add_tensor(name, weight.detach().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _tensors(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    layer = model.model.layers[0]
    return {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
        "blk.0.attn_norm.weight": layer.input_layernorm.weight,
        "blk.0.ffn_norm.weight": layer.post_attention_layernorm.weight,
        "blk.0.attn_q.weight": _paired(layer.self_attn.q_proj.weight),
        "blk.0.attn_k.weight": _paired(layer.self_attn.k_proj.weight),
        "blk.0.attn_v.weight": layer.self_attn.v_proj.weight,
        "blk.0.attn_output.weight": layer.self_attn.o_proj.weight,
        "blk.0.ffn_gate.weight": layer.mlp.gate_proj.weight,
        "blk.0.ffn_up.weight": layer.mlp.up_proj.weight,
        "blk.0.ffn_down.weight": layer.mlp.down_proj.weight,
    }


def _paired(weight: torch.Tensor) -> torch.Tensor:
    """The format puts the two parts of each rotary pair side by side, transformers far apart."""
    rows, columns = weight.shape
    halves = weight.reshape(HEADS, 2, rows // HEADS // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(gguf.CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> tuple[str, LlamaForCausalLM]:
    folder = tmp_path / "site" / "carries_gguf"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    model = write_gguf(folder / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return "package:carries_gguf", model


def test_a_package_with_a_gguf_file_is_a_plain_model(package, cache: Path, tmp_path: Path):
    path, original = package
    model, tokenizer = load_causal_lm(PolicyConfig(path=path)), load_tokenizer(path)
    ids = torch.tensor([[5, 40, 41, 20]])
    assert torch.equal(model(input_ids=ids).logits, original.eval()(input_ids=ids).logits)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("a the")["input_ids"]) == ["a", "Ġt", "he"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat.startswith("<s><|im_start|> user a <|im_end|>")
    save_model(model, tokenizer, tmp_path / "out")  # a model loaded from GGUF would refuse
    again = load_causal_lm(PolicyConfig(path=str(tmp_path / "out")))
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_it_is_unpacked_once_and_again_when_the_file_changes(package, cache: Path, monkeypatch):
    unpacked: list[Path] = []
    real = gguf._unpack
    monkeypatch.setattr(gguf, "_unpack", lambda f, to: (unpacked.append(f), real(f, to)))
    first = local_path(package[0])
    assert local_path(package[0]) == first
    assert len(unpacked) == 1
    assert Path(first).parent == cache / "gguf"
    file = unpacked[0]
    assert local_path(str(file)) == first  # the file itself may be named
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1  # one bit of one weight: the size stays
    file.write_bytes(contents)
    assert local_path(package[0]) != first
    assert len(unpacked) == 2
    assert len(list((cache / "gguf").iterdir())) == 2  # nothing half-made is left


def test_another_process_may_be_faster(package, cache: Path, monkeypatch):
    real = gguf._unpack

    def overtaken(file: Path, to: Path) -> None:
        real(file, to)
        to_be = next(p for p in [gguf.cache_folder() / "gguf" / _final(to)])
        to_be.mkdir()
        (to_be / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "_unpack", overtaken)
    folder = Path(local_path(package[0]))
    assert [p.name for p in folder.iterdir()] == ["config.json"]  # theirs, not ours
    assert list((cache / "gguf").iterdir()) == [folder]


def _final(work: Path) -> str:
    """The name that a working folder is meant to get."""
    return work.name[1:].rsplit(".", 1)[0]


def test_without_a_cache_it_lasts_as_long_as_the_process(package, tmp_path: Path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(gguf.CACHE_VARIABLE, str(blocked))  # no folder can be made in a file
    first = local_path(package[0])
    assert local_path(package[0]) == first
    assert load_causal_lm(PolicyConfig(path=package[0])).config.vocab_size == len(TOKENS)
    assert not Path(first).is_relative_to(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path, cache: Path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(ModelError, match=r"broken.gguf cannot be read as a language model"):
        load_causal_lm(PolicyConfig(path=str(tmp_path / "broken.gguf")))
    assert list((cache / "gguf").iterdir()) == []


def test_the_cache_is_where_the_user_says(monkeypatch):
    monkeypatch.delenv(gguf.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert gguf.cache_folder() == Path("/somewhere/ppo_lightning")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf.cache_folder() == Path("~/.cache/ppo_lightning").expanduser()
