import pickle

import pytest

from ppo_lightning.errors import (
    ConfigError,
    DataError,
    ModelError,
    RewardError,
    nearest,
    unknown_key_message,
)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("clip_rang", "clip_range"),
        ("clip-range", "clip_range"),
        ("CLIP-RANGE", "clip_range"),
        ("gae_lamda", "gae_lambda"),
        ("zzz", None),
        ("", None),
    ],
)
def test_nearest_key(key, expected):
    assert nearest(key, ["gae_lambda", "clip_range", "vf_coef"]) == expected


def test_nearest_returns_the_candidate_as_it_is_written():
    assert nearest("userid", ["UserId"]) == "UserId"


def test_nearest_of_nothing_is_none():
    assert nearest("clip_range", iter([])) is None


def test_unknown_key_message_names_key_place_guess_and_valid_keys():
    message = unknown_key_message("clip_rang", iter(["vf_coef", "clip_range"]), "`model.ppo`")
    assert message == (
        "unknown key `clip_rang` in `model.ppo`; did you mean `clip_range`? "
        "Valid keys: vf_coef, clip_range."
    )


def test_unknown_key_message_without_a_guess_makes_none():
    message = unknown_key_message("zzz", ["vf_coef"], "run.yaml")
    assert message == "unknown key `zzz` in run.yaml. Valid keys: vf_coef."


def test_unknown_key_message_where_no_key_is_valid():
    assert unknown_key_message("a", [], "`x`").endswith("No keys are valid there.")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ({"path": "a.jsonl", "line": 3, "column": 7}, "a.jsonl:3:7: no `prompt`."),
        ({"path": "a.jsonl", "line": 3}, "a.jsonl:3: no `prompt`."),
        ({"path": "a.jsonl"}, "a.jsonl: no `prompt`."),
        ({}, "no `prompt`."),
    ],
)
def test_data_error_begins_with_the_place(place, expected):
    assert str(DataError("no `prompt`.", **place)) == expected


def test_data_error_takes_a_path_object(tmp_path):
    assert DataError("x", path=tmp_path).path == str(tmp_path)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ({"component": "length", "sample": 0}, "reward `length`, sample 0: got nan."),
        ({"component": "length"}, "reward `length`: got nan."),
        ({"sample": 2}, "sample 2: got nan."),
        ({}, "got nan."),
    ],
)
def test_reward_error_begins_with_component_and_sample(place, expected):
    assert str(RewardError("got nan.", **place)) == expected


@pytest.mark.parametrize(
    "error",
    [
        DataError("broken", path="a.jsonl", line=3, column=7),
        RewardError("got nan.", component="length", sample=2),
        ConfigError("unknown key"),
        ModelError("no such folder"),
    ],
)
def test_errors_cross_processes_whole(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("kind", [ConfigError, DataError, ModelError])
def test_bad_input_is_a_value_error(kind):
    assert issubclass(kind, ValueError)
