"""Rewards from YAML: schedules, constraints, rewards per token, and what a run writes of them."""

import json

import pytest
import yaml

from ppo_lightning.metrics import read_metrics
from tests.helpers.cli import changed, run_cli, tiny_config, write_config

REWARDS = """
- name: words
  weight: {start: 1.0, end: 0.0, iterations: 2, kind: cosine, delay: 0}
  component: {class_path: ppo_lightning.rewards.RegexReward, init_args: {pattern: cat}}
- name: repeats
  weight: 0.5
  component: {class_path: ppo_lightning.rewards.TokenRepetitionPenalty, init_args: {n: 1}}
- name: length
  component: {class_path: ppo_lightning.rewards.ResponseLength}
  constraint: {bound: 2.0, direction: at_most, lr: 0.25, initial: 0.5, max: 1.0}
- name: long
  weight: 0.25
  component:
    class_path: ppo_lightning.rewards.LengthPenalty
    init_args: {free_tokens: 2, full_tokens: 4}
- name: cut
  component: {class_path: ppo_lightning.rewards.MissingEosPenalty}
"""


@pytest.fixture
def config(tiny_llama_dir, tmp_path):
    found = tiny_config(tiny_llama_dir, tmp_path / "run")
    return changed(found, "model.init_args.rewards", yaml.safe_load(REWARDS))


def test_every_kind_of_reward(config, tmp_path, monkeypatch):
    histograms = []
    monkeypatch.setattr(
        "torch.utils.tensorboard.SummaryWriter.add_histogram",
        lambda self, name, values, step: histograms.append((name, len(values), step)),
    )
    run_cli(monkeypatch, "fit", "--config", write_config(tmp_path / "c.yaml", config))
    folder = next((tmp_path / "run" / "lightning_logs").iterdir())
    first, second = read_metrics(folder / "metrics.jsonl")
    assert [s.components["words"].weight for s in (first, second)] == [1.0, 0.5]
    excess = first.response_length_mean - 2
    assert first.components["length"].multiplier == 0.5
    assert first.components["length"].violation == pytest.approx(excess)
    expected = min(0.5 + 0.25 * excess, 1.0)
    assert second.components["length"].multiplier == pytest.approx(expected)
    parts = [part.weighted for part in first.components.values()]
    assert first.raw_score_mean == pytest.approx(sum(parts), abs=1e-6)
    report = json.loads((folder / "rewards" / "iteration_0000.json").read_text(encoding="utf-8"))
    assert {*report["components"]} == {"words", "repeats", "length", "long", "cut"}
    assert len(report["best"]) == 4
    assert histograms == [("rollout/raw_score", 4, 0)]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "0.weight",
            {"start": 1.0, "end": 0.0, "iterations": 0},
            "`iterations` must be at least 1",
        ),
        ("0.weight", {"start": 1.0, "end": 0.0}, "iterations"),
        ("2.constraint", {"bond": 2.0}, "bound"),
        ("2.constraint", {"bound": 2.0, "direction": "below"}, "at_most"),
        ("2.weight", 0.5, "`weight` of reward `length` must be left out"),
        (
            "3.component.init_args",
            {"free_tokens": 5, "full_tokens": 4},
            "`full_tokens` must exceed",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    config, tmp_path, monkeypatch, capsys, key, value, message
):
    wrong = changed(config, f"model.init_args.rewards.{key}", value)
    code = run_cli(monkeypatch, "fit", "--config", write_config(tmp_path / "c.yaml", wrong))
    said = capsys.readouterr().err
    print(said)
    assert code == 2
    assert message in said
