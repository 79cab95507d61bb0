from pathlib import Path

import pytest

from ppo_lightning.cli.config_files import (
    find_class,
    find_key,
    prepare_arguments,
    read_entries,
    shipped_configs,
)
from ppo_lightning.errors import ConfigError, DataError

TEXT = """\
trainer:
  max_epochs: 3
model:
  init_args:
    rewards:
      - {name: a, component: {class_path: x.A}}
      - name: b
        component:
          class_path: x.B
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    return path


def test_entries_have_their_lines(config):
    entries = {(entry.keys, entry.value): entry.line for entry in read_entries(config)}
    assert entries[("trainer", "max_epochs"), "3"] == 2
    assert entries[("model", "init_args", "rewards", "component", "class_path"), "x.A"] == 6
    assert entries[("model", "init_args", "rewards", "name"), "b"] == 7


def test_keys_are_found_in_the_last_file_that_has_them(config, tmp_path):
    later = tmp_path / "later.yaml"
    later.write_text("\n\ntrainer: {devices: 1}\n", encoding="utf-8")
    files = [config, later]
    assert find_key(files, "trainer") == f"{later}:3: "
    assert find_key(files, "trainer.max_epochs") == f"{config}:2: "
    assert find_key(files, "max_epochs") == ""
    assert find_class(files, "x.B") == f"{config}:9: "
    assert find_class(files, "x.C") == ""


def test_a_value_from_elsewhere_is_not_blamed_on_the_file(config):
    assert find_key([config], "trainer.max_epochs", "3.0") == f"{config}:2: "
    assert find_key([config], "trainer.max_epochs", "4") == ""
    assert find_key([config], "trainer.max_epochs", "many") == ""


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (b"trainer: {a: 1}\nmodel: [1\nb: 2\n", 3, "not valid YAML"),
        (b"trainer:\n\tmax_epochs: 3\n", 2, "replace the tab"),
        (b"trainer:\n  a: 1\n\n  a: 2\n", 4, "`a` stands twice, first in line 2"),
        (b"# nothing\n", None, "holds no settings"),
        (b"- a\n- b\n", None, "top level"),
        (b"a: 1\nb: \xff\n", 2, "not UTF-8"),
        (b"a: 1\n1: 2\n", 2, "a key of a config must be a text"),
        (b"a: 1\n? [b, c]\n: 2\n", 2, "a key of a config must be a text"),
        (b"a:\n  ? {b: c}\n  : 2\n", 2, "a key of a config must be a text"),
        (b"a: 1\nb: !mine 2\n", 2, "has the tag `!mine`, which"),
        (b"a: !!python/object/apply:os.system [ls]\n", 1, "has the tag `!!python/object/apply:os"),
        (b"a: 1\nb: *two\n", 2, "Define it above, as `&name value`"),
    ],
)
def test_broken_files_are_refused_by_file_and_line(tmp_path, text, line, message):
    path = write(tmp_path, text)
    with pytest.raises(DataError, match=message) as caught:
        prepare_arguments(["fit", "--config", str(path)])
    assert caught.value.path == str(path)
    assert caught.value.line == line


def test_what_yaml_offers_besides_is_left_alone(tmp_path):
    text = b"a: &x {b: 1, on: 2}\nc: {<<: *x, d: !!str 3, 1: one}\ne: =\nf: 2001-01-01\n"
    names = [entry.keys[-1] for entry in read_entries(write(tmp_path, text))]
    assert names == ["a", "b", "on", "c", "<<", "b", "on", "d", "1", "e", "f"]


def test_null_is_found_however_it_is_written(tmp_path):
    path = write(tmp_path, b"a: {x: 1}\nb:\n- x: 2\n- x: ~\n- x:\n")
    assert find_key([path], "b.x", "null") == f"{path}:4: "


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = write(tmp_path, b"\xef\xbb\xbftrainer: {a: 1}\n")
    assert next(read_entries(path)).keys == ("trainer",)


@pytest.mark.parametrize("style", ["two", "short", "one"])
def test_files_are_found_among_arguments(config, style):
    given = {"two": ["--config", str(config)], "short": ["-c", str(config)]}
    given["one"] = [f"--config={config}"]
    arguments, files = prepare_arguments(["fit", *given[style], "--x", "1"])
    assert arguments == ["fit", *given[style], "--x", "1"]
    assert files == [config]


def test_config_given_as_text_is_left_to_the_parser():
    arguments = ["fit", "--config", "{trainer: {max_epochs: 1}}"]
    assert prepare_arguments(arguments) == (arguments, [])


def test_missing_file_names_the_nearest(config):
    with pytest.raises(ConfigError, match=r"does not exist\. Did you mean `.*c\.yaml`"):
        prepare_arguments(["fit", "-c", str(config.with_name("cc.yaml"))])


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A package beside a folder of configs."""
    monkeypatch.setattr("ppo_lightning.cli.config_files._PACKAGE", tmp_path / "pkg")
    for name in ("ppo/quickstart", "ppo/same", "sft/same"):
        path = tmp_path / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("trainer: {max_epochs: 1}\n", encoding="utf-8")
    return tmp_path


def test_shipped_configs_by_name(checkout):
    assert sorted(shipped_configs()) == ["ppo/quickstart", "ppo/same", "quickstart", "sft/same"]
    expected = checkout / "configs/ppo/quickstart.yaml"
    arguments, files = prepare_arguments(["fit", "--config=ppo-lightning:quickstart"])
    assert (arguments, files) == (["fit", f"--config={expected}"], [expected])


def test_configs_inside_an_installed_package_come_first(checkout):
    inside = checkout / "pkg/_configs/only.yaml"
    inside.parent.mkdir(parents=True)
    inside.write_text("a: 1\n", encoding="utf-8")
    assert shipped_configs() == {"only": inside}


def test_unknown_shipped_config_lists_those_there_are(checkout):
    with pytest.raises(ConfigError, match="did you mean `ppo-lightning:quickstart`") as caught:
        prepare_arguments(["fit", "-c", "ppo-lightning:quikstart"])
    assert "ppo/same" in str(caught.value)


def test_a_shipped_name_without_the_scheme_is_recognised(checkout):
    with pytest.raises(ConfigError, match="`ppo-lightning:quickstart`, which comes with"):
        prepare_arguments(["fit", "-c", str(Path("elsewhere") / "quickstart.yaml")])
