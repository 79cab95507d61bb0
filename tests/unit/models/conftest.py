"""A third family beside GPT-2 and Llama, and all three in turn."""

from pathlib import Path

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM

from tests.helpers.tiny_models import WIDE, word_tokenizer


def build_phi(folder: Path, **overrides: object) -> Path:
    """Partly rotary positions, biases everywhere, untied embeddings."""
    tokenizer = word_tokenizer()
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 128,
        "initializer_range": WIDE,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = PhiForCausalLM(PhiConfig(**(settings | overrides)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_phi_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_phi(tmp_path_factory.mktemp("tiny") / "phi")


@pytest.fixture(scope="session", params=["gpt2", "llama", "phi"])
def family_dir(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"tiny_{request.param}_dir")
