"""What the README shows, runs: with a tiny model in the place of the real one."""

import re

import lightning.pytorch as pl
import pytest

from ppo_lightning.cli.main import HELPER_COMMANDS, TRAINER_COMMANDS
from ppo_lightning.metrics import read_metrics
from tests.helpers.cli import run_cli
from tests.helpers.pages import MODEL, ROOT, blocks, working_in, write_files

# The README is for a real model.
pytestmark = pytest.mark.filterwarnings("ignore:Review of the settings")


@pytest.fixture
def folder(tiny_llama_dir, tmp_path, monkeypatch):
    """A folder with the README's files, which is the working directory."""
    write_files("README.md", tmp_path, model=tiny_llama_dir)
    with working_in(tmp_path, monkeypatch):
        yield tmp_path


def test_the_python_example_trains(folder, tiny_llama_dir, capsys):
    [example] = [b for b in blocks("README.md") if b.language == "python" and b.name is None]
    assert MODEL in example.text
    assert len(example.text.splitlines()) <= 25
    names = {}
    exec(example.text.replace(MODEL, str(tiny_llama_dir)), names)
    assert isinstance(names["trainer"], pl.Trainer)
    [file] = folder.rglob("metrics.jsonl")
    recorded = read_metrics(file)
    assert [stats.iteration for stats in recorded] == [0, 1, 2]
    assert capsys.readouterr().out.split()[-1] == str(recorded[-1].score_mean)


def test_the_yaml_example_and_ones_own_parts_train(folder, monkeypatch, capsys):
    arguments = ["fit", "--config", "my.yaml", "--config", "parts.yaml", "--trainer.max_epochs=1"]
    assert run_cli(monkeypatch, *arguments, "--trainer.accelerator=cpu") == 0
    [file] = folder.rglob("metrics.jsonl")
    [stats] = read_metrics(file)
    assert set(stats.components) == {"calm", "brevity"}
    shown = capsys.readouterr().out
    assert "sampling 32 responses" in shown
    assert f"0 {stats.score_mean} {stats.kl_ref}" in shown


def test_commands_of_the_readme_are_all_there_are():
    found = [b.text for b in blocks("README.md") if b.text.startswith("ppo-lightning fit")]
    lines = "".join(found).replace("\\\n", " ").splitlines()
    named = {line.split()[1] for line in lines}
    assert named == {*TRAINER_COMMANDS, *HELPER_COMMANDS}


def test_files_that_the_readme_points_to_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    assert targets
    assert [t for t in targets if "://" not in t and not (ROOT / t).exists()] == []
