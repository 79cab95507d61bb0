"""Snapshots: copies that nothing changes, in memory or on disk, and broken files."""

import resource
import signal
import warnings

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.checkpointing import SnapshotStore, copied, remove_leftovers, snapshots
from ppo_lightning.errors import CheckpointError

CPU = torch.device("cpu")


def state(number, size=3):
    return {"weights": {"w": torch.full((size,), float(number))}, "steps": number, "pair": (1, "é")}


def store(storage, folder, keep=3):
    return SnapshotStore(storage, keep=keep, device=CPU, folder=folder)


@pytest.fixture(params=["memory", "disk"])
def storage(request):
    return request.param


def test_the_newest_states_are_kept(storage, tmp_path):
    kept = store(storage, tmp_path, keep=2)
    for iteration in (-1, 0, 4):
        assert kept.put(iteration, state(iteration))
    assert kept.iterations == [0, 4]
    found = kept.latest()
    assert (found.iteration, found.passed_over) == (4, ())
    assert_close(found.state["weights"]["w"], torch.full((3,), 4.0), rtol=0, atol=0)
    assert found.state["pair"] == (1, "é")
    kept.drop_after(3)
    assert kept.latest().iteration == 0
    kept.clear()
    assert kept.iterations == []


def test_a_pinned_state_takes_the_place_of_one_of_the_newest(storage, tmp_path):
    kept = store(storage, tmp_path, keep=3)
    kept.put(0, state(0))
    for iteration in range(1, 6):
        kept.put(iteration, state(iteration), pinned=1)
    assert kept.iterations == [1, 4, 5]
    kept.put(6, state(6), pinned=6)
    kept.put(7, state(7), pinned=3)
    assert kept.iterations == [5, 6, 7], "one that is not there takes no place"


def test_the_oldest_goes_before_a_copy_is_made_and_after_a_file_is(storage, tmp_path, monkeypatch):
    kept, seen = store(storage, tmp_path, keep=2), []
    where, name = (snapshots, "copied") if storage == "memory" else (torch, "save")
    make = getattr(where, name)

    def watched(*arguments):
        seen.append(kept.iterations)
        return make(*arguments)

    monkeypatch.setattr(where, name, watched)
    for iteration in range(3):
        kept.put(iteration, state(iteration))
    assert seen == [[], [0], [1] if storage == "memory" else [0, 1]]


def test_a_file_is_locked_while_it_is_written(tmp_path, monkeypatch):
    save = torch.save

    def watched(*arguments):
        assert remove_leftovers([tmp_path]) == []
        save(*arguments)

    monkeypatch.setattr(torch, "save", watched)
    assert store("disk", tmp_path).put(0, state(0))


def test_the_start_of_a_run_is_an_iteration_too(storage, tmp_path):
    kept = store(storage, tmp_path)
    kept.put(-1, state(7))
    assert kept.iterations == [-1]
    assert kept.latest().state["steps"] == 7


def test_a_snapshot_does_not_follow_the_run(storage, tmp_path):
    kept, live = store(storage, tmp_path), state(1)
    kept.put(0, live)
    live["weights"]["w"].fill_(9.0)
    assert kept.latest().state["weights"]["w"].tolist() == [1.0] * 3


def test_copies_are_new_tied_tensors_stay_tied():
    shared = torch.ones(4)
    value = {"a": shared, "b": [shared, shared.view(2, 2)], "none": None, "empty": torch.ones(0)}
    got = copied(value)
    assert got["a"] is got["b"][0]
    assert got["b"][1].shape == (2, 2)
    assert got["a"].data_ptr() != shared.data_ptr()
    assert got["none"] is None


def test_two_dtypes_on_one_storage_stay_two():
    numbers = torch.ones(2, dtype=torch.float32)
    got = copied([numbers, numbers.view(torch.int32)])
    assert [t.dtype for t in got] == [torch.float32, torch.int32]


def test_files_are_found_again_and_others_are_left_alone(tmp_path):
    store("disk", tmp_path).put(3, state(3))
    (tmp_path / "after_000099_iterations.rank_1.pt").write_bytes(b"another rank's")
    (tmp_path / "notes.pt").write_bytes(b"a user's")
    again = store("disk", tmp_path)
    assert again.iterations == [3]
    assert again.latest().state["steps"] == 3
    again.clear()
    assert len(list(tmp_path.iterdir())) == 2


BROKEN = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"garbage" * 100),
    "gone": lambda path: path.unlink(),
    "foreign": lambda path: torch.save([1, 2], path),
    "of another iteration": lambda path: torch.save(
        {"format_version": 1, "iteration": 77, "state": {}}, path
    ),
    "of a newer version": lambda path: torch.save(
        {"format_version": 2, "iteration": 1, "state": {}}, path
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_an_unreadable_snapshot_is_passed_over_and_named(tmp_path, how, monkeypatch):
    kept = store("disk", tmp_path)
    for iteration in (0, 1):
        kept.put(iteration, state(iteration))
    newest = tmp_path / "after_000002_iterations.rank_0.pt"
    before = kept.iterations
    BROKEN[how](newest)
    monkeypatch.setattr(SnapshotStore, "iterations", before)  # a file may vanish after it was seen
    found = kept.latest()
    assert found.iteration == found.state["steps"] == 0
    (line,) = found.passed_over
    assert str(newest) in line
    assert "passed over" in line


def test_code_in_a_file_is_not_run(tmp_path):
    kept = store("disk", tmp_path)
    kept.put(0, {"x": 1})
    path = tmp_path / "after_000001_iterations.rank_0.pt"
    torch.save({"format_version": 1, "iteration": 0, "state": print}, path)
    with pytest.raises(CheckpointError, match="No snapshot"):
        kept.latest()


def test_none_readable_is_an_error_that_names_them(storage, tmp_path):
    kept = store(storage, tmp_path)
    with pytest.raises(CheckpointError, match="there is none"):
        kept.latest()
    if storage == "disk":
        kept.put(0, state(0))
        next(tmp_path.iterdir()).write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"after_000001.*Resume from a checkpoint"):
            kept.latest()


@pytest.fixture
def small_files_only():
    """A limit on the size of files makes writes fail as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files_only")
def test_a_full_disk_keeps_the_older_ones_and_is_said_once(tmp_path):
    kept = store("disk", tmp_path)
    kept.put(0, state(0))
    with pytest.warns(UserWarning, match=r"iteration 1 could not.*iterations 0 stay.*the run goes"):
        assert not kept.put(1, state(1, size=1_000_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kept.put(2, state(2, size=1_000_000))
        assert kept.put(3, state(3))
    assert kept.iterations == [0, 3]
    assert len(list(tmp_path.iterdir())) == 2, "no half-written file is left"


def test_a_failed_write_leaves_no_file_of_that_iteration(tmp_path, monkeypatch):
    kept = store("disk", tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        kept.put(0, state(0))
    assert kept.iterations == []


def test_bad_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`keep`"):
        store("memory", tmp_path, keep=0)
    with pytest.raises(ValueError, match="`folder`"):
        SnapshotStore("disk", keep=1, device=CPU)
