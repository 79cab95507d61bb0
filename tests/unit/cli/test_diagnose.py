"""``diagnose``: exit codes, options, and words for what goes wrong."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.helpers.cli import run_cli
from tests.helpers.report_runs import change, far_row, healthy_row, runaway_row, write_metrics

OWN_RULE = '''
from ppo_lightning.diagnostics import Rule, found, seen

class TooLong(Rule):
    """Longer than wanted."""
    illness = "too_long"
    def examine(self, course, limits):
        length = course.value("response_length_mean")
        return found("ill", seen("response_length_mean", length, limit=10.0)) if length else None

class Failing(TooLong):
    """Divides by zero in the third iteration."""
    def examine(self, course, limits):
        return 1 / (2 - course.now.iteration) and None

class NoRule:
    pass

class NeedsArguments(Rule):
    illness = "x"
    def __init__(self, limit): ...
    def examine(self, course, limits): ...

class NoName(Rule):
    def examine(self, course, limits): ...
'''


@pytest.fixture
def healthy(tmp_path):
    write_metrics(tmp_path / "healthy", [healthy_row(i) for i in range(20)])
    return tmp_path / "healthy"


@pytest.fixture
def ill(tmp_path):
    write_metrics(tmp_path / "ill", [runaway_row(i, since=5) for i in range(20)])
    return tmp_path / "ill"


@pytest.fixture
def own_rules(tmp_path, monkeypatch):
    (tmp_path / "own_rules.py").write_text(OWN_RULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_rules", None)


def test_the_exit_code_is_the_severity(healthy, ill, tmp_path, monkeypatch, capsys):
    assert run_cli(monkeypatch, "diagnose", healthy) == 0
    assert capsys.readouterr().out.startswith("healthy\n")
    assert run_cli(monkeypatch, "diagnose", ill) == 3
    assert capsys.readouterr().out.startswith("ill: ")
    rows = [(far_row if i == 6 else healthy_row)(i) for i in range(9)]
    write_metrics(tmp_path / "critical", rows)
    assert run_cli(monkeypatch, "diagnose", tmp_path / "critical") == 4


def test_json_alone_is_on_standard_output(ill, monkeypatch, capsys):
    assert run_cli(monkeypatch, "diagnose", ill, "--json") == 3
    assert json.loads(capsys.readouterr().out)["severity"] == "ill"


def test_limits_and_ignored_illnesses(ill, monkeypatch, capsys):
    run_cli(monkeypatch, "diagnose", ill, "--json")
    found = [d["illness"] for d in json.loads(capsys.readouterr().out)["diagnoses"]]
    assert "kl_runaway" in found
    run_cli(monkeypatch, "diagnose", ill, "--json", "--ignore", "kl_runaway")
    record = json.loads(capsys.readouterr().out)
    assert "kl_runaway" not in [d["illness"] for d in record["diagnoses"]]
    assert record["ignored"] == ["kl_runaway"]
    run_cli(monkeypatch, "diagnose", ill, "--json", "--limits.kl_ref", "1000")
    record = json.loads(capsys.readouterr().out)
    assert "kl_runaway" not in [d["illness"] for d in record["diagnoses"]]
    assert record["limits"]["kl_ref"] == 1000


def test_a_rule_of_ones_own(healthy, own_rules, monkeypatch, capsys):
    assert run_cli(monkeypatch, "diagnose", healthy, "--rules", "own_rules.TooLong") == 3
    assert capsys.readouterr().out.startswith("ill: too_long since iteration 0")


def test_columns_by_option_and_by_file(tmp_path, monkeypatch, capsys):
    log = tmp_path / "log.csv"
    rows = "\n".join(f"{i},{0.1 * i},2.0" for i in range(5))
    log.write_text(f"step,distance,e\n{rows}\n", encoding="utf-8")
    assert run_cli(monkeypatch, "diagnose", log) == 2
    assert "--column THEIRS=rollout/kl_ref" in capsys.readouterr().err
    pairs = ["--column", "distance=rollout/kl_ref", "--column", "e=entropy"]
    assert run_cli(monkeypatch, "diagnose", log, *pairs) == 0
    names = tmp_path / "names.yaml"
    names.write_text("distance: rollout/kl_ref\n", encoding="utf-8")
    assert run_cli(monkeypatch, "diagnose", log, "--columns", names) == 0
    assert run_cli(monkeypatch, "diagnose", log, "--columns", "trl") == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--columns", "tlr"], "Did you mean `trl`?"),
        (["--column", "x"], "write it as THEIRS=NAME"),
        (["--ignore", "kl_runawy"], "did you mean `kl_runaway`?"),
        (["--limits.kl_ref", "-1"], "`--limits`: `kl_ref` must be"),
        (["--limits.kl_reff", "1"], "Did you mean `--limits.kl_ref`?"),
        (["--limits.kl_ref", "far"], "invalid float value"),
        (["--rules", "no_such.Rule"], "cannot be imported: No module named 'no_such'"),
        (["--rules", "own_rules.Missing"], "has no attribute 'Missing'"),
        (["--rules", "own_rules.NoRule"], "is no rule"),
        (["--rules", "own_rules.NeedsArguments"], "cannot be made without arguments"),
        (["--rules", "Rule"], "Give `module.Class`"),
        (["--rules", "own_rules.NoName"], "NoName has no `illness`"),
        (["--rules", "own_rules.Failing"], "`too_long` (Failing) failed in iteration 2: ZeroDiv"),
        (["--rules", "own_rules.TooLong", "--rules", "own_rules.Failing"], "both look for"),
        (["--column", "a=kl_ref", "--column", "a=entropy"], "`--column a=…` is given twice"),
    ],
)
def test_wrong_options_are_told_in_a_line(healthy, own_rules, monkeypatch, capsys, options, said):
    assert run_cli(monkeypatch, "diagnose", healthy, *options) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize("text", ["", "- a\n", "a: [\n", "\x00"])
def test_a_file_of_columns_that_is_none(healthy, tmp_path, monkeypatch, capsys, text):
    names = tmp_path / "names.yaml"
    names.write_text(text, encoding="utf-8")
    assert run_cli(monkeypatch, "diagnose", healthy, "--columns", names) == 2
    assert str(names) in capsys.readouterr().err


def test_a_path_that_is_not_there(tmp_path, monkeypatch, capsys):
    assert run_cli(monkeypatch, "diagnose", tmp_path / "nothing") == 2
    assert "is not there" in capsys.readouterr().err


def test_a_page_is_not_written_over_a_folder(ill, tmp_path, monkeypatch, capsys):
    assert run_cli(monkeypatch, "diagnose", ill, "--html", tmp_path) == 2
    assert "is a folder" in capsys.readouterr().err


def test_the_page_is_not_written_over_the_log(ill, monkeypatch, capsys):
    log = ill / "metrics.jsonl"
    before = log.read_bytes()
    assert run_cli(monkeypatch, "diagnose", ill, "--html", log) == 2
    assert "is the log itself" in capsys.readouterr().err
    assert log.read_bytes() == before


def test_the_page_is_not_written_over_a_device(ill, tmp_path, monkeypatch, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert run_cli(monkeypatch, "diagnose", ill, "--html", tmp_path / "pipe") == 2
    assert "is no ordinary file" in capsys.readouterr().err
    assert not (tmp_path / "pipe").is_file()


def test_a_module_of_rules_that_is_broken_is_told_in_a_line(ill, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_rules.py").write_text("def (:\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert run_cli(monkeypatch, "diagnose", ill, "--rules", "broken_rules.X") == 2
    assert "cannot be imported: invalid syntax" in capsys.readouterr().err


def test_nothing_in_a_log_acts_on_the_terminal(tmp_path, monkeypatch, capsys):
    noted = {1: [change(1, "kl_coef", 1.0, 2.0, reason="\x1b[2J\x9b2Jgone")]}
    write_metrics(tmp_path, [healthy_row(i) for i in range(3)], noted)
    run_cli(monkeypatch, "diagnose", tmp_path)
    out = capsys.readouterr().out
    assert "gone" in out
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)


def test_columns_of_a_file_need_not_all_be_there(tmp_path, monkeypatch, capsys):
    log, names = tmp_path / "log.csv", tmp_path / "names.yaml"
    log.write_text("step,distance\n0,1.0\n1,2.0\n", encoding="utf-8")
    names.write_text("distance: kl_ref\njudge: val/sampled/gold\n", encoding="utf-8")
    assert run_cli(monkeypatch, "diagnose", log, "--columns", names) == 0
    assert "note: columns that are given and not there: `judge`" in capsys.readouterr().out
    names.write_text("judge: val/sampled/gold\n", encoding="utf-8")
    assert run_cli(monkeypatch, "diagnose", log, "--columns", names) == 2
    error = capsys.readouterr().err
    assert "has none of these columns: `judge`. It has `step`, `distance`." in error


def test_the_page_is_written_beside_what_is_printed(ill, tmp_path, monkeypatch, capsys):
    assert run_cli(monkeypatch, "diagnose", ill, "--html", tmp_path / "new" / "page.html") == 3
    printed = capsys.readouterr().out
    assert printed.startswith("ill: ")
    assert printed.endswith(f"\npage: {tmp_path / 'new' / 'page.html'}\n")
    assert "<title>ill: " in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")


def test_the_command_loads_no_torch(ill):
    code = (
        "import sys; from ppo_lightning.cli.main import main;"
        f"code = main(['diagnose', {str(ill)!r}]); print('torch' in sys.modules, code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False 3"


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_page_without_its_packages_says_what_to_install(ill, monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert run_cli(monkeypatch, "diagnose", ill, "--html", "page.html") == 2
    error = capsys.readouterr().err
    assert package in error
    assert "pip install 'ppo-lightning[report]'" in error
