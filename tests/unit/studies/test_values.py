import pytest

from ppo_lightning.errors import ConfigError
from ppo_lightning.studies import Range, Variation, check_keys, parse_vary, short_names, written

KEY = "model.init_args.ppo.clip_range"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1,0.3", (0.1, 0.3)),
        ("1e-6, 5e-06", (1e-6, 5e-6)),  # YAML alone reads a text
        ("true,null,text", (True, None, "text")),
        ("[1, 2],[3]", ([1, 2], [3])),
        ("[0.1,0.3]", ([0.1, 0.3],)),
        ("{class_path: a.B, init_args: {x: 1}}", ({"class_path": "a.B", "init_args": {"x": 1}},)),
        ("'a, b',c", ("a, b", "c")),
        ("-1", (-1,)),
        ("1,true", (1, True)),
    ],
)
def test_values_are_yaml(text, values):
    found = parse_vary(f"{KEY}={text}")
    assert found == Variation(KEY, values)
    assert [type(value) for value in found.values] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.1..0.3", Range(KEY, 0.1, 0.3)),
        ("1..4", Range(KEY, 1, 4)),
        ("1..4.5", Range(KEY, 1.0, 4.5)),
        ("-2..2", Range(KEY, -2, 2)),
        ("log:1e-6..1e-4", Range(KEY, 1e-6, 1e-4, log=True)),
        ("log:1..64", Range(KEY, 1, 64, log=True)),
    ],
)
def test_ranges(text, expected):
    found = parse_vary(f"{KEY}={text}")
    assert found == expected
    assert type(found.low) is type(found.high) is type(expected.low)
    assert parse_vary(f"{KEY}={found}") == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{KEY}=", f"`--vary {KEY}=` has no values"),
        (f"{KEY}=[1", "the values are no YAML"),
        (f"{KEY}=0.1,0.1", "the value 0.1 stands there twice"),
        (f"{KEY}=0.3..0.1", "the lower end must be below"),
        (f"{KEY}=log:0..1", "must begin above 0"),
        (f"{KEY}=a..b", "the ends of a range must be numbers, got `a`"),
        (f"{KEY}=0..inf", "the ends of a range must be numbers, got `inf`"),
        (KEY, "cannot be read; give it as `KEY=VALUE,VALUE`"),
        ("=1", "cannot be read; give it as `KEY=VALUE,VALUE`"),
        ("model..x=1", "a part of the key is empty"),
        ("seed_everything=1,2", "give seeds by `--seeds`"),
        ("trainer.default_root_dir=a,b", "below `--out`"),
        ("trainer.logger=false", "a sweep sets it itself"),
        ("ckpt_path=a", "a sweep sets it itself"),
    ],
)
def test_what_cannot_be_varied(text, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(").replace("*", r"\*")) as caught:
        parse_vary(text)
    assert "\n" not in str(caught.value)


def test_a_key_is_varied_once_however_it_is_written():
    twice = [Variation("model.kl.coef", (1,)), Variation("model.init_args.kl.coef", (2,))]
    with pytest.raises(ConfigError, match="is given twice; put all its values"):
        check_keys(twice, together=False)
    with pytest.raises(ConfigError, match="nothing is varied: give `--vary`"):
        check_keys([], together=False)


def test_a_key_inside_another_is_refused_only_where_both_are_set():
    nested = [Variation("model.init_args.kl", ({"coef": 1},)), Variation("model.kl.coef", (2,))]
    check_keys(nested, together=False)
    with pytest.raises(ConfigError, match=r"`--vary model\.kl\.coef` lies inside `model\.kl`"):
        check_keys(nested, together=True)
    alike = [Variation("model.kl", (1,)), Variation("model.kl_x", (2,))]
    check_keys(alike, together=True)


def test_names_are_as_short_as_can_be():
    keys = ["model.init_args.actor.lr", "model.init_args.critic.lr", "model.ppo.clip_range", "lr"]
    assert short_names(keys) == {
        "model.init_args.actor.lr": "actor.lr",
        "model.init_args.critic.lr": "critic.lr",
        "model.ppo.clip_range": "clip_range",
        "lr": "lr",
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (1e-6, "1e-06"),
        (None, "null"),
        (True, "true"),
        ("text", "text"),
        ([1, "ä"], '[1, "ä"]'),
        (float("inf"), ".inf"),
        (float("-inf"), "-.inf"),
        (float("nan"), ".nan"),
    ],
)
def test_values_are_written_as_options_take_them(value, text):
    assert written(value) == text
