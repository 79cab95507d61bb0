"""Tokenizer and models against each other."""

from pathlib import Path

import pytest
from transformers import BloomConfig, BloomForCausalLM, FalconConfig, MptConfig

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import (
    build_actor_critic,
    check_vocabulary,
    load_causal_lm,
    load_tokenizer,
    max_positions,
)
from ppo_lightning.models.checks import positions_of
from tests.helpers.tiny_models import build_gpt2, build_llama


def test_t20_a_token_without_a_row_is_named_with_both_sizes(tiny_model_dir: Path):
    tokenizer = load_tokenizer(str(tiny_model_dir))
    networks = build_actor_critic(
        PolicyConfig(path=str(tiny_model_dir), lora=LoraConfig(rank=2)), CriticConfig()
    )
    rows = networks.vocab_size
    models = {"actor": networks.actor, "critic": networks.critic}
    check_vocabulary(tokenizer, models)
    tokenizer.add_special_tokens({"pad_token": "<new pad>"})
    with pytest.raises(ModelError) as caught:
        check_vocabulary(tokenizer, models)
    for part in ("actor's", f"{rows + 1} tokens", f"id {rows}", "<new pad>", f"{rows} rows"):
        assert part in str(caught.value)


@pytest.mark.parametrize("build", [build_gpt2, build_llama])
def test_t20_a_critic_must_know_every_id_that_the_actor_can_emit(build, tmp_path: Path):
    small = build(tmp_path / "small")
    tokenizer = load_tokenizer(str(small))
    large = build(tmp_path / "large", vocab_size=len(tokenizer) + 8)  # rows rounded up, as usual
    models = {
        name: load_causal_lm(PolicyConfig(path=str(folder)))
        for name, folder in (("small", small), ("large", large))
    }
    check_vocabulary(tokenizer, {"actor": models["small"], "critic": models["large"]})
    with pytest.raises(ModelError, match=rf"up to {len(tokenizer) + 7} .*the critic's embedding"):
        check_vocabulary(tokenizer, {"actor": models["large"], "critic": models["small"]})


def test_t07_position_limits(tmp_path: Path):
    for build, name in ((build_gpt2, "n_positions"), (build_llama, "max_position_embeddings")):
        folder = build(tmp_path / name, **{name: 48})
        networks = build_actor_critic(
            PolicyConfig(path=str(folder), lora=LoraConfig(rank=2)), CriticConfig()
        )
        assert max_positions(networks.actor) == max_positions(networks.critic) == 48
    # ALiBi has no table of positions, whatever length the config names.
    bloom = BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=16, n_layer=1, n_head=2))
    assert max_positions(bloom) is None
    assert positions_of(MptConfig(max_seq_len=64)) is None
    assert positions_of(FalconConfig(alibi=True)) is None
    assert positions_of(FalconConfig(alibi=False, max_position_embeddings=64)) == 64
