"""A run of this project, from training to its report: all that it leaves in its folder is read."""

import json
import re

import pytest

from tests.helpers.cli import changed, run_cli, tiny_config, write_config

pytest.importorskip("matplotlib", reason="plots are drawn with matplotlib")

CALLBACKS = [
    {"class_path": f"ppo_lightning.callbacks.{name}"} for name in ("BeforeAfter", "Doctor")
]


@pytest.fixture(params=["llama", "gpt2"])
def folder(request, tmp_path, monkeypatch):
    model = request.getfixturevalue(f"tiny_{request.param}_dir")
    config = changed(tiny_config(model, tmp_path / "runs"), "trainer.callbacks", CALLBACKS)
    assert run_cli(monkeypatch, "fit", "--config", write_config(tmp_path / "c.yaml", config)) == 0
    return tmp_path / "runs" / "lightning_logs" / "version_0"


def test_the_report_of_a_run_has_its_numbers_texts_and_settings(folder, monkeypatch, capsys):
    capsys.readouterr()
    page = folder / "report.html"
    code = run_cli(monkeypatch, "diagnose", folder.parents[1], "--json", "--html", page)
    record = json.loads(capsys.readouterr().out)
    assert code == record["exit_code"] in (0, 3, 4)
    assert record["run"]["path"] == str(folder / "metrics.jsonl")
    assert record["run"]["iterations"] == 2
    assert record["run"]["notes"] == []
    text = page.read_text(encoding="utf-8")
    assert "Best responses of iteration 0" in text
    assert "after: the policy" in text
    assert "before: the reference" in text
    setting = r'<th scope="row">model\.actor\.lr</th><td>0\.001</td><td>1\.0e-06</td>'
    assert re.search(setting, text)
    assert "model.ppo.clip_range" not in text  # it was the default


def test_the_event_file_of_a_run_says_the_same_as_its_metrics(folder, monkeypatch, capsys):
    capsys.readouterr()
    found = []
    for log in (folder / "metrics.jsonl", next(folder.glob("*tfevents*"))):
        run_cli(monkeypatch, "diagnose", log, "--json")
        record = json.loads(capsys.readouterr().out)
        found.append([(d["illness"], d["severity"], d["since"]) for d in record["diagnoses"]])
    assert found[0] == found[1]
