"""``export-pairs``: from a run's answers to pairs that a reward model is trained on again."""

import json
import shutil
import warnings

import pytest
from transformers import AutoTokenizer

from ppo_lightning.callbacks import PredictionWriter, SampleTexts
from ppo_lightning.cli.run_answers import answers_of_run
from ppo_lightning.configs import ValidationConfig
from ppo_lightning.data import as_records
from ppo_lightning.data.preferences.pairs import read_pairs
from tests.helpers.cli import run_cli
from tests.helpers.runs import data_module, ppo_module, trainer

QUESTIONS = ["who are you", "what is a cat", "how is the movie", "is it good", "a dog ran"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a chat run with samples, reward reports and predictions."""
    from tests.helpers.tiny_models import build_llama

    top = tmp_path_factory.mktemp("pairs")
    module = ppo_module(
        build_llama(top / "base"), validation=ValidationConfig(num_samples=2, num_texts=4)
    )
    data = data_module(prompts=QUESTIONS, val_prompts=QUESTIONS, chat=True, system_prompt="good")
    callbacks = [SampleTexts(), PredictionWriter()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = trainer(top / "run", callbacks=callbacks, max_epochs=2)
        one.fit(module, data)
        one.predict(module, data)
    return top / "run"


@pytest.fixture
def export(tmp_path, monkeypatch, capsys):
    def call(*arguments):
        code = run_cli(monkeypatch, "export-pairs", *arguments)
        said = capsys.readouterr()
        return code, said.out + said.err

    monkeypatch.chdir(tmp_path)
    return call


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_loop_from_run_to_training_pairs(run, export, tmp_path):
    code, said = export(run, "--num", "12", "--device", "cpu")
    assert code == 0, said
    shown, aside = rows(tmp_path / "pairs.jsonl"), rows(tmp_path / "pairs.key.jsonl")
    assert len(shown) == len(aside) == 12
    assert "12 pairs written to pairs.jsonl: " in said
    assert {*shown[0]} == {"key", "messages", "a", "b", "choice"}
    assert [turn["role"] for turn in shown[0]["messages"]] == ["system", "user"]
    assert any("top score" in line["why"] for line in aside)
    for line in shown:
        line["choice"] = "a"
    labelled = tmp_path / "labelled.jsonl"
    labelled.write_text("".join(json.dumps(line) + "\n" for line in shown), encoding="utf-8")
    code, said = export("--labels", labelled, "--to", "train.jsonl")
    assert code == 0, said
    assert "12 pairs written to train.jsonl (0 ties, 0 skipped, 0 without a label)" in said
    pairs = read_pairs(as_records(tmp_path / "train.jsonl"))
    assert {pair.chosen[-1]["content"] for pair in pairs} == {line["a"] for line in shown}


def test_answers_of_the_sft_model_are_those_of_the_run_or_made_anew(run, export, tmp_path):
    """Samples have them; where a run kept the policy's alone, the reference answers."""
    assert export(run, "--num", "4", "--device", "cpu")[0] == 0
    bare = shutil.copytree(run, tmp_path / "bare", ignore=shutil.ignore_patterns("samples"))
    code, said = export(bare, "--output", "more.jsonl", "--num", "4", "--device", "cpu")
    assert code == 0, said
    assert "answering" in said
    assert rows(tmp_path / "more.jsonl")


def test_an_answer_in_several_files_keeps_what_the_sft_model_said(tmp_path):
    """Predictions have the policy's answer alone; samples have both."""
    (tmp_path / "samples").mkdir()
    both = {"prompt": "q", "policy": "own", "reference": "theirs", "policy_score": 1.0}
    (tmp_path / "samples" / "iteration_0001.jsonl").write_text(json.dumps(both) + "\n")
    alone = {"prompt": "q", "response": "own", "score": 1.0}
    (tmp_path / "predictions.jsonl").write_text(json.dumps(alone) + "\n")
    (found,) = answers_of_run(tmp_path)
    assert (found.sft, found.source) == ("theirs", "samples/iteration_0001.jsonl")


def test_another_sft_model_answers_as_the_run_sampled(run, export, tmp_path):
    """Neither longer nor shorter: who labels would see it."""
    from tests.helpers.tiny_models import build_llama

    other = build_llama(tmp_path / "other", seed=5)
    bare = shutil.copytree(run, tmp_path / "bare", ignore=shutil.ignore_patterns("samples"))
    code, said = export(bare, "--sft", other, "--num", "4", "--device", "cpu")
    assert code == 0, said
    tokenizer = AutoTokenizer.from_pretrained(other)
    files = [rows(tmp_path / name) for name in ("pairs.jsonl", "pairs.key.jsonl")]
    for shown, aside in zip(*files, strict=True):
        answer = shown["b" if aside["policy"] == "a" else "a"]
        assert len(tokenizer(answer)["input_ids"]) <= 8  # the run's 6 and a start, not 64


def test_another_sft_model_answers_new_prompts_too(run, export, tmp_path):
    (tmp_path / "new.txt").write_text("hello you\n", encoding="utf-8")
    code, said = export(run, "--prompts", "new.txt", "--sft", "./nowhere", "--device", "cpu")
    assert code == 2
    assert "`./nowhere` does not exist" in said


def test_the_same_seed_gives_the_same_file(run, export, tmp_path):
    for name in ("1.jsonl", "2.jsonl"):
        assert export(run, "--num", "6", "--output", name, "--device", "cpu")[0] == 0
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()


def test_prompts_may_be_answered_by_the_checkpoint_and_scored(
    run, export, tmp_path, tiny_reward_dir
):
    (tmp_path / "new.txt").write_text("hello you\nwhat is good\nno\n", encoding="utf-8")
    asked = ["--prompts", "new.txt", "--reward", tiny_reward_dir, "--device", "cpu"]
    code, said = export(run, *asked)
    assert code == 0, said
    shown, aside = rows(tmp_path / "pairs.jsonl"), rows(tmp_path / "pairs.key.jsonl")
    assert {line["messages"][-1]["content"] for line in shown} <= {
        "hello you",
        "what is good",
        "no",
    }
    assert all(line["messages"][0] == {"role": "system", "content": "good"} for line in shown)
    assert all(isinstance(line["policy_score"], float) for line in aside)


def test_labels_are_not_written_over(run, export, tmp_path):
    (tmp_path / "pairs.jsonl").write_text("labelled for a week\n")
    code, said = export(run, "--device", "cpu")
    assert code == 2
    assert "`pairs.jsonl` exists, and may hold labels" in said
    assert (tmp_path / "pairs.jsonl").read_text() == "labelled for a week\n"
    assert export(run, "--overwrite", "--device", "cpu")[0] == 0
    # The file to label was sent away: what says who wrote which must not go with the next one.
    key = (tmp_path / "pairs.key.jsonl").read_text()
    (tmp_path / "pairs.jsonl").unlink()
    code, said = export(run, "--seed", "5", "--device", "cpu")
    assert code == 2
    assert "`pairs.key.jsonl` exists" in said
    assert (tmp_path / "pairs.key.jsonl").read_text() == key


@pytest.mark.parametrize("place", ["empty", "foreign", "missing"])
def test_a_folder_without_answers_says_what_was_looked_for(export, tmp_path, place):
    if place != "missing":
        (tmp_path / place).mkdir()
    if place == "foreign":
        (tmp_path / place / "photo.txt").write_text("")
    code, said = export(tmp_path / place)
    assert code == 2
    expected = "is no folder" if place == "missing" else "holds no answers of a PPO run (samples/"
    assert expected in said


def test_a_damaged_file_is_named_with_its_line(run, export, tmp_path):
    broken = shutil.copytree(run, tmp_path / "broken")
    for file in (broken / "samples").glob("*.jsonl"):
        file.write_text("{}\n{broken\n", encoding="utf-8")
    code, said = export(broken)
    assert code == 2
    assert "iteration_0001.jsonl:2" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either the folder of a run, or `--labels FILE --to FILE`"),
        (["--labels", "x.jsonl"], "`--labels FILE` and `--to FILE` belong together"),
        (["run", "--num", "0"], "`--num` must be at least 1"),
        (["run", "--reward", "rm"], "it needs `--prompts FILE`"),
        (["run", "--prompts", "p.txt"], "holds no checkpoint"),
        (["--labels", "no.jsonl", "--to", "t.jsonl"], "no.jsonl"),
    ],
)
def test_bad_options_say_what_is_meant(export, tmp_path, arguments, message):
    (tmp_path / "p.txt").write_text("hello\n")
    code, said = export(*arguments)
    assert code == 2
    assert message in said


def test_labels_that_are_all_ties_leave_nothing_to_learn(export, tmp_path):
    line = {"key": "k", "prompt": "q", "a": "x", "b": "y", "choice": "tie"}
    (tmp_path / "l.jsonl").write_text(json.dumps(line) + "\n")
    code, said = export("--labels", "l.jsonl", "--to", "t.jsonl")
    assert code == 2
    assert "every label is a tie or a skip" in said
    assert not (tmp_path / "t.jsonl").exists()
