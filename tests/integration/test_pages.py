"""The pages of the documentation are scripts: their blocks run in order, on tiny models."""

import shlex

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.helpers.cli import run_cli
from tests.helpers.pages import ROOT, working_in, write_files

START = "docs/quickstart.md"  # its `my.yaml` is what all pages add to
PAGES = [START, *(f"docs/how-to/{path.name}" for path in sorted((ROOT / "docs/how-to").iterdir()))]

pytestmark = [
    pytest.mark.slow,
    # The pages are for real models; some go on in a folder that they wrote to.
    pytest.mark.filterwarnings("ignore:Review of the settings"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


@pytest.fixture
def folder(tiny_llama_dir, tiny_reward_dir, tmp_path, monkeypatch):
    """A working directory with the models that the pages name."""
    (tmp_path / "my-reward-model").symlink_to(tiny_reward_dir)
    critic = AutoModelForSequenceClassification.from_pretrained(tiny_llama_dir, num_labels=1)
    critic.save_pretrained(tmp_path / "critic-start")
    AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(tmp_path / "critic-start")
    write_files(START, tmp_path, model=tiny_llama_dir)
    with working_in(tmp_path, monkeypatch):
        yield tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(folder, tiny_llama_dir, monkeypatch, capsys, page):
    done = 0
    for block in write_files(page, folder, model=tiny_llama_dir):
        if block.language == "bash":
            for line in block.text.splitlines():
                command = shlex.split(line.removeprefix("PYTHONPATH=. "), comments=True)
                assert command[0] == "ppo-lightning", line
                code = run_cli(monkeypatch, *command[1:])
                assert code == 0, f"{line}\n{capsys.readouterr().err}"
                done += 1
        elif block.language == "python" and block.name is None:
            exec(block.text, {})
            done += 1
    assert done > 0
    assert torch.is_grad_enabled()
