import threading
import time
from pathlib import Path

import pytest
import yaml

from ppo_lightning.studies import BASE, Arm, FitProcesses, processes, runs_of
from ppo_lightning.studies.processes import last_error
from tests.helpers.sweeps import resolve


@pytest.fixture
def run(tmp_path):
    arm = Arm(name=BASE, settings={}, config=resolve({}), label=BASE)
    [run] = runs_of(arm, (5,), tmp_path)
    run.folder.mkdir(parents=True)
    return run


def shell(script, **settings):
    """Runs a script in the place of `ppo-lightning`; its first argument is `fit`."""
    return FitProcesses(command=("sh", "-c", script, "sh"), **settings)


def test_a_run_is_a_fit_with_a_config_of_its_own(run):
    outcome = shell('echo "$@"; echo oops >&2')(run, again=False)
    assert outcome.status == "finished"
    config = run.folder / "fit.yaml"
    log = (run.folder / "run.log").read_text(encoding="utf-8")
    assert log.splitlines() == [f"fit --config {config}", "oops"]
    assert yaml.safe_load(config.read_text(encoding="utf-8")) == run.config


def test_a_run_that_was_begun_goes_on_from_its_last_checkpoint(run, monkeypatch):
    folders = []

    class Found:
        path = run.folder / "checkpoints/last.ckpt"

    def newest(found):
        folders.append(list(found))
        return Found

    monkeypatch.setattr(processes, "newest_good", newest)
    runner = shell('echo "$@"')
    runner(run, again=False)
    assert folders == []
    runner(run, again=True)
    assert folders == [[run.folder]]
    Found.path = None
    runner(run, again=True)
    log = (run.folder / "run.log").read_text(encoding="utf-8").splitlines()
    ends = [line.partition("fit.yaml")[2] for line in log]
    assert ends == ["", f" --ckpt_path {run.folder}/checkpoints/last.ckpt", ""]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo all is well; echo 'RuntimeError: x' >&2; exit 1", "RuntimeError: x"),
        ("exit 3", "exit code 3, without a word"),
        ("echo step 4; kill -9 $$", "killed by SIGKILL; its last line: step 4"),
        ("kill -9 $$", "killed by SIGKILL"),
        ("echo 'ppo-lightning: `lr` must be.'; echo 'look there'; exit 2", "`lr` must be."),
    ],
)
def test_why_a_run_failed(run, script, error):
    (run.folder / "run.log").write_text("an error of the attempt before\n", encoding="utf-8")
    outcome = shell(script)(run, again=False)
    assert (outcome.status, outcome.error) == ("failed", error)


def test_the_last_words_are_read_without_colours_and_progress(tmp_path):
    log = tmp_path / "run.log"
    log.write_bytes(b"\x1b[31mValueError: r\xc3\xa4d\x1b[0m\r\n\n \n")
    assert last_error(log) == "ValueError: räd"
    log.write_bytes(b"10 %\r20 %\r30 %")
    assert last_error(log) == "30 %"
    log.write_bytes(b"ppo-lightning: a notice\n" + b"Traceback\n" * 3 + b"KeyError: 3\n")
    assert last_error(log) == "KeyError: 3"
    log.write_bytes(b"\xff" * 1000)
    assert len(last_error(log)) == 300
    log.write_bytes(b"")
    assert last_error(log) == ""


STUBBORN = "trap 'echo stopping; exit 0' TERM; echo up; while :; do sleep 0.02; done"
DEAF = "trap '' TERM; echo up; while :; do sleep 0.02; done"


def at_work(run, runner):
    """Start a run, and wait until it has begun."""
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(runner(run, again=False)))
    thread.start()
    log = run.folder / "run.log"
    while not log.exists() or b"up" not in log.read_bytes():
        assert thread.is_alive()
    return thread, outcomes


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (STUBBORN, "finished"),
        (STUBBORN.replace("exit 0", "exit 143"), "stopped"),
        (DEAF, "stopped"),
    ],
)
def test_stopped_runs_end_and_no_others_start(run, script, status):
    runner = shell(script, grace=0.05 if script is DEAF else 60)
    thread, outcomes = at_work(run, runner)
    runner.stop()
    thread.join(timeout=30)
    assert [outcome.status for outcome in outcomes] == [status]
    assert runner(run, again=False).status == "stopped"
    assert (run.folder / "run.log").read_text(encoding="utf-8").count("up") == 1


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_what_a_run_has_started_is_stopped_with_it(run):
    runner = shell('sleep 60 & echo "up $!"; wait')
    thread, _ = at_work(run, runner)
    child = int((run.folder / "run.log").read_text(encoding="utf-8").split()[1])
    assert is_alive(child)
    runner.kill()
    thread.join(timeout=30)
    end = time.monotonic() + 30
    while is_alive(child):
        assert time.monotonic() < end


def test_what_a_killed_run_has_started_does_not_outlive_it(run):
    outcome = shell('sleep 60 & echo "up $!"; kill -9 $$')(run, again=False)
    assert outcome.error.startswith("killed by SIGKILL")
    child = int((run.folder / "run.log").read_text(encoding="utf-8").split()[1])
    end = time.monotonic() + 30
    while is_alive(child):
        assert time.monotonic() < end


def test_a_run_holds_the_lock_of_its_sweep(run, tmp_path):
    with open(tmp_path / "sweep.lock", "w", encoding="utf-8") as lock:
        runner = shell(f"readlink /proc/self/fd/{lock.fileno()}", keep_open=[lock.fileno()])
        assert runner(run, again=False).status == "finished"
    log = (run.folder / "run.log").read_text(encoding="utf-8")
    assert log == f"{tmp_path}/sweep.lock\n"


@pytest.mark.parametrize(("threads", "seen"), [(3, "3"), (None, "-")])
def test_threads_are_shared_out_where_nobody_has_said(run, monkeypatch, threads, seen):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    shell("echo ${OMP_NUM_THREADS:--}", threads=threads)(run, again=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    shell("echo ${OMP_NUM_THREADS:--}", threads=threads)(run, again=False)
    assert (run.folder / "run.log").read_text(encoding="utf-8").split() == [seen, "8"]
