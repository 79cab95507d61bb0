"""Checks of a parsed config, before anything is built or loaded."""

import pytest
import torch
from jsonargparse import Namespace

from ppo_lightning.cli.checks import check_checkpoint, with_place
from ppo_lightning.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": 1}, "is not a checkpoint of Lightning"),
        ({"state_dict": {}}, "is not a checkpoint of Lightning"),
        ([1], "is not a checkpoint: it holds a list"),
        ("text", "cannot be read"),
        ("cut", "cannot be read"),
        ("folder", "is a folder, not a file"),
    ],
    ids=str,
)
def test_what_is_no_checkpoint_is_named_with_the_way_out(tmp_path, content, said):
    path = tmp_path / "x.ckpt"
    if content == "folder":
        path.mkdir()
    elif content == "text":
        path.write_text("hello", encoding="utf-8")
    elif content == "cut":
        torch.save({"state_dict": {"w": torch.zeros(99)}}, path)
        path.write_bytes(path.read_bytes()[:300])
    else:
        torch.save(content, path)
    with pytest.raises(ConfigError) as caught:
        check_checkpoint(path)
    text = str(caught.value)
    assert text.startswith(f"`ckpt_path`: `{path}` {said}")
    assert text.endswith("Name a file that `ppo-lightning fit` wrote, or `last`.")
    assert "mmap" not in text


class OfTheUser:
    """Something that only Lightning itself, told to trust the file, may load."""


@pytest.mark.parametrize("more", [{}, {"hyper_parameters": OfTheUser()}], ids=["plain", "pickled"])
def test_checkpoints_of_any_module_pass(tmp_path, more):
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0"} | more, tmp_path / "x.ckpt")
    check_checkpoint(tmp_path / "x.ckpt")


def test_words_addresses_and_folders_of_shards_pass(tmp_path):
    (tmp_path / ".metadata").touch()
    for path in (None, "last", "best", "s3://bucket/x.ckpt", tmp_path):
        check_checkpoint(path)


CONFIG = Namespace(
    a=Namespace(one=1, both=2),
    b=[Namespace(both=3, options={"deep": 4})],
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("`one` is odd", "{0}:2: in `a`: `one` is odd"),
        ("`a.one` is odd", "{0}:2: `a.one` is odd"),
        ("`options.deep` is odd", "{0}:5: in `b[0]`: `options.deep` is odd"),
        ("`both` is odd", "`both` is odd"),
        ("`none` is odd", "`none` is odd"),
        ("one is odd", "one is odd"),
    ],
)
def test_a_setting_that_stands_once_is_shown_its_place(tmp_path, message, expected):
    path = tmp_path / "c.yaml"
    path.write_text("a:\n  one: 1\n  both: 2\nb:\n- options: {deep: 4}\n  both: 3\n")
    assert with_place(message, CONFIG, [path]) == expected.format(path)
