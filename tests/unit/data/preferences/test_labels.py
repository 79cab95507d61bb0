"""Pairs that do not show who wrote what, and the way back from labels to pairs."""

import json

import pytest

from ppo_lightning.data import as_records
from ppo_lightning.data.preferences.candidates import Candidate
from ppo_lightning.data.preferences.labels import blind_pairs, read_labels
from ppo_lightning.data.preferences.pairs import read_pairs
from ppo_lightning.errors import DataError

CHAT = ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})
PICKED = [
    (Candidate(prompt=f"q{i}", policy=f"own {i}", sft=f"sft {i}", score=float(i)), ["top score"])
    for i in range(40)
]


def labelled(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return as_records(path)


def row(**changes):
    return {"key": "k", "prompt": "q", "a": "first", "b": "second", "choice": None} | changes


def test_the_file_to_label_does_not_say_who_wrote_what():
    shown, aside = blind_pairs(PICKED, seed=0)
    assert {*shown[0]} == {"key", "prompt", "a", "b", "choice"}
    firsts = sum(line["policy"] == "a" for line in aside)
    assert 10 < firsts < 30  # neither side is the policy's
    assert [line["key"] for line in shown] == [line["key"] for line in aside]
    for line, what in zip(shown, aside, strict=True):
        assert line[what["policy"]].startswith("own")
    assert [line["prompt"] for line in shown] != [f"q{i}" for i in range(40)]
    assert aside[0]["why"] == ["top score"]


def test_the_seed_decides_the_order():
    assert blind_pairs(PICKED, seed=1) == blind_pairs(PICKED, seed=1)
    assert blind_pairs(PICKED, seed=1)[0] != blind_pairs(PICKED, seed=2)[0]


def test_labels_become_pairs_that_a_reward_model_learns_from(tmp_path):
    chat = Candidate(prompt="q", messages=CHAT, policy="own", sft="sft")
    shown, aside = blind_pairs([*PICKED, (chat, ["high KL"])], seed=0)
    for line, what in zip(shown, aside, strict=True):
        line["choice"] = "b" if what["policy"] == "a" else "a"  # always the SFT model's
    labels = read_labels([labelled(tmp_path / "l.jsonl", shown)])
    found = read_pairs(as_records(labels.pairs))
    assert len(found) == 41
    assert all(pair.chosen[-1]["content"].startswith("sft") for pair in found)
    assert all(pair.rejected[0][-1]["content"].startswith("own") for pair in found)
    (of_chat,) = [pair for pair in found if not isinstance(pair.prompt, str)]
    assert of_chat.prompt == CHAT


def test_ties_skips_and_open_lines_are_left_out_and_counted(tmp_path):
    rows = [
        row(key="1", choice="A "),
        row(key="2", choice="tie"),
        row(key="3", choice="skip"),
        row(key="4"),
        row(key="5", choice=""),
    ]
    labels = read_labels([labelled(tmp_path / "l.jsonl", rows)])
    assert labels.pairs == [{"prompt": "q", "chosen": "first", "rejected": "second", "key": "1"}]
    assert (labels.ties, labels.skipped, labels.unlabelled) == (1, 1, 2)


@pytest.mark.parametrize(
    ("choices", "winner"),
    [
        ("aab", "first"),
        ("abb", "second"),
        ("ab", None),
        (["a", "tie"], "first"),
        (["a", "tie", "tie"], None),
        (["a", "skip", "skip"], "first"),
    ],
)
def test_several_labels_of_a_pair_are_a_vote(tmp_path, choices, winner):
    sources = [
        labelled(tmp_path / f"{i}.jsonl", [row(choice=choice)]) for i, choice in enumerate(choices)
    ]
    labels = read_labels(sources)
    assert [pair["chosen"] for pair in labels.pairs] == ([winner] if winner else [])
    assert labels.ties == (winner is None)


def test_the_same_pair_the_other_way_round_is_the_same_vote(tmp_path):
    swapped = row(a="second", b="first", choice="b")
    files = [labelled(tmp_path / "1.jsonl", [row(choice="a")])]
    files.append(labelled(tmp_path / "2.jsonl", [swapped]))
    (pair,) = read_labels(files).pairs
    assert pair["chosen"] == "first"


def test_the_key_does_not_say_who_wrote_what():
    """It is the same whichever of the two answers is the policy's."""
    one = Candidate(prompt="q", policy="first", sft="second")
    other = Candidate(prompt="q", policy="second", sft="first")
    keys = {blind_pairs([(who, [])], seed=0)[0][0]["key"] for who in (one, other)}
    assert len(keys) == 1


def test_other_answers_under_the_same_key_are_another_pair(tmp_path):
    """A vote for `b` there says nothing of this `b`."""
    files = [
        labelled(tmp_path / "1.jsonl", [row(choice="a")]),
        labelled(tmp_path / "2.jsonl", [row(a="third", b="first", choice="b")]),
    ]
    found = read_labels(files)
    assert [(p["chosen"], p["rejected"]) for p in found.pairs] == [
        ("first", "second"),
        ("first", "third"),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choice": "c"}, r"l\.jsonl:2.*`choice` must be one of `a`, `b`, `tie`, `skip`"),
        ({"choice": 1}, "`choice` must be one of"),
        ({"a": None}, r"l\.jsonl:2.*has no `a`"),
        ({"b": 3}, "`b` must be a string"),
        ({"prompt": None}, "needs either `prompt` or `messages`"),
    ],
)
def test_bad_lines_are_named(tmp_path, changes, message):
    source = labelled(tmp_path / "l.jsonl", [row(choice="a"), row(**changes)])
    with pytest.raises(DataError, match=message):
        read_labels([source])


def test_a_file_without_labels_says_how_to_label(tmp_path):
    with pytest.raises(DataError, match="no line is labelled yet: set `choice`"):
        read_labels([labelled(tmp_path / "l.jsonl", [row()])])
