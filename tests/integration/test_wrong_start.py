"""A run that does not start from the models that it was told about says so, with the evidence."""

import shutil
import warnings

import pytest
import torch

from ppo_lightning.configs import GuardConfig, LoraConfig, PolicyConfig, ReferenceConfig
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import attach_lora, load_causal_lm, load_tokenizer, save_model
from ppo_lightning.models.card import ancestor_of, make_card, weights_fingerprint, write_card
from ppo_lightning.rewards import RewardTerm, SequenceClassifierReward
from tests.helpers.runs import IdReward, data_module, fit, ppo_module
from tests.helpers.tiny_models import build_llama, build_reward_model


def said(tmp_path, folder, *, advice="warn", **settings):
    """What the first buffer made the run say, and what was recorded."""
    module = ppo_module(folder, guards=GuardConfig(advice=advice), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder = fit(tmp_path, module, data_module(), max_epochs=2, enable_checkpointing=False)
    texts = [str(w.message) for w in caught if "Review of the settings" in str(w.message)]
    lines = [line for text in texts for line in text.splitlines()]
    return [line for line in lines if "reference.path" in line or "rewards[" in line], recorder


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    """An SFT model in three forms: an adapter, merged, and the run's folder that holds it."""
    top = tmp_path_factory.mktemp("sft")
    base = build_llama(top / "base")
    torch.manual_seed(1)
    model = attach_lora(load_causal_lm(PolicyConfig(path=str(base))), LoraConfig(rank=4))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(top / "adapter")
    save_model(model, load_tokenizer(str(base)), top / "run" / "model")
    return {"base": base, "adapter": top / "adapter", "merged": top / "run"}


@pytest.mark.parametrize("policy", ["adapter", "merged"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_t25_the_sft_model_in_any_form_starts_at_zero(tmp_path, sft, policy, lora):
    reference = ReferenceConfig(path=str(sft["merged"]))
    lines, recorder = said(tmp_path, sft[policy], policy={"lora": lora}, reference=reference)
    assert lines == []
    assert abs(recorder.stats[0].kl_ref) < 1e-4


def test_the_base_in_its_place_is_named_with_kl_and_fingerprints(tmp_path, sft):
    reference = ReferenceConfig(path=str(sft["adapter"]))
    (line,), recorder = said(tmp_path, sft["base"], reference=reference)
    assert f"is `{sft['adapter']}` (weights {weights_fingerprint(str(sft['adapter']))[:8]})" in line
    assert f"as `{sft['base']}` (weights {weights_fingerprint(str(sft['base']))[:8]})" in line
    kl = float(line.partition("first update is ")[2].partition(" nats")[0])
    # The warning's estimate is k3, the metric's k1; both of eight responses.
    assert kl == pytest.approx(recorder.stats[0].kl_ref, rel=0.75)
    assert kl > 0.5
    assert "(8 responses)" in line


@pytest.mark.filterwarnings("ignore:Review of the settings")
def test_it_can_be_an_error_before_the_first_update(tmp_path, sft):
    reference = ReferenceConfig(path=str(sft["merged"]))
    module = ppo_module(
        sft["base"],
        guards=GuardConfig(advice="error"),
        ppo={"target_kl": 0.02},
        reference=reference,
    )
    before = {n: w.clone() for n, w in load_causal_lm(module.policy).state_dict().items()}
    with pytest.raises(ConfigError, match=r"reference\.path.*nats per response"):
        fit(tmp_path, module, data_module(), enable_checkpointing=False)
    after = module.networks.actor.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_off_is_silent(tmp_path, sft):
    reference = ReferenceConfig(path=str(sft["merged"]))
    assert said(tmp_path, sft["base"], advice="off", reference=reference)[0] == []


def reward_of(tmp_path, backbone, *, model=None):
    """A reward model whose card says that it was made from ``backbone``."""
    folder = tmp_path / "rm"
    build_reward_model(folder) if model is None else shutil.copytree(model, folder)
    origin = ancestor_of(str(backbone))
    write_card(folder, make_card(folder, kind="reward", source=origin, settings={}))
    return folder


def terms(folder):
    learned = SequenceClassifierReward(str(folder))
    return [
        RewardTerm(name="ids", component=IdReward()),
        RewardTerm(name="rm", component=learned, weight=0.1),
    ]


@pytest.fixture
def named_sft(tmp_path, sft):
    """The SFT model with its card."""
    folder = shutil.copytree(sft["merged"], tmp_path / "sft")
    origin = ancestor_of(str(sft["base"]))
    write_card(
        folder / "model", make_card(folder / "model", kind="sft", source=origin, settings={})
    )
    return folder


def test_a_reward_model_of_this_sft_model_is_fine(tmp_path, named_sft):
    rewards = terms(reward_of(tmp_path, named_sft))
    assert said(tmp_path / "run", named_sft, rewards=rewards)[0] == []


def test_a_reward_model_of_another_sft_model_is_named(tmp_path, named_sft, sft):
    rewards = terms(reward_of(tmp_path, named_sft))
    (line,), _ = said(tmp_path / "run", sft["base"], rewards=rewards)
    assert "warning: `rewards[rm].path`" in line
    assert f"made from the SFT model `{named_sft}`" in line
    assert weights_fingerprint(str(named_sft))[:8] in line
    assert weights_fingerprint(str(sft["base"]))[:8] in line


def test_a_folder_whose_weights_were_changed_is_said_to_be(tmp_path, named_sft):
    folder = reward_of(tmp_path, named_sft)
    other = build_reward_model(tmp_path / "other", seed=9)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    (line,), _ = said(tmp_path / "run", named_sft, rewards=terms(folder))
    assert "note: `rewards[rm].path`" in line
    assert "whose weights are others" in line


def test_a_reward_model_from_elsewhere_says_nothing_and_nothing_is_said(
    tmp_path, sft, tiny_reward_dir
):
    assert said(tmp_path, sft["base"], rewards=terms(tiny_reward_dir))[0] == []
