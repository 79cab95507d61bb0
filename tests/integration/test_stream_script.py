"""`experiments/speed/stream.py` on a small file: what it claims, and that it can say no."""

import importlib.util
import re

import pytest

from tests.helpers.named import ROOT


@pytest.fixture
def script():
    file = ROOT / "experiments" / "speed" / "stream.py"
    spec = importlib.util.spec_from_file_location("speed_stream", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("validate", ["all", "lazy"])
def test_a_small_file_is_streamed_and_resumed(script, capsys, tmp_path, validate):
    options = ["--megabytes", "2", "--prompts", "1500", "--validate", validate]
    assert script.main([*options, "--limit", "1000000", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"file: 0\.00\d GB, \d000 records", said)
    assert "same next prompts: yes" in said
    assert list(tmp_path.iterdir()) == []


def test_another_order_after_the_resume_is_noticed(script, monkeypatch, capsys, tmp_path):
    lazily = script.StreamedPrompts.feed

    def shifted(self, reader):
        feed = lazily(self, reader)
        take = feed.take
        if self.validate == "lazy":
            feed.take = lambda position, count, *, seed: take(position + 1, count, seed=seed)
        return feed

    monkeypatch.setattr(script.StreamedPrompts, "feed", shifted)
    options = ["--megabytes", "1", "--prompts", "1024", "--limit", "1000000"]
    assert script.main([*options, "--folder", str(tmp_path)]) == 1
    assert "same next prompts: NO" in capsys.readouterr().out


def test_too_much_memory_is_an_error(script, capsys, tmp_path):
    options = ["--megabytes", "1", "--prompts", "1024", "--limit", "-1"]
    assert script.main([*options, "--folder", str(tmp_path)]) == 1
