"""Every setting is checked where it is made, by its name, and survives the way to a plain dict."""

import dataclasses
import json
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import ppo_lightning.configs as configs
from ppo_lightning.configs import (
    BufferConfig,
    Constraint,
    CriticConfig,
    GroupConfig,
    GuardConfig,
    KLConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    PPOConfig,
    PTXConfig,
    ReferenceConfig,
    RewardProcessing,
    SamplingConfig,
    StalenessConfig,
    ValidationConfig,
    WeightSchedule,
)
from ppo_lightning.configs.checks import allows_none

CLASSES = [c for c in vars(configs).values() if dataclasses.is_dataclass(c)]
REQUIRED = {
    PolicyConfig: {"path": "folder"},
    PTXConfig: {"texts": "texts.txt"},
    configs.BackboneConfig: {"path": "folder"},
    Constraint: {"bound": 1.0},
    WeightSchedule: {"start": 1.0, "end": 0.0, "iterations": 4},
}
NAN, INF = math.nan, math.inf

# Of each number: values outside its range; every one of them must be refused by its name.
BAD = [
    (BufferConfig, {"num_prompts": [0, -1], "responses_per_prompt": [0], "num_minibatches": [0]}),
    (BufferConfig, {"num_minibatches": [65], "num_tokens": [0]}),
    (KLConfig, {"max_kl_ref": [0.0, -1.0, NAN, INF], "max_kl_ref_per_token": [0.0, NAN]}),
    (PPOConfig, {"extra_critic_epochs": [-1]}),
    (PTXConfig, {"texts": ["", []], "coef": [-1.0, NAN], "batch_size": [0]}),
    (PTXConfig, {"max_length": [1], "every_n_iterations": [0]}),
    (OptimizerConfig, {"lr_batch_size": [0, 8]}),
    (GuardConfig, {"max_skipped_steps": [0, NAN]}),
    (KLConfig, {"coef": [-0.1, NAN, INF]}),
    (LoraConfig, {"rank": [0], "alpha": [0.0, -1.0, NAN], "layers": [0, -1]}),
    (PolicyConfig, {"path": [""]}),
    (CriticConfig, {"trunk_grad_scale": [-0.1, 1.1, NAN]}),
    (GroupConfig, {"lr": [0.0, -1e-6, NAN, INF], "warmup": [-1], "min_lr_ratio": [-0.1, 1.1]}),
    (GroupConfig, {"max_grad_norm": [0.0, -1.0, NAN]}),
    (OptimizerConfig, {"eps": [0.0, NAN], "weight_decay": [-0.1, INF]}),
    (OptimizerConfig, {"betas": [(-0.1, 0.9), (0.9, 1.1), (0.9, NAN)]}),
    (PPOConfig, {"clip_range": [0.0, 1e-7, 1.0, -0.2, NAN], "clip_range_high": [0.0, NAN]}),
    (
        PPOConfig,
        {"dual_clip": [1.0, 0.5, NAN], "penalty_coef": [0.0, 1e7], "penalty_target": [0.0]},
    ),
    (PPOConfig, {"num_update_epochs": [0], "target_kl": [0.0, -1.0, NAN, INF]}),
    (PPOConfig, {"kl_stop_factor": [0.0], "gamma": [-0.1, 1.1, NAN], "gae_lambda": [-0.1, 1.1]}),
    (PPOConfig, {"value_gae_lambda": [1.1], "vf_coef": [-1.0, NAN], "ent_coef": [-0.1, INF]}),
    (PPOConfig, {"value_clip_range": [0.0, -0.2, NAN], "value_huber_delta": [0.0]}),
    (PPOConfig, {"microbatch_tokens": [0]}),
    (RewardProcessing, {"missing_eos_penalty": [-1.0, NAN], "clip": [0.0, -1.0, NAN]}),
    (RewardProcessing, {"overlong_penalty": [-1.0, 1.0], "overlong_tokens": [(5, 5), (-1, 5)]}),
    (WeightSchedule, {"start": [NAN], "end": [INF], "iterations": [0], "delay": [-1]}),
    (Constraint, {"bound": [NAN, INF], "lr": [0.0, NAN], "damping": [-1.0, NAN]}),
    (Constraint, {"initial": [-0.1, 11.0, NAN], "max": [0.0, INF]}),
    (SamplingConfig, {"max_new_tokens": [0], "min_new_tokens": [-1, 65], "top_k": [-1]}),
    (SamplingConfig, {"temperature": [0.0, -1.0, NAN, INF], "top_p": [0.0, 1.1, NAN]}),
    (SamplingConfig, {"stop_strings": [["", "a"]], "batch_size": [0]}),
    (ValidationConfig, {"num_samples": [-1], "num_texts": [-1]}),
    (StalenessConfig, {"max_lag": [-1, NAN], "importance_cap": [0.5, NAN, INF]}),
]
CASES = [
    pytest.param(cls, name, value, id=f"{cls.__name__}-{name}-{value}")
    for cls, fields in BAD
    for name, values in fields.items()
    for value in values
]


def literal_fields() -> list[Any]:
    """Every field whose choices are listed, alone or beside None."""
    found = []
    for cls in CLASSES:
        for name, hint in get_type_hints(cls).items():
            options = hint if get_origin(hint) is Literal else next(iter(get_args(hint)), None)
            if get_origin(options) is Literal and str not in get_args(hint):
                found.append(pytest.param(cls, name, options, id=f"{cls.__name__}-{name}"))
    return found


def test_the_list_of_literal_fields_is_not_empty():
    names = {param.values[1] for param in literal_fields()}
    assert {"objective", "estimator", "placement", "dtype", "kind", "schedule"} <= names


@pytest.mark.parametrize(("cls", "name", "value"), CASES)
def test_values_out_of_range_are_refused_by_name(cls, name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        cls(**{**REQUIRED.get(cls, {}), name: value})


@pytest.mark.parametrize(("cls", "name", "options"), literal_fields())
def test_unknown_choices_are_refused_with_the_list(cls, name, options):
    with pytest.raises(ValueError, match=f"`{name}` must be one of .*'mispelt'"):
        cls(**{**REQUIRED.get(cls, {}), name: "mispelt"})


def fields_without_none() -> list[Any]:
    """Every field whose type has no None."""
    return [
        pytest.param(cls, name, id=f"{cls.__name__}-{name}")
        for cls in CLASSES
        for name, hint in get_type_hints(cls).items()
        if type(None) not in get_args(hint)
    ]


@pytest.mark.parametrize(("cls", "name"), fields_without_none())
def test_none_is_refused_where_the_type_has_none(cls, name):
    with pytest.raises(ValueError, match=rf"`{name}` must not be None \(`null` in YAML\)"):
        cls(**{**REQUIRED.get(cls, {}), name: None})


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (int, False),
        (int | None, True),
        (Literal["a"], False),
        (Literal["a", None], True),
        (list[int], False),
        (Any, True),
        ("not resolved", True),
    ],
    ids=str,
)
def test_types_that_have_none(hint, expected):
    assert allows_none(hint) is expected


def test_settings_that_contradict_each_other():
    for estimator in ("k1", "k3", "abs"):  # T27
        with pytest.raises(ValueError, match="`placement: loss` needs `estimator: k2` or `full`"):
            KLConfig(estimator=estimator, placement="loss")
    for estimator in ("k2", "full"):
        assert KLConfig(estimator=estimator, placement="loss").placement == "loss"
    with pytest.raises(ValueError, match="a shared one is a head"):
        CriticConfig(kind="shared", path="folder")
    with pytest.raises(ValueError, match="`greedy: false` needs `num_samples`"):
        ValidationConfig(greedy=False, num_samples=0)
    for unused in ({"extra_critic_epochs": 1}, {"update_order": "in_turn"}):
        with pytest.raises(ValueError, match="`advantage: rloo` has no use for a critic"):
            PPOConfig(advantage="rloo", **unused)
    with pytest.raises(ValueError, match="`lr_scaling` and `lr_batch_size` belong together"):
        OptimizerConfig(lr_scaling="sqrt")
    with pytest.raises(ValueError, match=r"`strict` .*leave `max_lag` \(2\) out"):
        StalenessConfig(strict=True, max_lag=2)
    with pytest.raises(ValueError, match=r"`num_minibatches` \(9\).*= 8"):
        BufferConfig(num_prompts=4, responses_per_prompt=2, num_minibatches=9)


def test_t11_greedy_rollouts_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"no policy gradient.*validation\.greedy"):
        SamplingConfig(temperature=0.0)


def test_what_is_off_is_none_and_bounds_are_inside():
    PPOConfig(
        target_kl=None, value_clip_range=None, dual_clip=None, gamma=0.0, gae_lambda=0.0, vf_coef=0
    )
    GroupConfig(max_grad_norm=None, min_lr_ratio=1.0)
    RewardProcessing(clip=None, overlong_penalty=0.5, overlong_tokens=(0, 1))
    SamplingConfig(min_new_tokens=64, top_p=1.0)
    BufferConfig(num_prompts=2, num_minibatches=2)


def test_the_limit_on_the_kl_is_factor_times_target():
    assert PPOConfig(target_kl=0.5, kl_stop_factor=1.5).kl_limit == 0.75
    assert PPOConfig(target_kl=None, kl_stop_factor=1.5).kl_limit is None
    assert BufferConfig(num_prompts=3, responses_per_prompt=4).num_responses == 12


EXAMPLES = [
    *(cls(**REQUIRED.get(cls, {})) for cls in CLASSES),
    PolicyConfig(path="p", lora=LoraConfig(rank=4, alpha=8.0, target_modules=("q", "v"))),
    CriticConfig(kind="shared", head_init="normal", trunk_grad_scale=0.5),
    ReferenceConfig(path="ref", dtype="bfloat16"),
    OptimizerConfig(name="SGD", options={"momentum": 0.9}),
    SamplingConfig(stop_strings=("\n",), stop_token_ids=(5, 9)),
]


def rebuilt(cls, plain):
    """What a reader of a checkpoint does: nested configs come as dicts."""
    hints = get_type_hints(cls)
    values = {
        name: LoraConfig(**value) if isinstance(value, dict) and "lora" in name else value
        for name, value in plain.items()
    }
    assert values.keys() == hints.keys()
    return cls(**values)


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda c: type(c).__name__)
def test_a_config_survives_the_way_to_a_plain_dict(config):
    plain = dataclasses.asdict(config)
    json.dumps(plain)  # containers and numbers, no objects
    assert rebuilt(type(config), plain) == config


@pytest.mark.parametrize("cls", CLASSES)
def test_configs_are_frozen_take_names_only_and_say_what_they_are(cls):
    config = cls(**REQUIRED.get(cls, {}))
    name = dataclasses.fields(cls)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, 1)
    with pytest.raises(TypeError):
        cls("positional")
    for field in dataclasses.fields(cls):
        assert f"        {field.name}: " in cls.__doc__, field.name  # what `--help` prints


def test_rates_follow_the_size_of_a_minibatch():
    assert OptimizerConfig().lr_scale(64) == 1
    assert OptimizerConfig(lr_scaling="linear", lr_batch_size=16).lr_scale(64) == 4
    assert OptimizerConfig(lr_scaling="sqrt", lr_batch_size=16).lr_scale(64) == 2


@pytest.mark.parametrize("texts", ["stop", [1], ["stop", None]], ids=str)
def test_stop_strings_are_a_list_of_texts(texts):
    with pytest.raises(ValueError, match="`stop_strings` must be a list of texts, got"):
        SamplingConfig(stop_strings=texts)


@pytest.mark.parametrize("setting", ["gradient_checkpointing", "compile"])
def test_a_head_on_the_actors_trunk_has_no_trunk_of_its_own_to_set(setting):
    with pytest.raises(ValueError, match=f"follows `policy.{setting}`"):
        CriticConfig(kind="shared", **{setting: True})
