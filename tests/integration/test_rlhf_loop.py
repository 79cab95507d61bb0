"""The page about the loop is a script: it runs from demonstrations to the second reward model."""

import json
import shlex
from pathlib import Path

import pytest

from ppo_lightning.models.card import read_card
from tests.helpers.cli import run_cli
from tests.helpers.pages import working_in, write_files

PAGE = "docs/rlhf-loop.md"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Review of the settings"),
]


def label(path):
    """Stands in for people: they like short answers."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["choice"] = "a" if len(line["a"]) <= len(line["b"]) else "b"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def join(words):
    *sources, _, target = words
    Path(target).write_text("".join(Path(source).read_text("utf-8") for source in sources), "utf-8")


def test_the_loop_goes_round(tiny_llama_dir, tmp_path, monkeypatch, capsys):
    with working_in(tmp_path, monkeypatch):
        done = 0
        for block in write_files(PAGE, tmp_path, model=tiny_llama_dir):
            for line in block.text.splitlines() if block.language == "bash" else ():
                program, *words = shlex.split(line, comments=True)
                if program == "cat":
                    join(words)
                    continue
                if "--labels" in words:
                    label(tmp_path / "to_label.jsonl")
                assert program == "ppo-lightning"
                code = run_cli(monkeypatch, *words)
                allowed = (0, 1) if "runs/rm" in words and "check-reward" in words else (0,)
                assert code in allowed, f"{line}\n{capsys.readouterr().err}"
                done += 1
        cards = {name: read_card(f"runs/{name}") for name in ("sft", "rm", "ppo", "rm2", "ppo2")}
    assert done == 11
    assert [card.kind for card in cards.values()] == ["sft", "reward", "ppo", "reward", "ppo"]
    sft = cards["sft"].fingerprint
    assert all(cards[name].made_from[0].fingerprint == sft for name in ("rm", "ppo", "rm2"))
    for name in ("sft", "rm", "ppo"):
        (metrics,) = (tmp_path / "runs" / name).rglob("metrics.jsonl")
        assert '"val/' in metrics.read_text(), f"{name} measures nothing held out"
    assert cards["rm2"].fingerprint != cards["rm"].fingerprint
    assert (tmp_path / "all_pairs.jsonl").read_text().count("\n") > 4
    assert {"kinds", "warnings"} <= json.loads((tmp_path / "check.json").read_text()).keys()
