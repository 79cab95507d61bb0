"""Tokenizer and models against each other."""

from pathlib import Path

import pytest
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    MptConfig,
)

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig, ReferenceConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import (
    build_actor_critic,
    check_tokenizers,
    check_vocabulary,
    load_causal_lm,
    load_tokenizer,
    max_positions,
)
from ppo_lightning.models.checks import check_behaviour, check_same_ids, positions_of
from tests.helpers.tiny_models import build_gpt2, build_llama


def test_t20_a_token_without_a_row_is_named_with_both_sizes(tiny_model_dir: Path):
    tokenizer = load_tokenizer(str(tiny_model_dir))
    networks = build_actor_critic(
        PolicyConfig(path=str(tiny_model_dir), lora=LoraConfig(rank=2)), CriticConfig()
    )
    rows = networks.causal_lm.config.vocab_size
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


def test_t20_an_id_must_stand_for_the_same_token_everywhere():
    ours = {"a": 0, "b": 1, "c": 2}
    check_same_ids(ours, {"a": 0, "b": 1}, "reference.path")  # the rest is a matter of rows
    check_same_ids(ours, {**ours, "pad": 3}, "reference.path")
    with pytest.raises(ModelError, match=r"`reference\.path`.*4 and 3 tokens; id 1 is 'c'.*'b'"):
        check_same_ids(ours, {"a": 0, "c": 1, "b": 2, "d": 3}, "reference.path")


@pytest.mark.parametrize("setting", ["critic_model", "reference"])
def test_t20_another_tokenizer_in_the_folder_of_critic_or_reference(
    setting: str, tiny_llama_dir: Path, tiny_gpt2_dir: Path, tmp_path: Path
):
    bare = build_gpt2(tmp_path / "bare")
    for file in bare.glob("token*"):
        file.unlink()
    policy, tokenizer = PolicyConfig(path=str(tiny_llama_dir)), load_tokenizer(str(tiny_llama_dir))

    def check(path: Path) -> None:
        critic, reference = (
            kind(path=str(path if name == setting else tiny_llama_dir))
            for name, kind in (("critic_model", CriticConfig), ("reference", ReferenceConfig))
        )
        check_tokenizers(tokenizer, policy, critic, reference)

    check(build_llama(tmp_path / "same", seed=3))
    check(bare)  # says nothing about its ids
    with pytest.raises(ModelError, match=rf"`{setting}\.path`.*another one than the policy's"):
        check(tiny_gpt2_dir)


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


def test_a_family_whose_attention_gives_nan_in_float64_is_refused():
    """Its mask, cast to float32, is infinite, and padding sees nothing at all."""
    config = Gemma2Config(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    check_behaviour(model, "folder")
    with pytest.raises(ModelError, match=r"`folder` .*nan in float64.*left.*`dtype: float32`"):
        check_behaviour(model.double(), "folder")
