"""SFT, reward model, PPO: each step's folder is the next one's input."""

import json
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ppo_lightning.callbacks import ExportModel
from ppo_lightning.configs import BackboneConfig, GroupConfig, GuardConfig, PolicyConfig
from ppo_lightning.data import PreferenceDataModule, SFTDataModule
from ppo_lightning.errors import ModelError
from ppo_lightning.models import load_tokenizer, local_path
from ppo_lightning.models.card import read_card, weights_fingerprint
from ppo_lightning.modules import PPOModule, RewardModule, SFTModule
from ppo_lightning.rewards import RewardTerm, SequenceClassifierReward
from tests.helpers.cli import run_cli
from tests.helpers.runs import Recorder, data_module, ppo_module, trainer
from tests.helpers.tiny_models import build_llama

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} "
    "{{ eos_token }} {% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)
QUESTIONS = ["who are you", "what is a cat", "how is the movie", "is it good", "a dog ran"]
GOOD, BAD = "i like the good movie .", "bad sad awful no no"
DEMONSTRATIONS = [{"prompt": question, "response": GOOD} for question in QUESTIONS]
PAIRS = [{"prompt": question, "chosen": GOOD, "rejected": BAD} for question in QUESTIONS]


def fitted(folder, module, data, *callbacks, **options):
    pl.seed_everything(0, verbose=False)
    trainer(folder, callbacks=[*callbacks], log_every_n_steps=1, **options).fit(module, data)
    return module


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build_llama(tmp_path_factory.mktemp("chain") / "base")


@pytest.fixture(scope="module")
def runs(base):
    """The folders of the three runs, PPO's recorder, and the text of the template."""
    top, template = base.parent, base.parent / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    sft = SFTModule(
        PolicyConfig(path=str(base)),
        actor=GroupConfig(lr=1e-3),
        chat_template=str(template),
        num_texts=0,
    )
    data = SFTDataModule(DEMONSTRATIONS, batch_size=5, seed=1)
    fitted(top / "sft", sft, data, max_epochs=2, logger=True)
    reward = RewardModule(BackboneConfig(path=str(top / "sft")), group=GroupConfig(lr=3e-3))
    pairs = PreferenceDataModule(PAIRS, batch_size=5, seed=1)
    fitted(top / "rm", reward, pairs, max_epochs=8)
    recorder = Recorder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ppo = ppo_of(top)
        prompts = data_module(prompts=QUESTIONS, chat="auto", val_prompts=QUESTIONS[:2])
        fitted(top / "ppo", ppo, prompts, recorder, ExportModel(), max_epochs=1)
    said = [str(w.message) for w in caught if "Review" in str(w.message)]
    return {"top": top, "reward": reward, "recorder": recorder, "said": "\n".join(said)}


def ppo_of(top) -> PPOModule:
    learned = SequenceClassifierReward(path=str(top / "rm"))
    return ppo_module(
        top / "sft",
        rewards=[RewardTerm(name="rm", component=learned)],
        critic_model={"path": str(top / "rm")},
        guards=GuardConfig(self_check="error", advice="warn"),
    )


def test_each_step_finds_the_model_of_the_one_before(runs):
    top = runs["top"]
    assert local_path(str(top / "sft")) == str(top / "sft/lightning_logs/version_0/model")
    assert local_path(str(top / "rm")) == str(top / "rm/model")
    assert local_path(str(top / "ppo")) == str(top / "ppo/model")


def test_the_cards_tell_the_chain_back_to_the_base(runs, base):
    top = runs["top"]
    sft, reward, ppo = (read_card(str(top / name)) for name in ("sft", "rm", "ppo"))
    assert [card.kind for card in (sft, reward, ppo)] == ["sft", "reward", "ppo"]
    fingerprints = [weights_fingerprint(str(place)) for place in (top / "sft", base)]
    for card in (reward, ppo):
        assert [model.fingerprint for model in card.made_from] == fingerprints
        assert card.made_from[0].kind == "sft"
    assert [model.path for model in sft.made_from] == [str(base)]
    assert reward.settings["plain_prompts"] == "chat"
    assert sft.chat_template == reward.chat_template == ppo.chat_template != ""


def test_the_sft_models_template_goes_all_the_way(runs, base):
    top = runs["top"]
    assert load_tokenizer(str(base)).chat_template != TEMPLATE
    for name in ("sft", "rm", "ppo"):
        assert load_tokenizer(str(top / name)).chat_template == TEMPLATE
    prompts = runs["recorder"].collected[0].rollout.prompts.records
    assert all(record.text.endswith("<|im_end|> assistant : ") for record in prompts)
    assert all("<|im_start|>" not in record.text for record in prompts)


def test_nothing_is_wrong_with_the_start(runs):
    assert abs(runs["recorder"].stats[0].kl_ref) < 1e-4
    assert "reference.path" not in runs["said"]
    assert "rewards[rm]" not in runs["said"]


def test_the_reward_scores_as_it_was_trained(runs):
    """In PPO: the chat of the SFT model's template, with the answer as its last turn."""
    collected = runs["recorder"].collected[0]
    scores = collected.result.components["rm"]
    path = local_path(str(runs["top"] / "rm"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    texts = zip(collected.completions.messages, collected.completions.responses, strict=True)
    for (messages, response), score in zip(texts, scores, strict=True):
        chat = [*map(dict, messages), {"role": "assistant", "content": response}]
        ids = tokenizer.apply_chat_template(chat, return_dict=False, return_tensors="pt")
        with torch.no_grad():
            expected = model(ids).logits[0, 0]
        assert_close(score.float(), expected, rtol=1e-4, atol=1e-5)


def test_t37_the_critic_of_a_reward_run_is_that_reward_model(runs):
    module = ppo_of(runs["top"])
    module.configure_model()
    critic = module.networks.critic
    path = local_path(str(runs["top"] / "rm"))
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    ids = torch.tensor([[1, 8, 9, 10, 11]])
    with torch.no_grad():
        score = model(ids).logits[0, 0]
        value = critic.as_sequence_classifier(pad_token_id=0).eval()(ids).logits[0, 0]
    assert_close(value, score, rtol=1e-5, atol=1e-6)


def test_the_trained_reward_tells_good_from_bad(runs, tmp_path, monkeypatch, capsys):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS), encoding="utf-8")
    code = run_cli(
        monkeypatch, "check-reward", runs["top"] / "rm", "--pairs", pairs, "--device", "cpu"
    )
    assert code == 0
    assert "pairs            5       0  1.000" in capsys.readouterr().out


def test_an_sft_checkpoint_is_exported_as_the_run_wrote_it(runs, tmp_path, monkeypatch, capsys):
    last = next((runs["top"] / "sft").rglob("last.ckpt"))
    assert run_cli(monkeypatch, "export", last, tmp_path / "out") == 0
    assert "policy written to" in capsys.readouterr().out
    own, card = str(tmp_path / "out"), read_card(str(runs["top"] / "sft"))
    assert weights_fingerprint(own) == card.fingerprint
    assert read_card(own).kind == "sft"
    assert load_tokenizer(own).chat_template == TEMPLATE


def test_a_reward_checkpoint_is_exported_as_the_run_wrote_it(runs, tmp_path, monkeypatch, capsys):
    last = next((runs["top"] / "rm").rglob("last.ckpt"))
    assert run_cli(monkeypatch, "export", last, tmp_path / "out") == 0
    assert "reward model written to" in capsys.readouterr().out
    card, own = read_card(str(tmp_path / "out")), read_card(str(runs["top"] / "rm"))
    assert (card.kind, card.fingerprint, card.settings) == ("reward", own.fingerprint, own.settings)
    assert [model.kind for model in card.made_from] == ["sft", ""]


def test_options_of_ppo_are_refused_for_other_checkpoints(runs, tmp_path, monkeypatch, capsys):
    last = next((runs["top"] / "sft").rglob("last.ckpt"))
    assert run_cli(monkeypatch, "export", last, tmp_path / "out", "--critic") == 2
    assert "`--critic` is for checkpoints of PPO" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_step_that_was_stopped_is_named_by_the_next_one(runs, tmp_path):
    last = next((runs["top"] / "sft").rglob("last.ckpt"))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").symlink_to(last)
    with pytest.raises(
        ModelError, match=rf"ppo-lightning export {tmp_path}/checkpoints/last\.ckpt"
    ):
        load_tokenizer(str(tmp_path))


def test_the_best_epoch_of_sft_by_its_held_out_loss(base, tmp_path):
    """The held-out answer is none that is learned, so its loss rises."""
    module = SFTModule(PolicyConfig(path=str(base)), actor=GroupConfig(lr=1e-3), num_texts=0)
    held_out = [{"prompt": "who are you", "response": "a small cat ."}]
    data = SFTDataModule(DEMONSTRATIONS, held_out, batch_size=5, seed=1)
    kept = ExportModel(monitor="val/loss", mode="min")
    losses = Losses()
    fitted(tmp_path, module, data, losses, kept, max_epochs=4)
    best = min(range(4), key=losses.values.__getitem__)
    assert best < 3
    own = SFTModule(PolicyConfig(path=str(tmp_path)), num_texts=0)
    again = SFTDataModule(DEMONSTRATIONS, held_out, batch_size=5, seed=1)
    (found,) = trainer(tmp_path / "again").validate(own, again, verbose=False)
    assert found["val/loss"] == pytest.approx(losses.values[best], rel=1e-4)


class Losses(pl.Callback):
    def __init__(self):
        self.values = []

    def on_validation_end(self, trainer, pl_module):
        self.values.append(float(trainer.callback_metrics["val/loss"]))
