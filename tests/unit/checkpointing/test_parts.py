"""Checkpoints in parts: written by all ranks or by none, read in any portions."""

import shutil
import time

import pytest
import torch
from torch import nn

from ppo_lightning.checkpointing import (
    made_whole,
    newest_good,
    parts,
    read_checkpoint,
    read_parts,
    remove_leftovers,
    write_parts,
)
from ppo_lightning.checkpointing.entry import KEY
from ppo_lightning.distributed import placed_like, rank, shard
from ppo_lightning.errors import CheckpointError
from tests.helpers.processes import run_on_ranks

WHOLE = {
    "state_dict": {"a": torch.arange(15.0).view(5, 3), "b": torch.tensor([2.0])},
    "optimizer_states": [{"step": 3}],
    "loops": {},
    "epoch": 4,
    KEY: {"complete": True, "kind": "ppo"},
}


def in_shards():
    """The same checkpoint, its tensors over two ranks."""
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    network = nn.Linear(3, 5)
    shard(network, (), mesh)
    a, b = network.weight.detach(), WHOLE["state_dict"]["b"]
    return {**WHOLE, "state_dict": {"a": placed_like(WHOLE["state_dict"]["a"], a), "b": b}}


def write(folder, *, broken=None):
    checkpoint = in_shards()
    path = folder / "epoch=4.ckpt"
    if broken == rank():
        checkpoint["state_dict"]["a"] = placed_like(
            torch.zeros(5, 3, dtype=torch.float32), checkpoint["state_dict"]["a"]
        )
        torch.save = failing
    try:
        write_parts(checkpoint, path)
        write_parts(checkpoint, path)  # takes the place of the first
    except CheckpointError as error:
        return str(error)
    return None


def failing(*_, **__):
    raise OSError(28, "No space left on device")


def test_what_all_ranks_write_is_read_again(tmp_path):
    assert run_on_ranks(write, 2, tmp_path) == [None, None]
    assert [p.name for p in tmp_path.iterdir()] == ["epoch=4.ckpt"]
    found = newest_good([tmp_path])
    assert (found.path, found.iterations) == (tmp_path / "epoch=4.ckpt", 5)
    whole = made_whole(read_checkpoint(found.path))
    assert whole.keys() == WHOLE.keys()
    assert torch.equal(whole["state_dict"]["a"], WHOLE["state_dict"]["a"])
    assert torch.equal(whole["state_dict"]["b"], WHOLE["state_dict"]["b"])


def write_beside_another_run(folder):
    """A run starts and clears up while the second rank has not got further than to begin."""
    copy = parts.mapped

    def late(*arguments):
        (work,) = folder.glob(".*.tmp")
        deadline = time.monotonic() + 60
        while not (work / "checkpoint.pt").is_file():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        remove_leftovers([folder])
        return copy(*arguments)

    checkpoint = in_shards()
    if rank() == 1:
        parts.mapped = late
    write_parts(checkpoint, folder / "epoch=4.ckpt")


def test_another_run_that_clears_up_leaves_what_is_being_written(tmp_path):
    run_on_ranks(write_beside_another_run, 2, tmp_path)
    whole = made_whole(read_checkpoint(tmp_path / "epoch=4.ckpt"))
    assert torch.equal(whole["state_dict"]["a"], WHOLE["state_dict"]["a"])


def test_a_part_that_stands_for_another_is_not_counted_twice(tmp_path):
    run_on_ranks(write, 2, tmp_path)
    folder = tmp_path / "epoch=4.ckpt"
    shutil.copy(folder / "part_00000.pt", folder / "part_00001.pt")
    with pytest.raises(CheckpointError, match="lacks 6 values of"):
        made_whole(read_checkpoint(folder))


def test_a_block_across_parts_is_read(tmp_path):
    run_on_ranks(write, 2, tmp_path)
    stored = read_parts(tmp_path / "epoch=4.ckpt")["state_dict"]["a"]
    assert stored.shape == (5, 3)
    assert torch.equal(stored.read([1, 1], [3, 2]), WHOLE["state_dict"]["a"][1:4, 1:])


@pytest.mark.parametrize("broken", [0, 1])
def test_what_one_rank_cannot_write_is_no_checkpoint(tmp_path, broken):
    run_on_ranks(write, 2, tmp_path)
    (first, second) = run_on_ranks(WriteBroken(broken), 2, tmp_path)
    assert "No space left" in first
    assert "No space left" in second
    assert [p.name for p in tmp_path.iterdir()] == ["epoch=4.ckpt"]
    assert newest_good([tmp_path]).iterations == 5


class WriteBroken:
    """``write`` with one rank whose disk is full; can be pickled."""

    def __init__(self, broken):
        self.broken = broken

    def __call__(self, folder):
        return write(folder, broken=self.broken)


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("part_00001.pt", None, "`part_00001.pt` is missing"),
        ("part_00000.pt", b"cut", "`part_00000.pt` cannot be read"),
    ],
)
def test_an_incomplete_folder_is_passed_over_with_the_reason(tmp_path, file, content, why):
    run_on_ranks(write, 2, tmp_path)
    path = tmp_path / "epoch=4.ckpt" / file
    path.unlink()
    if content:
        path.write_bytes(content)
    found = newest_good([tmp_path])
    assert found.path is None
    assert why in found.skipped[0]


def test_leftovers_go_and_a_name_that_was_lost_comes_back(tmp_path):
    run_on_ranks(write, 2, tmp_path)
    (tmp_path / "epoch=4.ckpt").rename(tmp_path / ".epoch=4.ckpt.0abc.old")
    unfinished = tmp_path / ".epoch=5.ckpt.1abc.tmp"
    unfinished.mkdir()
    (unfinished / "part_00000.pt").write_bytes(b"half")
    assert remove_leftovers([tmp_path]) == [unfinished]
    assert [p.name for p in tmp_path.iterdir()] == ["epoch=4.ckpt"]
    assert newest_good([tmp_path]).iterations == 5
