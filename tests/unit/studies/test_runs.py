import threading

import pytest

from ppo_lightning.studies import (
    BASE,
    Arm,
    Outcome,
    State,
    bare,
    execute,
    read_state,
    runs_of,
    write_state,
)
from tests.helpers.sweeps import BASE_CONFIG, FakeRunner, resolve


def arm(name=BASE):
    return Arm(name=name, settings={}, config=resolve({}), label=name)


def make(runs, runner, processes=1):
    told = []
    execute(runs, runner, processes=processes, tell=lambda run, state: told.append((run, state)))
    return told


def good(run):
    return [0.1, 0.2]


def test_a_run_writes_into_its_own_folder_with_its_own_seed(tmp_path):
    first, second = runs_of(arm("x=1"), (3, 4), tmp_path)
    assert (first.folder, second.folder) == (tmp_path / "x=1/seed_3", tmp_path / "x=1/seed_4")
    assert second.config["seed_everything"] == 4
    trainer = second.config["trainer"]
    assert trainer["default_root_dir"] == str(second.folder)
    assert trainer["logger"]["init_args"] == {
        "save_dir": str(second.folder),
        "name": "",
        "version": "",
    }
    assert trainer["max_epochs"] == 3
    assert BASE_CONFIG["seed_everything"] == 7


def test_a_config_without_a_logger_stays_so(tmp_path):
    config = resolve({}) | {"trainer": {"logger": False}}
    [run] = runs_of(Arm(name="a", settings={}, config=config, label="a"), (0,), tmp_path)
    assert run.config["trainer"]["logger"] is False


def test_what_each_run_has_of_its_own_is_no_part_of_the_config(tmp_path):
    runs = runs_of(arm(), (0, 1), tmp_path)
    assert bare(runs[0].config) == bare(runs[1].config) == bare(BASE_CONFIG)
    assert bare(BASE_CONFIG)["trainer"] == {"max_epochs": 3}


def test_finished_runs_are_not_repeated(tmp_path):
    runs = runs_of(arm(), (0, 1), tmp_path)
    runner = FakeRunner(good)
    make(runs[:1], runner)
    make(runs, runner)
    assert runner.made == [(BASE, 0, False), (BASE, 1, False)]
    assert [read_state(run.folder).status for run in runs] == ["finished", "finished"]
    assert make(runs, runner) == []


def test_a_run_that_fails_or_raises_leaves_the_others(tmp_path):
    def golds(run):
        if run.seed == 0:
            return Outcome(status="failed", error="killed by SIGKILL")
        if run.seed == 1:
            raise OSError("no space")
        return [0.1]

    runs = runs_of(arm(), (0, 1, 2), tmp_path)
    runner = FakeRunner(golds)
    ended = [state for _, state in make(runs, runner) if state.status != "running"]
    assert [(one.status, one.error) for one in ended] == [
        ("failed", "killed by SIGKILL"),
        ("failed", "OSError: no space"),
        ("finished", ""),
    ]
    runner.golds = good
    make(runs, runner)
    assert runner.made[3:] == [(BASE, 0, True), (BASE, 1, True)]
    assert read_state(runs[0].folder) == State(
        status="finished", attempts=2, seconds=read_state(runs[0].folder).seconds
    )


def test_time_adds_up_over_attempts(tmp_path):
    [run] = runs_of(arm(), (0,), tmp_path)
    write_state(run.folder, status="stopped", seconds=100.0, attempts=1)
    make([run], FakeRunner(good))
    state = read_state(run.folder)
    assert state.seconds > 100
    assert state.attempts == 2


@pytest.mark.parametrize("content", ["{", "[1]", "3", '{"status": "finished", "else": 1}'])
def test_a_damaged_state_is_a_run_that_was_cut_off(tmp_path, content):
    (tmp_path / "state.json").write_text(content, encoding="utf-8")
    expected = "finished" if "finished" in content else "stopped"  # of a later version, maybe
    assert read_state(tmp_path).status == expected


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_as_many_runs_at_a_time_as_wanted(tmp_path, processes):
    lock, at_work, most = threading.Lock(), [], []
    full = threading.Barrier(processes)

    def golds(run):
        with lock:
            at_work.append(run.seed)
            most.append(len(at_work))
        full.wait(timeout=30)  # passes only if as many come together
        with lock:
            at_work.remove(run.seed)
        return [0.1]

    make(runs_of(arm(), range(6), tmp_path), FakeRunner(golds), processes)
    assert max(most) == processes


def test_an_interrupt_stops_the_runs_and_starts_no_others(tmp_path):
    def golds(run):
        if run.seed == 0:
            return [0.1]
        runner.stopped.wait(timeout=30)
        return Outcome(status="stopped")

    def tell(run, state):
        if state.status == "finished":
            raise KeyboardInterrupt

    runner = FakeRunner(golds)
    runs = runs_of(arm(), range(4), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        execute(runs, runner, processes=2, tell=tell)
    assert {seed for _, seed, _ in runner.made} <= {0, 1, 2}
    assert not runner.killed
    states = [read_state(run.folder).status for run in runs]
    assert states[0] == "finished"
    assert states[1] == "stopped"
    assert states[3] in ("waiting", "stopped")
    runner = FakeRunner(good)
    make(runs, runner)
    assert (BASE, 0, False) not in runner.made
    assert (BASE, 1, True) in runner.made
