"""A checkpoint is written wholly or not at all."""

import errno
import fcntl
import os

import pytest
import torch

from ppo_lightning.checkpointing import files, remove_leftovers, write_checkpoint
from ppo_lightning.errors import CheckpointError

CHECKPOINT = {"state_dict": {"w": torch.arange(3000.0)}, "epoch": 1}


def test_the_file_holds_what_was_written(tmp_path):
    write_checkpoint(CHECKPOINT, tmp_path / "new/a.ckpt")
    loaded = torch.load(tmp_path / "new/a.ckpt", weights_only=True)  # T56
    assert loaded["state_dict"]["w"].equal(CHECKPOINT["state_dict"]["w"])
    assert os.listdir(tmp_path / "new") == ["a.ckpt"]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "No space left on device.*Make room on the disk"),
        (errno.EDQUOT, "Make room on the disk"),
        (errno.EIO, "can be written to"),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
def test_a_failed_write_leaves_the_former_file_and_says_what_to_do(
    tmp_path, monkeypatch, number, remedy, after
):
    """The error comes from the file system; torch hides it behind a RuntimeError of its own."""
    file = tmp_path / "last.ckpt"
    write_checkpoint({"epoch": 0}, file)
    written = []

    def write(self, data):
        if len(written) == after:
            raise OSError(number, os.strerror(number))
        written.append(data)
        return self.file.write(data)

    monkeypatch.setattr(files.Watched, "write", write)
    with pytest.raises(CheckpointError, match=rf"last\.ckpt`.*{remedy}.*--ckpt_path last"):
        write_checkpoint(CHECKPOINT, file)
    assert torch.load(file) == {"epoch": 0}
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_disk_that_is_full_when_the_buffer_is_flushed(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="Make room"):
        write_checkpoint(CHECKPOINT, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"a\.ckpt` could not be written"):
        write_checkpoint(CHECKPOINT, tmp_path / "file/a.ckpt")


def test_other_errors_are_what_they_are(tmp_path):
    """Of a value that cannot be saved, and of a device."""

    class Broken:
        def __reduce__(self):
            raise RuntimeError("device-side assert")

    with pytest.raises(RuntimeError, match="device-side assert"):
        write_checkpoint({"a": Broken()}, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


def test_a_link_to_another_checkpoint_is_replaced_and_not_followed(tmp_path):
    """`save_last: link` of an earlier run: the file that it points to is another iteration's."""
    write_checkpoint({"epoch": 0}, tmp_path / "epoch=0.ckpt")
    (tmp_path / "last.ckpt").symlink_to("epoch=0.ckpt")
    write_checkpoint({"epoch": 1}, tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "epoch=0.ckpt") == {"epoch": 0}
    assert torch.load(tmp_path / "last.ckpt") == {"epoch": 1}


def test_leftovers_go_but_not_what_another_run_is_writing(tmp_path):
    folder = tmp_path / "version_0/checkpoints"
    folder.mkdir(parents=True)
    left, busy = folder / ".last.ckpt.1a.tmp", folder / ".last.ckpt.2b.tmp"
    snapshot = folder / ".after_000003_iterations.rank_0.pt.3c.tmp"
    others = [folder / "last.ckpt", folder / ".notes.tmp", folder / "mine.ckpt.tmp"]
    for path in (left, busy, snapshot, *others):
        path.touch()
    with open(busy, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert remove_leftovers([tmp_path, tmp_path / "not-there"]) == [snapshot, left]
    assert sorted(folder.iterdir()) == sorted([busy, *others])
    assert remove_leftovers([tmp_path]) == [busy]


def test_a_file_is_locked_while_it_is_written(tmp_path, monkeypatch):
    def write(self, data):
        assert remove_leftovers([tmp_path]) == []
        return self.file.write(data)

    monkeypatch.setattr(files.Watched, "write", write)
    write_checkpoint(CHECKPOINT, tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").exists()


def test_a_leftover_is_locked_through_a_file_that_may_be_written(tmp_path, monkeypatch):
    """NFS refuses an exclusive lock through one that was opened for reading."""

    def as_on_nfs(file, operation):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")

    (tmp_path / ".last.ckpt.1a.tmp").write_bytes(b"half")
    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    assert remove_leftovers([tmp_path]) == [tmp_path / ".last.ckpt.1a.tmp"]
