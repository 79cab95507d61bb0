"""The speed experiments do what they say, on the smallest work; nothing is timed here."""

import json
import sys

from experiments.speed import compare, ppo

PEER = """
import json, sys
print("noise")
seconds = 6.0 if "--precision" not in sys.argv else 1.5
print(json.dumps({"s_per_iter": {"total": seconds}, "cpu_s_per_iter": {"total": 2 * seconds},
                  "response_tokens_per_iter": 100}))
"""


def test_one_iteration_of_the_smallest_size(capsys):
    result = ppo.main(["--size", "S", "--iters", "1", "--threads", "1"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert set(result["s_per_iter"]) == set(result["cpu_s_per_iter"]) == {
        "gen", "fwd", "update", "total"
    }  # fmt: skip
    stages = result["s_per_iter"]
    assert stages["gen"] + stages["fwd"] + stages["update"] <= stages["total"]
    assert result["optimizer_steps_per_iter"] == 16
    assert 64 <= result["response_tokens_per_iter"] <= 64 * 64


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
    assert "M fixed fp32: 1.00 (1.00 to 1.00, 2 rounds" in said
    assert "M fixed bf16: 4.00 (4.00 to 4.00, 2 rounds" in said
    assert run(2)[0] == second
