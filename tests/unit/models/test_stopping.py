"""Stop strings against special tokens, whose text is never part of a response."""

from pathlib import Path

import pytest

from ppo_lightning.configs import PolicyConfig, SamplingConfig
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import (
    embedding_rows,
    load_causal_lm,
    load_tokenizer,
    special_stop_ids,
)
from ppo_lightning.rollout import StopRules


def test_special_tokens_end_by_their_id_and_text_is_left_alone(tiny_llama_dir: Path):
    tokenizer = load_tokenizer(str(tiny_llama_dir))
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert special_stop_ids(tokenizer, ["<|im_start|>", "the cat"]) == (start,)
    assert special_stop_ids(tokenizer, []) == ()
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    sampling = SamplingConfig(stop_strings=["<|im_start|>"], stop_token_ids=[7])
    assert {start, 7, tokenizer.eos_token_id} <= set(
        StopRules.build(tokenizer, model, sampling).end_ids
    )


def test_a_special_token_beside_text_would_never_be_found(tiny_llama_dir: Path):
    tokenizer = load_tokenizer(str(tiny_llama_dir))
    with pytest.raises(ConfigError, match=r"stop_strings`: '<\|im_start\|> user' holds"):
        special_stop_ids(tokenizer, ["<|im_start|> user"])


@pytest.mark.parametrize("id_", [-1, 99_999])
def test_a_stop_id_that_no_token_has_is_refused(tiny_model_dir: Path, id_: int):
    tokenizer = load_tokenizer(str(tiny_model_dir))
    model = load_causal_lm(PolicyConfig(path=str(tiny_model_dir)))
    last = embedding_rows(model) - 1
    StopRules.build(tokenizer, model, SamplingConfig(stop_token_ids=[0, last]))
    with pytest.raises(
        ConfigError, match=rf"`sampling\.stop_token_ids`: {id_} is no .*to {last}\."
    ):
        StopRules.build(tokenizer, model, SamplingConfig(stop_token_ids=[last, id_]))
