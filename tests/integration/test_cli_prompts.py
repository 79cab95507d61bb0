"""What a config may give as prompts."""

from pathlib import Path

import pytest
import yaml

from tests.helpers.cli import changed, run_cli, tiny_config, write_config

RECORDS = '{"prompt": "the cat", "answer": 1}\n{"prompt": "a dog", "answer": 2}\n'


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "records.jsonl").write_text(RECORDS, encoding="utf-8")
    return tiny_config("no/such/folder", tmp_path / "run")


def prompts(monkeypatch, capsys, config, *arguments):
    path = write_config(Path("c.yaml"), config)
    assert run_cli(monkeypatch, "fit", "--config", path, *arguments, "--print_config") == 0
    return yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["prompts"]


def test_a_file_is_a_file_and_not_a_list_of_its_lines(monkeypatch, capsys, config):
    as_set = changed(config, "data.init_args.prompts", "records.jsonl")
    assert prompts(monkeypatch, capsys, as_set) == "records.jsonl"
    option = "--data.prompts=records.jsonl"
    assert prompts(monkeypatch, capsys, config, option) == "records.jsonl"


@pytest.mark.parametrize("given", [["a", "b"], [{"prompt": "a", "answer": 1}, "b"]])
def test_a_list_holds_strings_or_records(monkeypatch, capsys, config, given):
    config = changed(config, "data.init_args.prompts", given)
    assert prompts(monkeypatch, capsys, config) == given
