"""Answers to held-out prompts, reduced to a few numbers."""

import math

import pytest
import torch

import ppo_lightning.modules.held_out as held_out
from ppo_lightning.metrics import AnswerStats
from ppo_lightning.modules.held_out import Answer, answers_log, summarise

CPU = torch.device("cpu")


def answer(score=1.0, *, tokens=2, **others):
    settings = {
        "number": 0,
        "writer": "policy",
        "mode": "greedy",
        "prompt": "p",
        "response": "r",
        "ref_logprob": -1.0,
        "entropy": 0.5,
        "truncated": False,
        "repeated_bigrams": 0.0,
        "kl_ref": 0.25 if others.get("writer", "policy") == "policy" else None,
        "response_ids": (score, tokens),
    }
    return Answer(score=score, num_tokens=tokens, **(settings | others))


def test_each_way_of_answering_apart():
    found = summarise(
        [
            answer(1.0),
            answer(3.0),
            answer(10.0, mode="sampled"),
            answer(0.5, writer="reference", mode="sampled"),
            answer(99.0, writer="reference", mode="greedy"),
        ],
        CPU,
    )
    assert {name: stats.score for name, stats in found.items()} == {
        "val_greedy": 2.0,
        "val_sampled": 10.0,
        "val_reference": 0.5,  # sampled, as the policy's that it is compared with
    }
    assert found["val_reference"].kl_ref is None


def test_without_samples_the_reference_is_the_greedy_one():
    found = summarise([answer(1.0), answer(7.0, writer="reference")], CPU)
    assert found["val_reference"].score == 7.0
    assert "val_sampled" not in found


def test_t59_means_over_answers_and_means_over_tokens():
    answers = [
        answer(1.0, tokens=1, entropy=1.0, ref_logprob=-4.0, kl_ref=0.5, truncated=True),
        answer(2.0, tokens=3, entropy=2.0, ref_logprob=-2.0, kl_ref=1.5, repeated_bigrams=0.5),
    ]
    stats = summarise(answers, CPU)["val_greedy"]
    assert (stats.score, stats.kl_ref, stats.response_length) == (1.5, 1.0, 2.0)
    assert (stats.entropy, stats.ref_logprob_per_token) == (1.75, -2.5)
    assert (stats.truncated_share, stats.repeated_bigrams) == (0.5, 0.25)
    assert stats.gold is None
    judged = [answer(1.0, gold=4.0), answer(2.0)]
    assert summarise(judged, CPU)["val_greedy"].gold == 4.0
    assert summarise(judged, CPU)["val_greedy"].gold_error == 0.0
    several = [answer(1.0, gold=gold) for gold in (1.0, 2.0, 6.0, 7.0)]
    assert summarise(several, CPU)["val_greedy"].gold_error == pytest.approx(math.sqrt(6.5 / 4))


def test_ranks_are_summed_before_the_division(monkeypatch):
    """The other rank has three answers of score 5; a rank without any still takes part."""
    other = [answer(5.0)] * 3
    tables = []
    monkeypatch.setattr(held_out, "all_reduce_sum", lambda table: tables.append(table) or table)
    summarise(other, CPU)
    sums = iter(list(tables))
    monkeypatch.setattr(held_out, "all_reduce_sum", lambda table: table + next(sums))
    assert summarise([answer(1.0)], CPU)["val_greedy"].score == 4.0
    sums = iter(list(tables))
    assert summarise([], CPU)["val_greedy"].score == 5.0


def test_openings_are_compared_over_all_ranks(monkeypatch):
    other = [answer(9.0, response_ids=(7, 8))] * 2
    alone = summarise([*other, answer(1.0)], CPU)["val_greedy"].distinct_openings
    gather = held_out.gather_objects
    monkeypatch.setattr(held_out, "gather_objects", lambda ids: gather([*ids, (7, 8), (7, 8)]))
    assert alone == summarise([answer(1.0)], CPU)["val_greedy"].distinct_openings == 2 / 3


def test_no_answers_are_no_numbers():
    assert summarise([], CPU) == {}


def test_logged_names_are_those_of_what_was_measured():
    found = {"val_greedy": AnswerStats(score=1.0, kl_ref=2.0), "val_reference": AnswerStats()}
    assert answers_log("test", found) == {"test/greedy/score": 1.0, "test/greedy/kl_ref": 2.0}
