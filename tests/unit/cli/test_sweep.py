import math
import signal
import threading

import pytest

from ppo_lightning.cli import sweep, sweep_config, sweep_work
from ppo_lightning.cli.main import main
from ppo_lightning.cli.sweep import parse_seeds
from ppo_lightning.errors import ConfigError
from ppo_lightning.io import read_json
from ppo_lightning.studies import Outcome, measure
from ppo_lightning.studies import page as sweep_page
from tests.helpers.sweeps import METRIC, FakeConfig, FakeRunner

CLIP = "--vary=model.init_args.ppo.clip_range=0.1,0.3"
COEF = "--vary=model.init_args.kl.coef=0.02"
RANGE = "--vary=model.init_args.ppo.clip_range=0.05..0.4"


def golds_by_clip(run):
    """The wider the band, the better; seeds differ by more than that."""
    return [run.seed + run.config["model"]["init_args"]["ppo"]["clip_range"]] * 3


@pytest.fixture
def runner(monkeypatch):
    made = FakeRunner(golds_by_clip)
    monkeypatch.setattr(sweep, "make_runner", lambda asked, lock: made)
    monkeypatch.setattr(sweep_config, "SweepConfig", FakeConfig)
    monkeypatch.setattr(sweep_page, "plots_of", lambda comparison: [])  # they take a second
    return made


@pytest.fixture
def call(runner, tmp_path, capsys, monkeypatch):
    def called(*arguments, out=None):
        capsys.readouterr()
        code = main(["sweep", "--out", str(out or tmp_path / "out"), *map(str, arguments)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return called


def arms(tmp_path):
    return {arm["name"]: arm for arm in read_json(tmp_path / "out/sweep.json")["arms"]}


def test_a_sweep_compares_each_arm_with_the_config(call, runner, tmp_path):
    code, out, err = call(CLIP, "--seeds=0,1,2", "--processes=2")
    assert code == 0, err
    assert len(runner.made) == 9
    found = arms(tmp_path)
    assert list(found) == ["base", "clip_range=0.1", "clip_range=0.3"]
    wide = found["clip_range=0.3"]
    by_a_tenth = pytest.approx(0.1)
    assert wide["difference_to_base"] == {
        "mean": by_a_tenth,
        "low": by_a_tenth,
        "high": by_a_tenth,
        "num": 3,
    }
    assert wide["metric"]["mean"] == pytest.approx(1.3)
    assert wide["settings"] == {"model.init_args.ppo.clip_range": 0.3}
    assert wide["kl_ref"] == 2.0
    assert out.splitlines()[0].startswith("| arm")
    assert "| clip_range = 0.3 |" in out
    assert (tmp_path / "out/sweep.md").read_text(encoding="utf-8").startswith("# Sweep of c\n")
    assert "<td>2</td>" in (tmp_path / "out/sweep.html").read_text(encoding="utf-8")
    assert "clip_range=0.3, seed 2: finished" in err


def test_the_seed_of_the_config_is_the_default(call, runner):
    assert call(CLIP)[0] == 0
    assert {seed for _, seed, _ in runner.made} == {1}


def test_without_an_out_the_config_names_the_folder(runner, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", CLIP]) == 0
    assert (tmp_path / "sweeps/c/sweep.json").is_file()


def test_the_page_goes_where_it_is_wanted(call, tmp_path):
    assert call(CLIP, "--html", tmp_path / "else/p.html")[0] == 0
    assert (tmp_path / "else/p.html").is_file()
    assert not (tmp_path / "out/sweep.html").exists()


def test_a_grid(call, tmp_path):
    assert call(CLIP, COEF, "--grid")[0] == 0
    assert list(arms(tmp_path)) == ["base", "clip_range=0.1,coef=0.02", "clip_range=0.3,coef=0.02"]


def test_the_value_of_the_config_is_not_run_twice(call, tmp_path):
    code, _, err = call("--vary=model.init_args.ppo.clip_range=0.2,0.3")
    assert code == 0
    assert list(arms(tmp_path)) == ["base", "clip_range=0.3"]
    assert "clip_range = 0.2 is what the config has" in err


def test_a_finished_sweep_only_shows_its_table_again(call, runner, tmp_path):
    assert call(CLIP)[0] == 0
    made = len(runner.made)
    code, out, _ = call(CLIP, "--metric=rollout/kl_ref", "--last=1", "--processes=3")
    assert code == 0
    assert len(runner.made) == made
    assert "| rollout/kl_ref |" in out
    assert arms(tmp_path)["base"]["metric"]["mean"] == 3.0


def test_a_finished_run_is_read_once(call, monkeypatch):
    read = []

    def measured(run, state, metric, last):
        read.append((str(run), state.status))
        return measure(run, state, metric, last)

    monkeypatch.setattr(sweep_work, "measure", measured)
    assert call(CLIP, "--seeds=0,1,2")[0] == 0
    finished = [name for name, status in read if status == "finished"]
    assert len(finished) == len(set(finished)) == 9


def test_a_failed_run_is_told_and_made_again(call, runner, tmp_path):
    runner.golds = lambda run: (
        Outcome(status="failed", error="killed by SIGKILL")
        if "0.1" in run.arm
        else golds_by_clip(run)
    )
    code, out, _ = call(CLIP)
    assert code == 1
    assert "- clip_range = 0.1, seed 1: killed by SIGKILL" in out
    assert arms(tmp_path)["clip_range=0.3"]["metric"]["mean"] == pytest.approx(1.3)
    runner.golds, runner.made = golds_by_clip, []
    assert call(CLIP)[0] == 0
    assert runner.made == [("clip_range=0.1", 1, True)]


def test_a_metric_that_a_run_has_not_logged_is_told(call, runner):
    runner.golds = lambda run: [None, None]
    code, out, _ = call(CLIP)
    assert code == 0
    assert f"- base, seed 1: it has not logged `{METRIC}`" in out


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_what_is_done_when_it_is_stopped_is_shown_and_kept(call, runner, number, code):
    def stopping(run):
        if run.arm == "base":
            return golds_by_clip(run)
        signal.pthread_kill(threading.main_thread().ident, number)
        runner.stopped.wait(timeout=30)
        return Outcome(status="stopped")

    runner.golds = stopping
    before = signal.getsignal(number)
    left_with, out, _ = call(CLIP)
    assert left_with == code
    assert "| base" in out
    assert "cut off; the same command goes on with it" in out
    assert signal.getsignal(number) == before
    runner.golds, runner.made = golds_by_clip, []
    runner.stopped.clear()
    assert call(CLIP)[0] == 0
    made = {arm: again for arm, _, again in runner.made}
    assert made.keys() == {"clip_range=0.1", "clip_range=0.3"}  # the base was finished
    assert made["clip_range=0.1"]  # the other may have begun, too, before it was heard


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--vary=model.init_args.ppo.clip_range=0.1,0.4",),
            "`vary.model.init_args.ppo.clip_range` was `[0.1, 0.3]` there, and is `[0.1, 0.4]` now",
        ),
        ((CLIP, "--seeds=1,2"), "`seeds` was `[1]` there, and is `[1, 2]` now"),
        ((CLIP, "--grid"), "`kind` was `sweep` there, and is `grid` now"),
        ((CLIP, "--trainer.max_epochs=4"), "`trainer.max_epochs` was `3` there, and is `4` now"),
    ],
)
def test_another_sweep_in_the_folder_is_refused_before_it_starts(call, runner, options, said):
    assert call(CLIP)[0] == 0
    runner.made = []
    code, _, err = call(*options)
    assert code == 2
    assert said in err
    assert runner.made == []


REFUSED = [
    ((), "nothing is varied: give `--vary`"),
    (("--vary=model.init_args.ppo.clip_range=0.1,3",), "`clip_range` must lie in"),
    (("--vary=model.init_args.ppo.clip_range=",), "has no values"),
    (("--vary=model.init_args.ppo.clip_range=0.2",), "there is nothing to compare"),
    ((CLIP, "--vary=model.ppo.clip_range=0.4"), "is given twice"),
    ((CLIP, "--seeds=0,x"), "`--seeds 0,x`: seeds are whole numbers"),
    ((CLIP, "--seeds="), "seeds are whole numbers"),
    ((CLIP, "--seeds=0,0"), "a seed stands there twice"),
    ((CLIP, "--seeds=-1"), "seeds must lie in [0, "),
    ((CLIP, "--processes=0"), "`--processes` must be at least 1, got 0."),
    ((CLIP, "--last=0"), "`--last` must be at least 1, got 0."),
    ((CLIP, "--search=0"), "`--search` must be at least 1, got 0."),
    ((RANGE,), "is a range, which needs `--search N`"),
    ((CLIP, "--grid", "--search=3"), "`--grid` and `--search` exclude each other"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_is_refused_before_any_run(call, runner, tmp_path, options, said):
    code, out, err = call(*options)
    assert code == 2, out
    assert said in err
    assert runner.made == []
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_folder(call, runner, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    code, _, err = call(CLIP, out=tmp_path / "file")
    assert code == 2
    assert "is a file; give a folder" in err


def test_seeds():
    assert parse_seeds("3, 1") == (3, 1)
    assert parse_seeds(str(2**32 - 1)) == (2**32 - 1,)
    with pytest.raises(ConfigError, match="must lie in"):
        parse_seeds(str(2**32))


@pytest.mark.parametrize(("processes", "threads"), [(1, None), (2, 4), (16, 1)])
def test_processes_share_the_cores(monkeypatch, processes, threads):
    monkeypatch.setattr(sweep.os, "sched_getaffinity", lambda _: set(range(8)))

    class Asked:
        pass

    Asked.processes = processes
    made = sweep.make_runner(Asked, 3)
    assert (made.threads, made.keep_open) == (threads, (3,))


class TestSearch:
    @pytest.fixture(autouse=True)
    def _optuna(self):
        pytest.importorskip("optuna")

    def test_it_goes_on_and_counts_earlier_trials(self, call, runner, tmp_path):
        assert call(RANGE, "--search=2", "--seeds=0,1")[0] == 0
        assert len(runner.made) == 6
        code, out, _ = call(RANGE, "--search=4", "--seeds=0,1", "--processes=4")
        assert code == 0
        assert len(runner.made) == 10
        found = arms(tmp_path)
        assert list(found) == ["base", "trial_000", "trial_001", "trial_002", "trial_003"]
        best = max((arm["metric"]["mean"], arm["label"]) for arm in found.values())
        assert f"The best of 4 trials: {best[1]} (trial_00" in out

    def test_what_it_maximises_may_not_change(self, call):
        assert call(RANGE, "--search=1")[0] == 0
        for option, said in [
            ("--last=1", "`last` was `5` there, and is `1` now"),
            ("--metric=rollout/kl_ref", f"`metric` was `{METRIC}` there, and is"),
        ]:
            code, _, err = call(RANGE, "--search=1", option)
            assert code == 2
            assert said in err

    def test_a_trial_with_a_failed_run_counts_as_failed(self, call, runner, tmp_path):
        runner.golds = lambda run: (
            Outcome(status="failed", error="boom")
            if (run.arm, run.seed) == ("trial_000", 1)
            else golds_by_clip(run)
        )
        code, out, _ = call(RANGE, "--search=2", "--seeds=0,1")
        assert code == 1
        assert "seed 1: boom" in out
        assert "The best of 2 trials: clip_range" in out
        made = len(runner.made)
        assert call(RANGE, "--search=2", "--seeds=0,1")[0] == 1
        assert len(runner.made) == made  # it is not made again

    def test_a_trial_without_a_number_is_not_the_best(self, call, runner):
        runner.golds = lambda run: [math.nan] if run.arm == "trial_000" else golds_by_clip(run)
        code, out, _ = call(RANGE, "--search=2")
        assert code == 0
        assert "(trial_001)" in out

    def test_the_ends_of_a_range_are_tried_first(self, call, runner):
        code, _, err = call("--vary=model.init_args.ppo.clip_range=0.1..7.0", "--search=2")
        assert code == 2
        assert "`clip_range` must lie in" in err
        assert runner.made == []
