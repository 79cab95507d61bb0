import os
import re
import subprocess

import pytest

from ppo_lightning.errors import ConfigError, DataError
from ppo_lightning.studies import keep_definition, locked, write_state

DEFINITION = {
    "kind": "sweep",
    "vary": {"model.kl.coef": [0.1, [1, 2]]},
    "seeds": [0, 1],
    "config": {"trainer": {"max_epochs": 3}, "model": {"init_args": {"kl": {"coef": 0.05}}}},
}


def changed(**changes):
    return DEFINITION | changes


def test_the_same_definition_goes_on(tmp_path):
    keep_definition(tmp_path, DEFINITION)
    keep_definition(tmp_path, changed(vary={"model.kl.coef": (0.1, (1, 2))}))  # as JSON has it


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (changed(seeds=[0, 2]), "`seeds` was `[0, 1]` there, and is `[0, 2]` now"),
        (changed(kind="grid"), "`kind` was `sweep` there, and is `grid` now"),
        (
            changed(config={"trainer": {"max_epochs": 4}, "model": DEFINITION["config"]["model"]}),
            "`trainer.max_epochs` was `3` there, and is `4` now",
        ),
        (changed(vary={}), "`vary.model.kl.coef` was `[0.1, [1, 2]]` there, and is `nothing` now"),
        (changed(metric="x"), "`metric` was `nothing` there, and is `x` now"),
    ],
)
def test_another_definition_is_refused(tmp_path, now, said):
    keep_definition(tmp_path, DEFINITION)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        keep_definition(tmp_path, now)
    assert "Give another folder with `--out`" in str(caught.value)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds `thesis\.tex` and is no folder of a sweep"):
        keep_definition(tmp_path, DEFINITION)


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="no folder of a sweep"), locked(tmp_path):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_definition_is_named(tmp_path, content):
    (tmp_path / "definition.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"definition\.json"):
        keep_definition(tmp_path, DEFINITION)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "x").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="is a file; give a folder"), locked(tmp_path / "x"):
        pass


def test_one_sweep_at_a_time_in_a_folder(tmp_path):
    out = tmp_path / "new" / "sweep"
    with locked(out):
        keep_definition(out, DEFINITION)  # the lock's own file is no stranger
        with pytest.raises(ConfigError, match="a sweep is at work in"), locked(out):
            pass
    with locked(out):
        pass


def test_a_run_that_outlives_its_sweep_keeps_others_out(tmp_path):
    with locked(tmp_path) as lock:
        keep_definition(tmp_path, DEFINITION)
        left = subprocess.Popen(["sleep", "60"], pass_fds=[lock])
    try:
        write_state(tmp_path / "base/seed_0", status="running", pid=left.pid)
        write_state(tmp_path / "base/seed_1", status="finished", pid=os.getpid())
        with (
            pytest.raises(ConfigError, match=rf"Its runs are the processes {left.pid}\. Wait"),
            locked(tmp_path),
        ):
            pass
    finally:
        left.kill()
        left.wait()
    with locked(tmp_path):
        pass
