"""Lightning's profilers know our stages, and one of ours traces a whole iteration."""

import json
import re

import pytest
import yaml

from ppo_lightning.callbacks import IterationProfiler, Throughput
from tests.helpers.cli import changed, run_cli, tiny_config, write_config
from tests.helpers.runs import data_module, fit, ppo_module

STAGES = ("rollout", "reward", "scoring", "update", "validation")
STEPS = 2  # of an iteration of ``tiny_config``


@pytest.fixture
def config(tiny_llama_dir, tmp_path):
    return tiny_config(tiny_llama_dir, tmp_path / "runs")


def fitted(monkeypatch, tmp_path, config, profiler):
    """Fit with a profiler that writes into a folder; the folder."""
    out = tmp_path / "profile"
    settings = yaml.safe_load(json.dumps(profiler).replace("OUT", str(out)))
    config = changed(config, "trainer.profiler", settings)
    file = write_config(tmp_path / "config.yaml", config)
    assert run_cli(monkeypatch, "fit", "--config", file) == 0
    return out


def block(name, **arguments):
    return {"class_path": name, "init_args": {"dirpath": "OUT", **arguments}}


@pytest.mark.parametrize("name", ["SimpleProfiler", "AdvancedProfiler"])
def test_stages_are_actions_of_lightnings_profilers(monkeypatch, tmp_path, config, name):
    profiler = block(f"lightning.pytorch.profilers.{name}", filename="report")
    folder = fitted(monkeypatch, tmp_path, config, profiler)
    text = "".join(file.read_text() for file in folder.glob("fit-report*.txt"))
    assert set(re.findall(r"\[Stage\]([a-z]+)\b", text)) == set(STAGES)
    assert {"[Stage]update.backward", "optimizer_step"} <= set(re.findall(r"[\[\]\w.]+", text))


@pytest.mark.parametrize("name", ["simple", "advanced", "pytorch"])
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden")
def test_profilers_by_name(monkeypatch, tmp_path, config, caplog, name):
    config = changed(config, "trainer.max_epochs", 1)
    file = write_config(tmp_path / "config.yaml", config)
    assert run_cli(monkeypatch, "fit", "--config", file, "--trainer.profiler", name) == 0
    assert "[Stage]update" in caplog.text


def spans(folder):
    """Beginning and end of our ranges in the one trace of a folder, by name."""
    (file,) = folder.glob("*.pt.trace.json")
    found = {}
    for event in json.loads(file.read_text())["traceEvents"]:
        head, _, name = event.get("name", "").partition("[Stage]")
        if name and event["ph"] == "X" and head == "[pl][profile]" and "dur" in event:
            if event["cat"] != "user_annotation":
                continue
            found.setdefault(name, []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def test_one_iteration_is_traced_whole(monkeypatch, tmp_path, config):
    profiler = block("ppo_lightning.callbacks.IterationProfiler")
    found = spans(fitted(monkeypatch, tmp_path, config, profiler))
    counts = {name: len(times) for name, times in found.items() if "." not in name}
    # One held-out batch: of the iteration before.
    assert counts == {"validation": 1, "rollout": 1, "reward": 1, "scoring": 1, "update": STEPS}
    ends = [max(end for _, end in found[name]) for name in ("rollout", "scoring", "update")]
    assert ends == sorted(ends)


def test_an_iteration_that_never_came_is_said_to_be_missing(tiny_llama_dir, tmp_path):
    profiler = IterationProfiler(iteration=3, dirpath=tmp_path, filename="report")
    fit(tmp_path, ppo_module(tiny_llama_dir), data_module(), max_epochs=2, profiler=profiler)
    assert list(tmp_path.glob("*.pt.trace.json")) == []
    assert "no iteration 3" in next(tmp_path.glob("fit-report*.txt")).read_text()


def test_the_first_iteration_cannot_be_traced():
    with pytest.raises(ValueError, match="`iteration` must be at least 1, got 0"):
        IterationProfiler(iteration=0)


def test_throughput_prints_a_table_when_the_run_ends(tiny_llama_dir, tmp_path, capsys):
    data = data_module(val_prompts=["no"])
    fit(tmp_path, ppo_module(tiny_llama_dir), data, callbacks=[Throughput()])
    said = capsys.readouterr().out
    assert "Time of an iteration, mean of 2 without the first 1\n" in said
    rows = [line.split("|")[1:-1] for line in said.splitlines() if line.startswith("|")][2:]
    names = [row[0].strip() for row in rows]
    assert names == [*STAGES, "rest", "iteration"]
    with_speed = [row[0].strip() for row in rows if row[3].strip()]
    assert with_speed == ["rollout", "scoring", "update", "iteration"]
