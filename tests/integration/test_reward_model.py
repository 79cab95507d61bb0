"""Reward models, from pairs to the folder that a policy is trained against."""

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close
from transformers import AutoTokenizer, pipeline

from ppo_lightning.checkpointing import export_supervised, read_supervised
from ppo_lightning.configs import GroupConfig
from ppo_lightning.data import PreferenceDataModule
from ppo_lightning.errors import CheckpointError, ConfigError
from ppo_lightning.io import read_jsonl
from ppo_lightning.metrics import RewardModelStats, read_step_metrics
from ppo_lightning.models import SequenceScorer, base_scorer, sequence_logits
from ppo_lightning.models import card as card_file
from ppo_lightning.models.card import read_card
from ppo_lightning.models.score_head import score_layer
from ppo_lightning.rewards import SequenceClassifierReward
from ppo_lightning.types import Completions
from tests.helpers.preferences import (
    FAMILIES,
    build_backbone,
    fit,
    pair_data,
    reward_module,
    rule_pairs,
    trainer,
)
from tests.helpers.runs import parameters

TEXTS = [
    "the cat good",
    "a bad dog sat on the red house and ran",
    "good",
    "the bird saw a bad tree",
]
LONG = " ".join(["the bad cat"] * 100) + " a good dog"


@pytest.fixture(scope="module")
def backbones(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("backbones")
    return {family: build_backbone(family, folder / family) for family in FAMILIES}


def completions(prompts, responses, messages=None) -> Completions:
    count = len(responses)
    return Completions(
        prompts=prompts,
        messages=messages or [None] * count,
        responses=responses,
        prompt_ids=[()] * count,
        response_ids=[()] * count,
        truncated=[False] * count,
        metadata=[{}] * count,
    )


# ---------------------------------------------------------------------- learning and the folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rule_is_learned_and_the_folder_scores_alike_everywhere(backbones, tmp_path, family):
    """T24: alone, in a batch, padded on either side, and by transformers' own pipeline."""
    settings = {"reading": {"plain_prompts": "text"}, "backbone": {"head_init": "zero"}}
    module = reward_module(backbones[family], **settings)
    used = fit(tmp_path, module, pair_data(rule_pairs(200)), max_epochs=6)
    assert used.callback_metrics["val/accuracy"] > 0.95
    folder = tmp_path / "model"
    scorer = SequenceScorer.load(str(folder), batch_size=3)
    rows = [scorer.token_ids(text) for text in TEXTS]
    alone = torch.cat([scorer.score([text]) for text in TEXTS])
    assert alone.unique().numel() == len(TEXTS)
    assert (alone[0] > alone[1]) & (alone[2] > alone[3])
    assert_close(scorer.score(TEXTS), alone, rtol=0, atol=1e-5)
    for left in (False, True):
        assert_close(padded_scores(scorer.model, rows, left=left), alone, rtol=0, atol=1e-5)
    # The trained network itself, on the rows that training would make of these texts.
    assert module.network is not None
    network = base_scorer(module.network.eval())
    assert_close(padded_scores(network, rows, left=False), alone, rtol=0, atol=1e-5)
    for size in (1, 3):
        theirs = pipeline("text-classification", model=str(folder), batch_size=size)
        found = [entry["score"] for entry in theirs(TEXTS, function_to_apply="none")]
        assert_close(torch.tensor(found), alone, rtol=0, atol=1e-5)
        assert [entry["score"] for entry in theirs(TEXTS)] == found  # the config says so too
        # Both cut the beginning: what is judged stands at the end.
        (cut,) = theirs([LONG], truncation=True)
        assert_close(torch.tensor(cut["score"]), scorer.score([LONG])[0], rtol=0, atol=1e-5)


@torch.no_grad()
def padded_scores(model, rows, *, left: bool) -> torch.Tensor:
    width = max(map(len, rows))
    ids = [[7] * (width - len(r)) + r if left else r + [7] * (width - len(r)) for r in rows]
    mask = [
        [0] * (width - len(r)) + [1] * len(r) if left else [1] * len(r) + [0] * (width - len(r))
        for r in rows
    ]
    return sequence_logits(model, torch.tensor(ids), torch.tensor(mask))[:, 0]


def test_the_weights_that_are_written_are_digested_once(backbones, tmp_path, monkeypatch):
    own, digested = card_file.weights_fingerprint, []

    def counted(path):
        digested.append(path)
        return own(path)

    monkeypatch.setattr(card_file, "weights_fingerprint", counted)
    backbone = str(backbones["gpt2"])
    fit(tmp_path, reward_module(backbones["gpt2"]), pair_data(), max_epochs=1)
    assert len([path for path in digested if path != backbone]) == 1
    card = read_card(str(tmp_path / "model"))
    assert card is not None
    assert card.fingerprint == own(str(tmp_path / "model"))
    assert [origin.fingerprint for origin in card.made_from] == [own(backbone)]


def test_t23_the_reward_component_reads_as_the_model_was_trained(backbones, tmp_path):
    """Chat template, end token, length limit and prompt travel with the folder."""
    module = reward_module(backbones["llama"], reading={"append_eos": True, "max_length": 10})
    fit(tmp_path, module, pair_data(rule_pairs(40), overlong="truncate"), max_epochs=1)
    card = read_card(str(tmp_path / "model"))
    assert card is not None
    assert (card.kind, card.made_from[0].path) == ("reward", str(backbones["llama"]))
    assert card.settings == {
        "plain_prompts": "chat",
        "include_prompt": True,
        "append_eos": True,
        "max_length": 10,
    }
    data = pair_data(rule_pairs(12, seed=5), val_pairs=rule_pairs(12, seed=5), overlong="truncate")
    fresh = reward_module(tmp_path / "model", reading={"append_eos": True, "max_length": 10})
    trainer(tmp_path).validate(fresh, data, verbose=False)
    assert fresh.network is not None
    component = SequenceClassifierReward(str(tmp_path / "model"))
    for example in data.val_examples:
        asked = completions(
            [example.pair.prompt] * 2,
            [turns[-1]["content"] for turns in (example.pair.chosen, *example.pair.rejected)],
        )
        rows = [list(example.chosen), list(example.rejected[0])]
        expected = padded_scores(base_scorer(fresh.network), rows, left=False)
        assert rows[0][-1] == AutoTokenizer.from_pretrained(backbones["llama"]).eos_token_id
        assert_close(component(asked), expected, rtol=0, atol=1e-5)


TURNS = "[CLS]{% for turn in messages %}{{ turn.content }}[SEP]{% endfor %}"
CHAT = [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "good dog"}]


@pytest.mark.parametrize("as_file", [False, True])
def test_a_template_for_an_encoder_travels_with_the_model(backbones, tmp_path, as_file):
    """The folder of the run, and one from its checkpoint, read a chat as it was trained."""
    given = TURNS
    if as_file:
        given = str(tmp_path / "turns.jinja")
        Path(given).write_text(TURNS)
    module = reward_module(backbones["bert"], reading={"chat_template": given})
    used = fit(tmp_path / "run", module, pair_data(), max_epochs=1)
    assert module.pair_reader.plain_prompts == "chat"
    plain = AutoTokenizer.from_pretrained(backbones["bert"])
    ids = plain(["a cat", "good dog"], add_special_tokens=False)["input_ids"]
    cls, sep = plain.cls_token_id, plain.sep_token_id
    row = [cls, *ids[0], sep, *ids[1], sep]
    assert module.pair_reader.tokens.token_ids(CHAT) == row
    export_supervised(
        read_supervised(used.checkpoint_callback.last_model_path), tmp_path / "from_checkpoint"
    )
    assert module.network is not None
    own = padded_scores(base_scorer(module.network.eval()), [row], left=False)
    for folder in (tmp_path / "run/model", tmp_path / "from_checkpoint"):
        scorer = SequenceScorer.load(str(folder))
        assert scorer.token_ids(CHAT) == row
        assert_close(scorer.score([CHAT]), own, rtol=0, atol=1e-5)


def test_t15_a_tokenizer_whose_pad_token_is_its_end_token(tmp_path):
    """transformers would read a text that ends with it one token early."""
    folder = build_backbone("llama", tmp_path / "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    reading = {"append_eos": True, "plain_prompts": "text"}
    fit(tmp_path / "run", reward_module(folder, reading=reading), pair_data(), max_epochs=1)
    model = str(tmp_path / "run/model")
    scores = SequenceScorer.load(model, append_eos=True).score(TEXTS)
    theirs = pipeline("text-classification", model=model, batch_size=4)
    ended = theirs([f"{text} {tokenizer.eos_token}" for text in TEXTS])
    assert_close(torch.tensor([entry["score"] for entry in ended]), scores, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(model).chat_template == tokenizer.chat_template


def test_adapters_are_merged_into_the_folder(backbones, tmp_path):
    module = reward_module(backbones["gpt2"], lora={"rank": 4}, reading={"plain_prompts": "text"})
    used = fit(tmp_path, module, pair_data(rule_pairs(80)), max_epochs=3)
    assert not any("lora" in file.name for file in (tmp_path / "model").iterdir())
    assert module.network is not None
    scorer = SequenceScorer.load(str(tmp_path / "model"))
    rows = [scorer.token_ids(text) for text in TEXTS]
    own = padded_scores(base_scorer(module.network.eval()), rows, left=False)
    assert_close(scorer.score(TEXTS), own, rtol=0, atol=1e-5)
    saved = torch.load(used.checkpoint_callback.last_model_path, weights_only=True)["state_dict"]
    assert saved
    assert all("lora_" in name or "score" in name for name in saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_normalised_over_the_training_answers(backbones, tmp_path, family, caplog):
    module = reward_module(
        backbones[family], normalize_scores=True, reading={"plain_prompts": "text"}
    )
    data = pair_data(rule_pairs(60))
    with caplog.at_level("INFO"):
        fit(tmp_path, module, data)
    before = parameters(module)
    rows = [list(row) for e in data.train_examples for row in (e.chosen, *e.rejected)]
    scores = padded_scores(SequenceScorer.load(str(tmp_path / "model")).model, rows, left=False)
    assert float(scores.std(correction=0)) == pytest.approx(1, abs=1e-4)
    assert ("no bias that could take the mean off" in caplog.text) is (family == "llama")
    if family != "llama":
        assert float(scores.mean()) == pytest.approx(0, abs=1e-4)
    assert all(value.equal(before[name]) for name, value in parameters(module).items())


def test_exported_by_hand_without_its_pairs_it_is_not_normalised(backbones, tmp_path):
    backbone = {"head_init": "zero"}
    module = reward_module(backbones["gpt2"], backbone=backbone, normalize_scores=True)
    with pytest.warns(UserWarning, match="no training pairs at hand"):
        module.export(tmp_path / "model")
    assert SequenceScorer.load(str(tmp_path / "model")).score(TEXTS).tolist() == [0.0] * 4


# ---------------------------------------------------------------------- resume


VARIANTS = {
    "full": {},
    "lora": {"lora": {"rank": 4}},
    "frozen": {"backbone": {"trainable_layers": 1}},
    "hard": {"negatives": "hardest", "hard_share": 0.6},
    "dropout": {"dropout": "keep"},
}


def keep_all() -> ModelCheckpoint:
    return ModelCheckpoint(filename="{step}", save_top_k=-1, every_n_train_steps=3)


def several(count: int) -> list[dict]:
    rows = rule_pairs(count)
    for row, other in zip(rows, rule_pairs(count, seed=9), strict=True):
        row["rejected"] = [row["rejected"], other["rejected"]]
    return rows


# Lightning says that files of another folder are not tracked any more: these resume elsewhere.
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_bitwise(tmp_path, variant):
    """T52, T53: weights, moments, schedule and order, from the middle of an epoch too."""
    family = "bert" if variant == "dropout" else "gpt2"  # whose config has dropout
    folder = build_backbone(family, tmp_path / "backbone")
    schedule = GroupConfig(lr=3e-3, warmup=2, schedule="cosine")

    def run(name, ckpt=None):
        module = reward_module(folder, group=schedule, **VARIANTS[variant])
        data = pair_data(several(18), batch_size=4, val_share=0.0, val_pairs=rule_pairs(8, seed=2))
        fit(tmp_path / name, module, data, ckpt=ckpt, callbacks=[keep_all()])
        return module, read_step_metrics(tmp_path / name / "metrics.jsonl", RewardModelStats)

    whole, rows = run("whole")
    for number in (3, 9):  # in the middle of an epoch, and at the end of one
        file = tmp_path / f"whole/checkpoints/step={number}.ckpt"
        pl.seed_everything(99, verbose=False)  # nothing may hang on the global generator
        module, resumed = run(f"resumed{number}", ckpt=file)
        for name, value in parameters(whole).items():
            assert value.equal(dict(module.named_parameters())[name]), name
        assert comparable(resumed[-1]) == comparable(rows[-1])


def comparable(stats: RewardModelStats) -> dict[str, float]:
    return {k: v for k, v in stats.to_log().items() if k[:5] != "time/" and k != "run/memory_gib"}


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_checkpoint_of_another_kind_is_refused(backbones, tmp_path):
    used = fit(tmp_path, reward_module(backbones["gpt2"]), pair_data(), max_epochs=1)
    path = used.checkpoint_callback.last_model_path
    content = torch.load(path, weights_only=True)
    content["ppo_lightning"]["kind"] = "sft"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="another kind"):
        fit(tmp_path / "again", reward_module(backbones["gpt2"]), pair_data(), ckpt=path)


# ---------------------------------------------------------------------- what is measured


def test_the_report_is_of_the_held_out_scores(backbones, tmp_path):
    module = reward_module(backbones["gpt2"], microbatch_tokens=70)
    data = pair_data(rule_pairs(60))
    fit(tmp_path, module, data, max_epochs=1)
    report = json.loads((tmp_path / "reward_report.json").read_text(encoding="utf-8"))
    scores = [module.scores_of([e.chosen, *e.rejected]).tolist() for e in data.val_examples]
    right = sum(chosen > rejected for chosen, rejected in scores)
    assert report["num_pairs"] == len(scores) == len(data.val_examples)
    assert report["accuracy"] == pytest.approx(right / len(scores))
    assert report["interval"][0] < report["accuracy"] < report["interval"][1]
    assert report["gap"]["mean"] == pytest.approx(
        sum(c - r for c, r in scores) / len(scores), abs=1e-5
    )
    page = (tmp_path / "reward_report.md").read_text(encoding="utf-8")
    assert f"accuracy **{report['accuracy']:.4f}**" in page
    rows = read_step_metrics(tmp_path / "metrics.jsonl", RewardModelStats)
    assert rows[-1].val_accuracy == pytest.approx(report["accuracy"])
    assert rows[-1].val_accuracy_low == pytest.approx(report["interval"][0])


def test_test_and_predict_go_over_the_held_out_pairs(backbones, tmp_path):
    module, data = reward_module(backbones["gpt2"]), pair_data(rule_pairs(60), val_batch_size=5)
    used = fit(tmp_path, module, data, max_epochs=1)
    validated = json.loads((tmp_path / "reward_report.json").read_text(encoding="utf-8"))
    (tested,) = used.test(module, data, verbose=False)
    assert tested["test/accuracy"] == pytest.approx(validated["accuracy"])
    assert json.loads((tmp_path / "reward_report.test.json").read_text()) == validated
    for _ in range(2):
        used.predict(module, data)  # the second one writes anew, and keeps the first
    assert (tmp_path / "scores.1.jsonl").is_file()
    lines = [record for _, record in read_jsonl(tmp_path / "scores.jsonl")]
    assert [line["origin"] for line in lines] == [e.pair.origin for e in data.val_examples]
    right = sum(line["chosen_score"] > line["rejected_score"] for line in lines)
    assert right / len(lines) == pytest.approx(validated["accuracy"])


def test_a_trial_run_leaves_no_files(backbones, tmp_path):
    fit(tmp_path, reward_module(backbones["gpt2"]), pair_data(), fast_dev_run=True)
    assert not list(tmp_path.rglob("*"))


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("family", "reading", "message"),
    [
        ("gpt2", {"plain_prompts": "chat"}, "needs a chat template"),
        ("bert", {"append_eos": True}, "has no end token"),
        ("bert", {"max_length": 65}, r"`reading.max_length` \(65\) exceeds the 64 tokens"),
    ],
)
def test_what_the_backbone_cannot_read_is_refused(backbones, family, reading, message):
    with pytest.raises(ConfigError, match=message):
        _ = reward_module(backbones[family], reading=reading).pair_reader


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"centering_coef": -1}, "`centering_coef` must be at least 0"),
        ({"label_smoothing": 0.5}, r"`label_smoothing` must lie in \[0, 0.5\)"),
        ({"negatives": "hard"}, "`negatives` must be one of each, hardest"),
        ({"hard_share": 0}, r"`hard_share` must lie in \(0, 1\]"),
    ],
)
def test_senseless_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        reward_module(Path("anywhere"), **settings)


def test_senseless_data_settings_are_refused(backbones, tmp_path):
    with pytest.raises(ValueError, match="`val_share` takes held-out pairs from `pairs`"):
        PreferenceDataModule(rule_pairs(2), rule_pairs(2), val_share=0.1)
    with pytest.raises(ValueError, match=r"`val_share` must lie in \[0, 1\)"):
        pair_data(val_share=1.0)
    with pytest.raises(ConfigError, match="leaves"):
        fit(tmp_path, reward_module(backbones["gpt2"]), pair_data(rule_pairs(8, num_prompts=1)))
    with pytest.raises(ConfigError, match=r"set `data.init_args.val_pairs` or `val_share`"):
        trainer(tmp_path).test(reward_module(backbones["gpt2"]), pair_data(val_share=0.0))


def test_gradient_checkpointing_changes_nothing(backbones, tmp_path):
    def run(name, **backbone):
        module = reward_module(backbones["llama"], backbone=backbone)
        fit(tmp_path / name, module, pair_data(), max_epochs=1, enable_checkpointing=False)
        return parameters(module)

    off = run("off")
    for name, value in run("on", gradient_checkpointing=True).items():
        assert value.equal(off[name]), name


def test_the_head_is_the_only_thing_trained_with_no_layers(backbones, tmp_path):
    module = reward_module(backbones["llama"], backbone={"trainable_layers": 0})
    module.configure_model()
    before = parameters(module)
    fit(tmp_path, module, pair_data(), max_epochs=1)
    moved = {name for name, value in parameters(module).items() if not value.equal(before[name])}
    assert moved == {"network.score.weight"}
    assert score_layer(base_scorer(module.network)).weight.abs().sum() > 0
