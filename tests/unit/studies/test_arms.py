import re

import pytest

from ppo_lightning.errors import ConfigError
from ppo_lightning.studies import Variation, arms_of, make_arm
from tests.helpers.sweeps import BASE_CONFIG, resolve

CLIP, COEF = "model.init_args.ppo.clip_range", "model.kl.coef"


def varied(clips=(0.1, 0.3), coefs=(0.02,)):
    return [Variation(CLIP, clips), Variation(COEF, coefs)]


def test_one_setting_changes_at_a_time_and_the_config_itself_comes_first():
    arms = arms_of(varied(), resolve).all
    assert [arm.name for arm in arms] == ["base", "clip_range=0.1", "clip_range=0.3", "coef=0.02"]
    assert [arm.label for arm in arms][1:] == [
        "clip_range = 0.1",
        "clip_range = 0.3",
        "coef = 0.02",
    ]
    assert arms[0].config == BASE_CONFIG
    inner = [arm.config["model"]["init_args"] for arm in arms]
    assert [(one["ppo"]["clip_range"], one["kl"]["coef"]) for one in inner] == [
        (0.2, 0.05),
        (0.1, 0.05),
        (0.3, 0.05),
        (0.2, 0.02),
    ]


def test_a_grid_has_all_combinations():
    arms = arms_of(varied(coefs=(0.02, 0.1)), resolve, grid=True).all
    assert [arm.name for arm in arms] == [
        "base",
        "clip_range=0.1,coef=0.02",
        "clip_range=0.1,coef=0.1",
        "clip_range=0.3,coef=0.02",
        "clip_range=0.3,coef=0.1",
    ]
    assert arms[-1].settings == {CLIP: 0.3, COEF: 0.1}


@pytest.mark.parametrize(("grid", "same"), [(False, "clip_range = 0.2"), (True, "coef = 0.05")])
def test_what_the_config_has_is_not_run_twice(grid, same):
    found = arms_of(varied(clips=(0.2, 0.3), coefs=(0.05,)), resolve, grid=grid)
    assert len(found.all) == 2
    assert found.same_as_base[-1].endswith(same) or found.same_as_base[0].endswith(same)


def test_nothing_but_the_base_is_nothing_to_compare():
    with pytest.raises(ConfigError, match="there is nothing to compare"):
        arms_of([Variation(CLIP, (0.2,))], resolve)


def test_values_that_the_config_takes_for_the_same_are_refused():
    def rounded(settings):
        config = resolve(settings)
        inner = config["model"]["init_args"]["ppo"]
        inner["clip_range"] = float(inner["clip_range"])
        return config

    with pytest.raises(ConfigError, match=r"`clip_range = 1\.0` and `clip_range = 1` are the same"):
        arms_of([Variation(CLIP, (1, 1.0))], rounded)


def test_a_refused_value_is_named_with_its_key():
    def refusing(settings):
        if settings:
            raise ConfigError("`clip_range` must lie in (0, 1), got 3.")
        return resolve(settings)

    with pytest.raises(ConfigError, match=rf"`--vary {CLIP}=3`: `clip_range` must lie"):
        arms_of([Variation(CLIP, (3,))], refusing)


def name_of(value, key=CLIP):
    return make_arm({key: value}, {key: "x"}, lambda settings: {}).name


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (1e-6, "x=1e-06"),
        (-1, "x=-1"),
        (None, "x=null"),
        ({"class_path": "a.b.Engine"}, "x=Engine"),
    ],
)
def test_names_say_the_value(value, name):
    assert name_of(value) == name


VALUES = [
    "a/b",
    "a b",
    "../..",
    "",
    "a" * 400,
    [1, 2],
    [12],
    {"class_path": "m.C", "init_args": {}},
]


def test_names_are_safe_and_differ():
    names = [name_of(value) for value in [*VALUES, "a-b"]]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9._+=,-]{1,140}", name), name


def test_labels_are_short_and_differ():
    parts = [{"class_path": "a.Reward", "init_args": {"text": "x" * 300, "n": n}} for n in (1, 2)]
    values = ["y" * 300, "y" * 299, list(range(100)), *parts, {"key": "z" * 100}]
    labels = [make_arm({CLIP: value}, {CLIP: "x"}, dict).label for value in values]
    assert len(set(labels)) == len(labels)
    assert all(len(label) < 60 for label in labels)
    assert labels[3].startswith("x = Reward-")
    assert make_arm({CLIP: [1, 2]}, {CLIP: "x"}, dict).label == "x = [1, 2]"


def test_names_of_many_settings_are_cut():
    settings = {f"model.key_{n}": "y" * 30 for n in range(9)}
    names = [
        make_arm(settings | {"model.key_9": last}, {k: k for k in [*settings, "model.key_9"]}, dict)
        for last in (1, 2)
    ]
    assert names[0].name != names[1].name
    assert all(len(arm.name) < 140 for arm in names)


def test_names_differ_where_case_does_not_count():
    names = [arm.name for arm in arms_of([Variation(CLIP, ("A", "a"))], resolve).all]
    assert len({name.casefold() for name in names}) == 3
