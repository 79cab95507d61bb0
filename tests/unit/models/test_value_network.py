"""Where a critic comes from and what it can become."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
)

from ppo_lightning.configs import CriticConfig, PolicyConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import (
    ValueNetwork,
    build_actor_critic,
    load_tokenizer,
    load_value_network,
    save_model,
)
from ppo_lightning.models.layout import TokenLayout
from tests.helpers.sequences import sequences_of
from tests.helpers.tiny_models import build_gpt2, build_llama, build_reward_model

IDS = torch.tensor([[5, 9, 11, 20, 13]])


def layout_of(length: int = 5) -> TokenLayout:
    """Ask for the values of all states of the first tokens."""
    prompt, response = IDS[0, :1].tolist(), IDS[0, 1:length].tolist()
    return TokenLayout.of(sequences_of([prompt], [response]), packed=False, final=True)


def critic_of(path: Path, policy: Path | None = None, **settings) -> ValueNetwork:
    return load_value_network(
        CriticConfig(path=str(path), **settings), PolicyConfig(path=str(policy or path))
    )


def test_t37_a_new_head_starts_at_zero_or_small(family_dir: Path):
    assert not critic_of(family_dir)(layout_of()).any()
    torch.manual_seed(0)
    weights = torch.cat([critic_of(family_dir, head_init="normal").head.weight for _ in range(16)])
    # 512 draws: their deviation is within 10 % of 1/sqrt(33), more than three standard errors.
    assert weights.std().item() == pytest.approx(33**-0.5, rel=0.1)


def test_t37_the_trunk_is_the_language_models_own(family_dir: Path):
    networks = build_actor_critic(PolicyConfig(path=str(family_dir)), CriticConfig())
    theirs = dict(networks.actor.base_model.named_parameters())
    for name, weight in networks.critic.backbone.named_parameters():
        assert torch.equal(weight, theirs[name]), name
        assert weight is not theirs[name]


def test_t37_a_critic_from_a_reward_model_values_the_end_at_its_score(tiny_reward_dir: Path):
    reward_model = AutoModelForSequenceClassification.from_pretrained(tiny_reward_dir)
    critic = critic_of(tiny_reward_dir)
    with torch.no_grad():
        for length in (2, 3, 5):
            score = reward_model(input_ids=IDS[:, :length]).logits[0, 0]
            value = critic(layout_of(length))[-1]
            assert_close(value, score, rtol=0, atol=1e-6)
            assert_close(critic(layout_of())[length - 1], score, rtol=0, atol=1e-5)
    assert torch.equal(critic.head.weight, reward_model.score.weight)


def test_values_are_float32_under_bfloat16_weights_and_autocast(tiny_model_dir: Path):
    critic = critic_of(tiny_model_dir, dtype="bfloat16", head_init="normal")
    assert critic.backbone.dtype == torch.bfloat16
    assert critic(layout_of()).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        values = critic(layout_of())
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


@pytest.mark.parametrize("build", [build_gpt2, build_llama])
def test_export_as_sequence_classifier_scores_as_the_critic_values(build, tmp_path: Path):
    folder = build(tmp_path / "model")
    critic = critic_of(folder, head_init="normal")
    tokenizer = load_tokenizer(str(folder))
    before = [p.data_ptr() for p in critic.parameters()]
    classifier = critic.as_sequence_classifier(pad_token_id=tokenizer.pad_token_id)
    save_model(classifier, tokenizer, tmp_path / "out")
    assert [p.data_ptr() for p in critic.parameters()] == before
    loaded, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.config.num_labels == 1
    with torch.no_grad():
        assert_close(loaded(input_ids=IDS).logits[0, 0], critic(layout_of())[-1], rtol=0, atol=1e-6)
    again = critic_of(tmp_path / "out")
    assert torch.equal(again(layout_of()), critic(layout_of()))


def test_the_exported_critic_says_what_the_folder_said(tmp_path: Path):
    folder = build_gpt2(tmp_path / "model", pad_token_id=None, resid_pdrop=0.1)
    critic = critic_of(folder, head_init="normal")
    save_model(critic.as_sequence_classifier(pad_token_id=1), None, tmp_path / "out")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert loaded.config.resid_pdrop == 0.1
    assert not (tmp_path / "out" / "generation_config.json").exists()
    # Without a pad id in its config a classifier of transformers refuses more than one row.
    padded = torch.tensor([[5, 9, 11, 20, 13], [5, 9, 11, 1, 1]])
    with torch.no_grad():
        scores = loaded(input_ids=padded, attention_mask=(padded != 1).long()).logits[:, 0]
        assert_close(scores, critic(layout_of())[[4, 2]], rtol=0, atol=1e-5)
    assert critic.backbone.config.pad_token_id is None


def test_t54_a_tied_model_lends_its_trunk_and_trains_on(tmp_path: Path):
    folder = build_gpt2(tmp_path / "model")
    critic = critic_of(folder, head_init="normal")
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    critic(layout_of()).sum().backward()
    optimizer.step()
    save_model(critic.as_sequence_classifier(), None, tmp_path / "once")
    again = critic_of(tmp_path / "once", policy=folder)
    assert torch.equal(again(layout_of()), critic(layout_of()))


def test_an_encoder_is_refused_by_name(tmp_path: Path):
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=40,
        num_labels=1,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match=r"bert` is an encoder.*BertForSequenceClassification"):
        critic_of(tmp_path / "bert")


def test_a_reward_model_of_several_labels_is_refused(tmp_path: Path):
    folder = build_reward_model(tmp_path / "many", num_labels=3)
    with pytest.raises(ModelError, match=r"`critic_model.path`.*3 label"):
        critic_of(folder)


def test_a_family_without_a_classifier_cannot_be_exported(tmp_path: Path):
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="family `mamba` has no sequence classifier"):
        critic_of(tmp_path).as_sequence_classifier()


def test_the_critic_of_a_rollout_reads_the_policys_ids(tiny_reward_dir: Path, tiny_llama_dir: Path):
    networks = build_actor_critic(
        PolicyConfig(path=str(tiny_llama_dir)), CriticConfig(path=str(tiny_reward_dir))
    )
    batch = sequences_of([[5, 9, 11]], [[20, 13]])
    expected = critic_of(tiny_reward_dir)(layout_of())[2:5]
    output = networks(batch, temperature=1.0)
    assert_close(output.values[0], expected[:2], rtol=0, atol=1e-6)
    assert_close(output.final_values[0], expected[2], rtol=0, atol=1e-6)
