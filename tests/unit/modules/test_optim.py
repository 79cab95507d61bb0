"""One optimiser, two groups, a schedule for each, clipping for each."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import GroupConfig, OptimizerConfig
from ppo_lightning.errors import ConfigError
from ppo_lightning.functional import lr_factor
from ppo_lightning.modules.optim import (
    advance,
    build_optimizer,
    build_scheduler,
    clip_gradients,
    gradient_norm,
)


def weights(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def build(actor=None, critic=None, **config):
    return build_optimizer(
        weights((3, 2)) if actor is None else actor,
        weights((2,)) if critic is None else critic,
        config=OptimizerConfig(**config),
        actor_lr=1e-2,
        critic_lr=1e-3,
    )


def test_two_groups_by_name_with_rates_of_their_own():
    optimizer = build(weight_decay=0.1, betas=(0.8, 0.9), eps=1e-4)
    actor, critic = optimizer.param_groups
    assert (actor["name"], actor["lr"]) == ("actor", 1e-2)
    assert (critic["name"], critic["lr"]) == ("critic", 1e-3)
    for group in optimizer.param_groups:
        assert group["fused"] is True
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-4, 0.1)
    assert type(optimizer) is torch.optim.AdamW
    assert build().param_groups[0]["eps"] == 1e-5


def step(optimizer, parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": False}], ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_state_filled_at_once_is_the_lazy_start_bitwise(name, options):
    ours, plain = weights((3, 2), (4,)), weights((3, 2), (4,))
    optimizer = build(ours[:1], ours[1:], name=name, options=options)
    lazy = getattr(torch.optim, name)(
        [{"params": plain[:1], "lr": 1e-2}, {"params": plain[1:], "lr": 1e-3}],
        **{"eps": 1e-5, "weight_decay": 0.0, "fused": True, **options},
    )
    assert len(optimizer.state) == 2
    keys = {p: set(state) for p, state in optimizer.state.items()}
    for seed in range(3):
        step(optimizer, ours, seed)
        step(lazy, plain, seed)
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)
        assert set(optimizer.state[mine]) == set(lazy.state[theirs]) == keys[mine]


def test_a_group_that_never_stepped_is_in_the_state_all_the_same():
    actor, critic = weights((3, 2)), weights((2,), seed=1)
    optimizer = build(actor, critic)
    before = actor[0].clone()
    step(optimizer, critic, 0)
    assert torch.equal(actor[0], before)  # no gradient, no step: not even of weight decay
    assert set(optimizer.state_dict()["state"]) == {0, 1}


@pytest.mark.parametrize("name", ["Adm", "json.JSONDecoder", "nowhere.Adam", "lr_scheduler"])
def test_names_that_are_no_optimiser_are_refused(name):
    with pytest.raises(ConfigError, match=rf"`optimizer\.name`.*{name}"):
        build(name=name)


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "torch.optim.Optimizer"])
def test_optimisers_that_cannot_be_used_are_refused(name):
    with pytest.raises(ConfigError, match=rf"`optimizer\.name`: '{name}' (cannot be|is a base)"):
        build(name=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 1}, r"`optimizer\.options\.lr`.*`actor\.lr` and `critic\.lr`"),
        ({"foo": 1}, r"`optimizer\.options\.foo`: AdamW has no.*amsgrad"),
        ({"amsgrd": True}, "did you mean `amsgrad`"),
        ({"fused": True, "foreach": True}, "`optimizer`: AdamW refuses its settings: "),
    ],
)
def test_options_that_a_class_does_not_take_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        build(options=options)


def test_other_optimisers_by_name_and_by_path():
    assert type(build(name="SGD", options={"momentum": 0.9})) is torch.optim.SGD
    assert type(build(name="torch.optim.RMSprop")) is torch.optim.RMSprop


def test_settings_reach_every_class_that_has_them():
    radam = build(name="RAdam", betas=(0.5, 0.6), eps=1e-3, weight_decay=0.1).param_groups[0]
    assert (radam["betas"], radam["eps"], radam["weight_decay"]) == ((0.5, 0.6), 1e-3, 0.1)
    assert build(name="RMSprop", eps=1e-3).param_groups[0]["eps"] == 1e-3
    assert build(name="Adafactor").param_groups[0]["eps"] == (None, 1e-3)  # means another thing
    assert type(build(name="Rprop")) is torch.optim.Rprop


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("Rprop", "weight_decay", 0.1),
        ("SGD", "betas", (0.5, 0.9)),
        ("SGD", "eps", 1e-3),
        ("Adafactor", "eps", 1e-3),
    ],
)
def test_settings_that_a_class_lacks_are_refused(name, setting, value):
    with pytest.raises(ConfigError, match=rf"`optimizer\.{setting}`: {name} has no"):
        build(name=name, **{setting: value})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("network", ["actor", "critic"])
def test_weights_that_would_lose_their_steps_are_refused(network, dtype):
    coarse = [torch.nn.Parameter(torch.zeros(2, dtype=dtype))]
    setting = {"actor": "policy", "critic": "critic_model"}[network]
    with pytest.raises(ConfigError, match=rf"`{setting}\.dtype`.*{network}.*bf16-mixed.*lora"):
        build(**{network: coarse})


def test_each_group_follows_its_own_schedule_and_the_factor_in_force():
    optimizer = build()
    factors = {"actor": 1.0, "critic": 1.0}
    schedule = {"warmup": 2, "schedule": "cosine", "min_lr_ratio": 0.1}
    scheduler = build_scheduler(
        optimizer,
        actor=GroupConfig(lr=1e-2, **schedule),
        critic=GroupConfig(lr=1e-3, warmup=3),
        total_steps=10,
        factors=factors.__getitem__,
    )
    actor, critic = optimizer.param_groups
    law = {"warmup_steps": 2, "total_steps": 10, "schedule": "cosine", "min_ratio": 0.1}
    assert actor["lr"] == 0.0
    for planned in range(1, 10):
        factors["actor"] = 0.5 if planned == 6 else 1.0
        advance(scheduler)
        wanted = 1e-2 * lr_factor(planned, **law) * factors["actor"]
        assert actor["lr"] == pytest.approx(wanted)
        assert critic["lr"] == pytest.approx(1e-3 * min(planned / 3, 1))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("group", ["actor", "critic"])
def test_a_schedule_that_ends_with_the_run_needs_an_end(group, schedule):
    groups = {"actor": GroupConfig(warmup=2), "critic": GroupConfig()}
    groups[group] = GroupConfig(schedule=schedule)
    with pytest.raises(ConfigError, match=rf"`{group}\.schedule: {schedule}`.*max_epochs"):
        build_scheduler(build(), **groups, total_steps=None, factors=lambda name: 1.0)


def with_gradients(seed=0, scale=1.0):
    parameters = weights((3, 2), (4,))
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = scale * torch.randn(p.shape, generator=generator)
    return [*parameters, *weights((2,))]  # one without a gradient


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 100.0])
def test_clipping_is_that_of_torch(max_norm):
    ours, theirs = with_gradients(), with_gradients()
    norm = gradient_norm(ours)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert torch.equal(norm, expected)
    clip_gradients(ours, max_norm=max_norm, norm=norm)
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert_close(mine.grad, other.grad)
    assert gradient_norm(ours) <= max_norm
    assert ours[2].grad is None


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norms_that_are_not_finite_clip_nothing(bad):
    parameters = with_gradients()
    parameters[0].grad[0, 0] = bad
    before = [p.grad.clone() for p in parameters[:2]]
    norm = gradient_norm(parameters)
    assert not norm.isfinite()
    clip_gradients(parameters, max_norm=1.0, norm=norm)
    for p, old in zip(parameters, before, strict=False):
        assert_close(p.grad, old, rtol=0, atol=0, equal_nan=True)


def test_no_bound_and_no_gradient_are_left_alone():
    parameters = with_gradients(scale=50.0)
    before = parameters[0].grad.clone()
    clip_gradients(parameters, max_norm=None, norm=gradient_norm(parameters))
    assert torch.equal(parameters[0].grad, before)
    assert gradient_norm(weights((2,))) == 0
