"""The tiny models are what the other tests take them for."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tests.helpers.tiny_models import build_gpt2

CHAT = [
    {"role": "user", "content": "hello you"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why?"},
]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def left_padding_error(model, pad_id, *, with_positions):
    ids = torch.tensor([[5, 9, 17, 30]])
    padding = torch.full((1, 3), pad_id)
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(ids)], 1)
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(0)} if with_positions else {}
    with torch.no_grad():
        alone = model(ids).logits
        padded = model(torch.cat([padding, ids], 1), attention_mask=mask, **positions).logits
    return (alone - padded[:, 3:]).abs().max().item()


def test_policies_load_with_their_tokenizers(tiny_model_dir):
    model, tokenizer = load(tiny_model_dir)
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_text_survives_the_tokenizers(tiny_model_dir):
    _, tokenizer = load(tiny_model_dir)
    ids = tokenizer("hello the cat", add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == "hello the cat"


def test_gpt2_reads_letters_and_word_alike_but_writes_one_token(tiny_gpt2_dir):
    _, tokenizer = load(tiny_gpt2_dir)
    letters = tokenizer.convert_tokens_to_ids(list("hello"))
    assert tokenizer.decode(letters) == "hello"
    assert len(tokenizer("hello")["input_ids"]) == 1


def test_gpt2_shows_left_padding_without_positions_and_llama_hides_it(
    tiny_gpt2_dir, tiny_llama_dir
):
    gpt2, gpt2_tokenizer = load(tiny_gpt2_dir)
    llama, llama_tokenizer = load(tiny_llama_dir)
    assert left_padding_error(gpt2, gpt2_tokenizer.pad_token_id, with_positions=False) > 0.1
    assert left_padding_error(llama, llama_tokenizer.pad_token_id, with_positions=False) < 1e-4
    assert left_padding_error(gpt2, gpt2_tokenizer.pad_token_id, with_positions=True) < 1e-4


def test_embeddings_are_tied_in_gpt2_only(tiny_gpt2_dir, tiny_llama_dir):
    gpt2, llama = load(tiny_gpt2_dir)[0], load(tiny_llama_dir)[0]
    assert gpt2.get_input_embeddings().weight is gpt2.get_output_embeddings().weight
    assert llama.get_input_embeddings().weight is not llama.get_output_embeddings().weight


def test_llama_writes_bos_before_plain_text_and_in_its_template(tiny_llama_dir):
    _, tokenizer = load(tiny_llama_dir)
    assert tokenizer("hello")["input_ids"][0] == tokenizer.bos_token_id
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    in_one_step = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == in_one_step
    assert in_one_step.count(tokenizer.bos_token_id) == 1
    assert tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) == 2  # the trap


def test_reward_model_has_one_score_and_a_tokenizer_of_its_own(tiny_reward_dir, tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_reward_dir)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_reward_dir)
    inputs = tokenizer(["hello the cat", "no"], padding=True, return_tensors="pt")
    assert model(**inputs).logits.shape == (2, 1)
    policy = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert tokenizer.get_vocab() != policy.get_vocab()
    assert tokenizer.chat_template != policy.chat_template


@pytest.mark.parametrize(("seed", "same"), [(0, True), (1, False)])
def test_weights_are_a_function_of_the_seed(tiny_gpt2_dir, tmp_path, seed, same):
    first, again = load(tiny_gpt2_dir)[0], load(build_gpt2(tmp_path, seed=seed))[0]
    assert torch.equal(first.transformer.wte.weight, again.transformer.wte.weight) is same


def test_config_overrides_reach_the_model(tmp_path):
    model, _ = load(build_gpt2(tmp_path, n_positions=64, resid_pdrop=0.1))
    assert model.config.n_positions == 64
    assert model.config.resid_pdrop == 0.1
    assert model.transformer.wpe.weight.shape[0] == 64
