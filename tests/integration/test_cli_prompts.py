"""What a config may give as prompts."""

from itertools import product
from pathlib import Path

import pytest
import yaml

from ppo_lightning.modules import PPOModule
from tests.helpers.cli import changed, run_cli, tiny_config, write_config

RECORDS = '{"prompt": "the cat", "answer": 1}\n{"prompt": "a dog", "answer": 2}\n'


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "records.jsonl").write_text(RECORDS, encoding="utf-8")
    return tiny_config("no/such/folder", tmp_path / "run")


def printed(monkeypatch, capsys, config, *arguments):
    path = write_config(Path("c.yaml"), config)
    assert run_cli(monkeypatch, "fit", "--config", path, *arguments, "--print_config") == 0
    return yaml.safe_load(capsys.readouterr().out)


def prompts(monkeypatch, capsys, config, *arguments):
    return printed(monkeypatch, capsys, config, *arguments)["data"]["init_args"]["prompts"]


def test_a_file_is_a_file_and_not_a_list_of_its_lines(monkeypatch, capsys, config):
    as_set = changed(config, "data.init_args.prompts", "records.jsonl")
    assert prompts(monkeypatch, capsys, as_set) == "records.jsonl"
    option = "--data.prompts=records.jsonl"
    assert prompts(monkeypatch, capsys, config, option) == "records.jsonl"


@pytest.mark.parametrize("given", [["a", "b"], [{"prompt": "a", "answer": 1}, "b"]])
def test_a_list_holds_strings_or_records(monkeypatch, capsys, config, given):
    config = changed(config, "data.init_args.prompts", given)
    assert prompts(monkeypatch, capsys, config) == given


SETTINGS = ("data.init_args.prompts", "data.init_args.val_prompts", "model.init_args.ptx.texts")
LOOKS_LIKE = {
    "lines.txt": "the cat\na dog\n",
    "list.txt": "[a, b]\n",
    "class.txt": "class_path: ppo_lightning.data.PromptList\ninit_args: {prompts: [x]}\n",
    "number.jsonl": "[1]\n",
    "list.jsonl": '["a", "b"]\n',
    "other.yaml": '["a", "b"]\n',
}


@pytest.mark.parametrize("name", LOOKS_LIKE)
def test_no_file_is_taken_for_a_piece_of_config(monkeypatch, capsys, config, name):
    Path(name).write_text(LOOKS_LIKE[name], encoding="utf-8")
    config = changed(config, "model.class_path", "ppo_lightning.modules.PPOModule")
    for setting in SETTINGS:
        config = changed(config, setting, name)
    found = printed(monkeypatch, capsys, config)
    again = printed(monkeypatch, capsys, found)
    for setting, whole in product(SETTINGS, (found, again)):
        place = whole
        for key in setting.split("."):
            place = place[key]
        assert place == name, setting


def read_records(monkeypatch, folder, config, **given):
    """The prompts that a whole tiny run was made of: trained, held out, and the texts beside."""
    seen = {}

    def note(module):
        data, mix = module.trainer.datamodule, module.updater.text_mix
        seen.update(train=data.train_set.records, held_out=data.val_set.records, ptx=mix.pieces)

    monkeypatch.setattr(PPOModule, "on_train_epoch_start", note)
    config = changed(config, "model.init_args.policy.path", str(folder))
    config = changed(config, "model.class_path", "ppo_lightning.modules.PPOModule")
    config = changed(config, "trainer.max_epochs", 1)
    for key, value in zip(SETTINGS, (given["train"], given["held_out"], given["ptx"]), strict=True):
        config = changed(config, key, value)
    assert run_cli(monkeypatch, "fit", "--config", write_config(Path("c.yaml"), config)) == 0
    return seen


def test_a_run_reads_the_same_records_from_files_and_lists(monkeypatch, config, tiny_llama_dir):
    Path("lines.txt").write_text("the cat\na dog\n", encoding="utf-8")
    from_files = read_records(
        monkeypatch,
        tiny_llama_dir,
        config,
        train="records.jsonl",
        held_out="lines.txt",
        ptx="lines.txt",
    )
    listed = [{"prompt": "the cat", "answer": 1}, {"prompt": "a dog", "answer": 2}]
    plain = ["the cat", "a dog"]
    from_lists = read_records(
        monkeypatch, tiny_llama_dir, config, train=listed, held_out=plain, ptx=plain
    )
    assert from_files["ptx"] == from_lists["ptx"]
    for part in ("train", "held_out"):
        of_files = [(r.prompt, r.metadata) for r in from_files[part]]
        assert of_files == [(r.prompt, r.metadata) for r in from_lists[part]]
        assert [r.origin.split(":")[0] for r in from_files[part]] == (
            ["records.jsonl"] * 2 if part == "train" else ["lines.txt"] * 2
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("number.jsonl", "number.jsonl:1: holds a JSON array"),
        ("other.yaml", "files, folders of the package datasets and `hub:NAME`, not from `.yaml`."),
        (5, "must be a `class_path` of a PromptSource or a text or a list or a path, got `5`"),
    ],
)
def test_what_holds_no_prompts_is_refused(monkeypatch, capsys, config, tiny_llama_dir, given, said):
    for name, text in LOOKS_LIKE.items():
        Path(name).write_text(text, encoding="utf-8")
    config = changed(config, "model.init_args.policy.path", str(tiny_llama_dir))
    path = write_config(Path("c.yaml"), changed(config, "data.init_args.prompts", given))
    assert run_cli(monkeypatch, "fit", "--config", path) == 2
    assert said in capsys.readouterr().err
