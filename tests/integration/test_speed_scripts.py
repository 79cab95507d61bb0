"""The speed experiments do what they say, on the smallest work; nothing is timed here."""

import json
import logging
import math
import sys
from dataclasses import replace

import pytest

from experiments.speed import compare, generation, growth, overhead, ppo, slope
from experiments.speed.sizes import SIZES

PEER = """
import json, sys
print("noise")
seconds = 6.0 if "--precision" not in sys.argv else 1.5
print(json.dumps({"size": "M", "rollout": 32, "response_tokens_per_iter": 100,
                  "response_tokens_per_s": 100 / seconds,
                  "s_per_iter": {"total": seconds}, "cpu_s_per_iter": {"total": 2 * seconds}}))
"""


@pytest.fixture(autouse=True)
def _loggers_as_they_were():
    """The scripts silence them for their whole process."""
    names = ("lightning.pytorch", "lightning.fabric", "ppo_lightning")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def tiny(monkeypatch):
    """The smallest size, in all scripts."""
    size = replace(slope.TINY, rollout=8, minibatches=2, response_len=8)
    monkeypatch.setitem(SIZES, "S", size)
    monkeypatch.setitem(slope.SIZE, "tiny", size)
    return size


def test_one_iteration_of_the_smallest_size(tiny, capsys):
    result = ppo.main(["--size", "S", "--iters", "1", "--threads", "1"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert set(result["s_per_iter"]) == set(result["cpu_s_per_iter"]) == {
        "gen", "fwd", "update", "total"
    }  # fmt: skip
    stages = result["s_per_iter"]
    assert stages["gen"] + stages["fwd"] + stages["update"] <= stages["total"]
    assert result["optimizer_steps_per_iter"] == tiny.epochs * tiny.minibatches
    assert tiny.rollout <= result["response_tokens_per_iter"] <= tiny.rollout * tiny.response_len


def test_runs_alternate_are_kept_and_not_made_twice(tmp_path, monkeypatch, capsys):
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    command = f"{sys.executable} {script}"
    monkeypatch.setattr(compare, "OURS", command)
    out = tmp_path / "rows.jsonl"
    options = ["--peer", command, "--sizes", "M", "--modes", "fixed", "--variants", "fp32", "bf16"]
    options += ["--out", str(out), "--rounds"]

    def run(rounds):
        monkeypatch.setattr(sys, "argv", ["compare.py", *options, str(rounds)])
        compare.main()
        rows = [json.loads(line)["run"] for line in out.read_text().splitlines()]
        return [(row["who"], row["round"]) for row in rows], capsys.readouterr().out

    first, _ = run(1)
    assert first == [("peer", 0), ("fp32", 0), ("bf16", 0)]
    second, said = run(2)
    assert second == [*first, ("peer", 1), ("fp32", 1), ("bf16", 1)]
    of_one, of_four = "1.00 (1.00 to 1.00)", "4.00 (4.00 to 4.00)"
    assert f"M fixed fp32: an iteration {of_one}, a token {of_one}, 2 rounds" in said
    assert f"M fixed bf16: an iteration {of_four}, a token {of_four}, 2 rounds" in said
    assert run(2)[0] == second


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(("axis", "tokens"), [("rollout", 16 * 8), ("response_len", 8 * 16)])
def test_a_point_of_the_growth_changes_one_number(tiny, capsys, axis, tokens):
    growth.main(["--point", axis, "16", "--iters", "1", "--threads", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["mode"] == "fixed"
    assert result["response_tokens_per_iter"] == tokens


def test_growth_goes_on_fits_exponents_and_draws(tmp_path, monkeypatch, capsys):
    made = []

    def make(point, iterations):
        made.append((point.axis, point.value, point.round))
        spent = {"gen": 0.1, "fwd": 0.1, "update": 1e-3 * point.value**1.5}
        # Fixed costs bend the curve: the upper points are closer to 0.8 than all of them.
        return {"cpu_s_per_iter": spent | {"total": 200 + 0.1 * point.value**0.8}}

    monkeypatch.setattr(growth, "make", make)
    out, picture = tmp_path / "growth.jsonl", tmp_path / "growth.png"
    options = ["--axes", "vocab", "--rounds", "1", "--threads", "1", "--out", str(out)]
    growth.main([*options, "--picture", str(picture)])
    assert made == [("vocab", value, 0) for value in growth.AXES["vocab"]]
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    update = next(line for line in lines if line[1:2] == ["update"])
    assert update[3:] == ["1.50", "1.50 |"]
    total = next(line for line in lines if line[1:2] == ["iteration"])
    assert 0.4 < float(total[3]) < float(total[4].rstrip(" |")) < 0.8
    growth.main([*options, "--picture", str(picture)])
    assert len(made) == len(growth.AXES["vocab"])


def test_the_slope_is_that_of_the_second_half():
    assert slope.slope([900, 500, 10, 10.5, 11, 11.5]) == pytest.approx(0.5)
    assert slope.slope([5]) == 0


@pytest.mark.parametrize(("limit", "code"), [("1e9", 0), ("-1e9", 1)])
def test_memory_is_read_after_every_iteration(tiny, tmp_path, capsys, limit, code):
    out = tmp_path / "rss.jsonl"
    options = ["--iters", "3", "--trim", f"--limit={limit}", "--out", str(out)]
    assert slope.main(options) == code
    assert [row["iteration"] for row in rows_of(out)] == [0, 1, 2]
    assert min(row["rss_mib"] for row in rows_of(out)) > 100
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["iterations"] == 3


def test_every_moment_is_charged_to_the_innermost_part(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(overhead.time, "thread_time", lambda: float(next(ticks)))
    shares = overhead.Shares()
    with shares.part("ledger"), shares.part("computing"):
        pass
    # Readings at 0 (start), 1, 2 (in), 3, 4 (out) and 5 (taken).
    assert shares.take() == {"loop": 2.0, "ledger": 2.0, "computing": 1.0}
    assert shares.take() == {"loop": 1.0}


def test_overhead_finds_every_part(tiny, tmp_path, capsys):
    profile = tmp_path / "frame.prof"
    options = ["--size", "S", "--iters", "2", "--save-every", "1", "--profile", str(profile)]
    assert overhead.main([*options, "--limit", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["iterations"] == 2
    assert min(result["cpu_seconds"].values()) > 0
    assert math.isclose(sum(result["shares"].values()), 1, abs_tol=1e-4)
    assert math.isclose(result["frame_share"] + result["shares"]["computing"], 1, abs_tol=1e-4)
    assert result["checkpoint_seconds_each"] > 0
    assert profile.stat().st_size > 0
    assert not hasattr(overhead.updater.accumulate_gradients, "__wrapped__")


@pytest.mark.parametrize("mode", ["fixed", "variable"])
def test_engines_sample_in_alternation(tiny, tmp_path, capsys, mode):
    out = tmp_path / "generation.jsonl"
    options = ["--sizes", "S", "--modes", mode, "--threads", "1", "--out", str(out), "--rounds"]
    generation.main([*options, "2"])
    names = [row["run"]["who"] for row in rows_of(out)]
    assert names == ["native", "plain", "scores", "scores", "plain", "native"]
    tokens = [row["result"]["tokens"] for row in rows_of(out)]
    most = tiny.rollout * tiny.response_len
    assert min(tokens) == most if mode == "fixed" else tiny.rollout <= min(tokens) < most
    assert f"S {mode} scores: " in capsys.readouterr().out
    generation.main([*options, "2"])
    assert len(rows_of(out)) == 6
