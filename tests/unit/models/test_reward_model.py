"""Scores of a sequence classifier."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from ppo_lightning.errors import ModelError
from ppo_lightning.models import ScorerTokens, SequenceScorer, load_reward_model, sequence_logits
from tests.helpers.tiny_models import WIDE, build_reward_model, byte_pair_tokenizer, word_tokenizer

TEXTS = ["good cat.", "the dog sat on the red house and it was bad", "a", "yes"]
CHAT = ({"role": "user", "content": "a cat?"}, {"role": "assistant", "content": "yes, a good one"})


def build_gpt2_reward(folder: Path, **overrides: object) -> Path:
    tokenizer = byte_pair_tokenizer()
    settings = {
        "vocab_size": len(tokenizer),
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "num_labels": 1,
        "initializer_range": WIDE,
        "pad_token_id": None,
        "summary_first_dropout": 0.1,
        "resid_pdrop": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    torch.manual_seed(3)
    GPT2ForSequenceClassification(GPT2Config(**(settings | overrides))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def reward_dir(request, tmp_path_factory, tiny_reward_dir: Path) -> Path:
    if request.param == "llama":
        return tiny_reward_dir
    return build_gpt2_reward(tmp_path_factory.mktemp("reward") / "gpt2")


def by_hand(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None  # alone, the last token is the last
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def test_t24_scores_are_those_of_each_text_alone(reward_dir: Path):
    scorer = SequenceScorer.load(str(reward_dir), batch_size=3)
    scores = scorer.score(TEXTS)
    assert scores.dtype == torch.float32
    for score, text in zip(scores, TEXTS, strict=True):
        assert_close(score, by_hand(reward_dir, scorer.token_ids(text))[0], rtol=0, atol=1e-5)
        assert_close(scorer.score([text])[0], score, rtol=0, atol=1e-5)  # a batch of one
    assert scores.unique().numel() == len(TEXTS)


@pytest.mark.parametrize("side", ["left", "right"])
def test_t24_the_position_comes_from_the_mask_on_either_side(reward_dir: Path, side: str):
    model, tokenizer = load_reward_model(str(reward_dir))
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    rows[2] = [*rows[2], tokenizer.pad_token_id]  # a text that really ends with the pad id
    width = max(map(len, rows))
    pads = [[0] * (width - len(row)) for row in rows]
    ones = [[1] * len(row) for row in rows]
    left = side == "left"
    ids = torch.tensor([p + r if left else r + p for p, r in zip(pads, rows, strict=True)])
    mask = torch.tensor([p + o if left else o + p for p, o in zip(pads, ones, strict=True)])
    with torch.no_grad():
        logits = sequence_logits(model, ids, mask)
    for row, expected in zip(logits, rows, strict=True):
        assert_close(row, by_hand(reward_dir, expected), rtol=0, atol=1e-5)


def test_t23_a_chat_is_rendered_with_the_models_own_template(tiny_reward_dir: Path):
    scorer = SequenceScorer.load(str(tiny_reward_dir))
    rendered = scorer.tokenizer.apply_chat_template(
        [dict(turn) for turn in CHAT], tokenize=True, return_dict=True
    )["input_ids"]
    assert scorer.token_ids(CHAT) == rendered
    assert_close(scorer.score([CHAT])[0], by_hand(tiny_reward_dir, rendered)[0], rtol=0, atol=1e-5)


def test_t08_one_bos_for_chats_and_plain_texts(tmp_path: Path):
    tokenizer = word_tokenizer()
    folder = build_reward_model(tmp_path / "model", vocab_size=len(tokenizer), bos_token_id=1)
    tokenizer.save_pretrained(folder)
    scorer = SequenceScorer.load(str(folder))
    for text in (CHAT, "the cat sat"):
        assert scorer.token_ids(text).count(tokenizer.bos_token_id) == 1


def test_a_chat_without_a_template_is_its_contents(tmp_path: Path):
    scorer = SequenceScorer.load(str(build_gpt2_reward(tmp_path / "model")))
    assert scorer.token_ids(CHAT) == scorer.token_ids("a cat?\n\nyes, a good one")


def test_long_texts_lose_their_beginning(reward_dir: Path):
    scorer = SequenceScorer.load(str(reward_dir), max_length=4)
    whole = SequenceScorer.load(str(reward_dir)).token_ids(TEXTS[1])
    assert scorer.token_ids(TEXTS[1]) == whole[-4:]
    assert SequenceScorer.load(str(reward_dir)).max_length == (
        64 if "gpt2" in str(reward_dir) else 256
    )
    SequenceScorer.load(str(reward_dir)).score(["good " * 300])


def test_long_texts_keep_their_start_token_before_an_added_end_token(tiny_llama_dir: Path):
    """As the tokenizer itself cuts the text with its end token."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    text = " ".join(["the cat is good"] * 5)
    theirs = AutoTokenizer.from_pretrained(tiny_llama_dir, truncation_side="left")
    for limit in (2, 6):
        expected = theirs(f"{text}{tokenizer.eos_token}", truncation=True, max_length=limit)
        tokens = ScorerTokens(tokenizer, max_length=limit, append_eos=True)
        assert tokens.token_ids(text) == expected["input_ids"]
    assert len(ScorerTokens(tokenizer, max_length=1, append_eos=True).token_ids(text)) == 1


def test_t13_an_end_token_is_added_to_the_scorers_own_copy_only(reward_dir: Path):
    scorer = SequenceScorer.load(str(reward_dir), append_eos=True, max_length=4)
    eos = scorer.tokenizer.eos_token_id
    plain = SequenceScorer.load(str(reward_dir), max_length=4)
    assert scorer.token_ids("a") == [*plain.token_ids("a"), eos]
    assert scorer.token_ids(TEXTS[1]) == [*plain.token_ids(TEXTS[1])[1:], eos]


def test_t18_an_empty_text_has_a_score(reward_dir: Path):
    scorer = SequenceScorer.load(str(reward_dir))
    scores = scorer.score(["", "good"])
    assert scores.isfinite().all()
    assert_close(scorer.score([""])[0], scores[0], rtol=0, atol=1e-5)
    assert SequenceScorer.load(str(reward_dir)).score([]).shape == (0,)


LABELS = {
    "num_labels": 3,
    "id2label": {0: "bad", 1: "good", 2: "other"},
    "label2id": {"bad": 0, "good": 1, "other": 2},
}


def test_labels_are_read_by_number_or_name_as_logit_probability_or_odds(tmp_path: Path):
    folder = build_reward_model(tmp_path / "model", **LABELS)
    logits = torch.stack(
        [by_hand(folder, SequenceScorer.load(str(folder), label=0).token_ids(t)) for t in TEXTS]
    ).double()
    shares = logits.softmax(-1)[:, 1]
    expected = {
        "logit": logits[:, 1],
        "probability": shares,
        "log_odds": (shares / (1 - shares)).log(),
    }
    for transform, values in expected.items():
        for label in (1, "good", "GOOD"):
            scorer = SequenceScorer.load(str(folder), label=label, transform=transform)
            assert_close(scorer.score(TEXTS).double(), values, rtol=1e-4, atol=1e-5)


def test_yes_or_no_labels_are_judged_each_alone(tmp_path: Path):
    folder = build_reward_model(
        tmp_path / "model", **LABELS, problem_type="multi_label_classification"
    )
    raw = SequenceScorer.load(str(folder), label=1).score(TEXTS)
    odds = SequenceScorer.load(str(folder), label=1, transform="log_odds").score(TEXTS)
    shares = SequenceScorer.load(str(folder), label=1, transform="probability").score(TEXTS)
    assert torch.equal(odds, raw)
    assert_close(shares, raw.sigmoid(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("label", [None, 3, "goood"])
def test_an_unknown_label_is_refused_with_the_list(label, tmp_path: Path):
    folder = build_reward_model(tmp_path / "model", **LABELS)
    with pytest.raises(ModelError, match=r"`label`.*0 \(bad\), 1 \(good\), 2 \(other\)"):
        SequenceScorer.load(str(folder), label=label)


def test_an_encoder_scores_too(tmp_path: Path):
    tokenizer = word_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=1,
        hidden_dropout_prob=0.5,
        max_position_embeddings=32,
        initializer_range=WIDE,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    scorer = SequenceScorer.load(str(tmp_path))
    together = scorer.score(TEXTS)
    assert_close(torch.cat([scorer.score([t]) for t in TEXTS]), together, rtol=0, atol=1e-5)
    assert together.unique().numel() == len(TEXTS)


def test_a_model_without_a_table_of_positions_reads_texts_of_any_length(tmp_path: Path):
    tokenizer = byte_pair_tokenizer()
    config = BloomConfig(
        vocab_size=len(tokenizer), hidden_size=16, n_layer=1, n_head=2, num_labels=1
    )
    BloomForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    scorer = SequenceScorer.load(str(tmp_path))
    assert scorer.max_length is None
    assert len(scorer.token_ids("a" * 3000)) == 3000


def test_a_language_model_is_no_reward_model(tiny_llama_dir: Path):
    with pytest.raises(ModelError, match=r"score\.weight.*would be random"):
        SequenceScorer.load(str(tiny_llama_dir))


def test_the_scorer_is_frozen_and_no_module(reward_dir: Path):
    scorer = SequenceScorer.load(str(reward_dir)).to("cpu")
    assert not isinstance(scorer, torch.nn.Module)
    model, tokenizer = load_reward_model(str(reward_dir))
    own = SequenceScorer(model.train().requires_grad_(True), tokenizer).model
    for model in (scorer.model, own, load_reward_model(str(reward_dir))[0]):
        assert not any(p.requires_grad for p in model.parameters())
        assert not model.training
    assert torch.equal(scorer.score(TEXTS), scorer.score(TEXTS))
