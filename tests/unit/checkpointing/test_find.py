"""Which file a run goes on from."""

import os
from types import SimpleNamespace

import pytest
import torch

from ppo_lightning.checkpointing import newest_good, why_not


def saved(path, *, epoch=0, at=0, **changes):
    """A checkpoint as far as the search looks at it, written at a time of our choice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "epoch": epoch,
        "loops": {},
        "optimizer_states": [],
        "state_dict": {"w": torch.arange(5000.0)},
        "ppo_lightning": {"complete": True},
    } | changes
    torch.save({k: v for k, v in content.items() if v is not None}, path)
    os.utime(path, (at, at))
    return path


def cut(path, part):
    text = path.read_bytes()
    at = path.stat().st_mtime
    path.write_bytes(text[: int(len(text) * part)])
    os.utime(path, (at, at))


def test_the_newest_of_all_versions(tmp_path):
    saved(tmp_path / "version_1/checkpoints/epoch=5.ckpt", epoch=5, at=10)
    newest = saved(tmp_path / "version_0/checkpoints/last.ckpt", epoch=2, at=20)
    saved(tmp_path / "version_2/checkpoints/last.ckpt", epoch=3, at=15)
    found = newest_good([tmp_path, tmp_path / "not-there"])
    assert (found.path, found.iterations, found.skipped) == (newest, 3, ())


def test_none(tmp_path):
    (tmp_path / "other.txt").touch()
    assert newest_good([tmp_path]).path is None


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_file_cut_short_is_skipped_with_its_reason(tmp_path, part):
    good = saved(tmp_path / "epoch=0.ckpt", at=10)
    broken = saved(tmp_path / "epoch=1.ckpt", epoch=1, at=20)
    cut(broken, part)
    found = newest_good([tmp_path])
    assert found.path == good
    (line,) = found.skipped
    assert line.startswith(f"`{broken}` cannot be read (")
    assert why_not(good) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ppo_lightning": {"complete": False}}, "was written inside an iteration"),
        ({"ppo_lightning": None}, "was not written by PPOModule"),
        ({"optimizer_states": None}, "holds weights only"),
        ({"loops": None}, "holds weights only"),
        ({"state_dict": SimpleNamespace()}, "cannot be read"),  # not for `weights_only` (T56)
    ],
)
def test_t51_t56_t57_what_cannot_be_resumed_is_skipped(tmp_path, changes, reason):
    good = saved(tmp_path / "a.ckpt", at=10)
    other = saved(tmp_path / "b.ckpt", at=20, **changes)
    found = newest_good([tmp_path])
    assert found.path == good
    assert found.skipped[0].startswith(f"`{other}` {reason}")


def test_the_search_ends_with_the_first_good_one(tmp_path):
    cut(saved(tmp_path / "old.ckpt", at=5), 0.5)
    saved(tmp_path / "good.ckpt", at=10)
    assert newest_good([tmp_path]).skipped == ()


def test_a_link_is_followed_and_one_to_nowhere_ignored(tmp_path):
    good = saved(tmp_path / "epoch=0.ckpt", at=10)
    (tmp_path / "last.ckpt").symlink_to("epoch=0.ckpt")
    (tmp_path / "last-v1.ckpt").symlink_to("gone.ckpt")
    found = newest_good([tmp_path])
    assert found.path.resolve() == good
    assert found.skipped == ()


def test_of_one_time_last_comes_first(tmp_path):
    for name in ("epoch=3.ckpt", "last.ckpt"):
        saved(tmp_path / name, epoch=3, at=10)
    assert newest_good([tmp_path]).path.name == "last.ckpt"
