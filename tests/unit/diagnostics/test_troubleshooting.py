"""The page on troubleshooting is made of the rules, and its settings exist."""

import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml
from lightning.pytorch import Trainer

import ppo_lightning.callbacks
import ppo_lightning.modules
from ppo_lightning.cli.main import HELPER_COMMANDS
from ppo_lightning.configs import KLConfig, PPOConfig
from ppo_lightning.diagnostics import HANDBOOK, Remedy, RuleLimits
from ppo_lightning.diagnostics.docs import troubleshooting
from ppo_lightning.diagnostics.handbook import _number
from ppo_lightning.modules import PPOModule
from ppo_lightning.modules.controls import ppo_dials
from ppo_lightning.rollout import RolloutDataModule
from tests.helpers.courses import healthy


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
    assert page.read_text(encoding="utf-8") == troubleshooting()


def test_the_page_has_every_limit():
    page = troubleshooting()
    assert all(f"| `{field.name}` | {field.default:g} |" in page for field in fields(RuleLimits))


REMEDIES = [(name, remedy) for name, card in HANDBOOK.items() for remedy in card.remedies]


def arguments(owner):
    """Names and types of what a class or config section takes."""
    hints = get_type_hints(owner if is_dataclass(owner) else owner.__init__)
    taken = inspect.signature(owner).parameters
    return {name: hints.get(name, object) for name in taken}


def setting(owner, path):
    """The section and the name that a path leads to, through the sections of a config."""
    *above, last = path.split(".")
    for name in above:
        kind = arguments(owner)[name]
        (owner,) = (k for k in (get_args(kind) or (kind,)) if is_dataclass(k))
    assert last in arguments(owner), f"{owner.__name__} has no `{last}`"
    return owner, last


def place_of(key):
    """What a remedy's key leads to; None for a command or a class."""
    if key in HELPER_COMMANDS:
        return None
    head, _, rest = key.partition(".")
    if head[0].isupper():
        known = vars(ppo_lightning.callbacks) | vars(ppo_lightning.modules)
        return setting(known[head], rest) if rest else None
    if head == "trainer":
        return setting(Trainer, rest)
    if head == "data":
        return setting(RolloutDataModule, rest.removeprefix("init_args."))
    return setting(PPOModule, key)


@pytest.mark.parametrize(("illness", "remedy"), REMEDIES, ids=lambda x: getattr(x, "key", x))
def test_what_is_to_be_tried_exists(illness, remedy):
    place = place_of(remedy.key)
    if place is not None and is_dataclass(place[0]) and remedy.value is not None:
        section, name = place
        value = yaml.safe_load(_number(remedy.value))
        assert getattr(section(**{name: value}), name) == value
    assert remedy.value is None or place is not None
    assert remedy.why
    assert remedy.text(healthy(3))


BACK = ("staleness.", "sampling.")
"""Settings of an illness that shows only where they were changed: their remedy is the preset."""


@pytest.mark.parametrize(("illness", "remedy"), REMEDIES, ids=lambda x: getattr(x, "key", x))
def test_what_is_to_be_tried_is_not_there_already(illness, remedy):
    place = place_of(remedy.key)
    if place is None or remedy.value is None or remedy.field or remedy.key.startswith(BACK):
        return
    preset = inspect.signature(place[0]).parameters[place[1]].default
    assert preset != yaml.safe_load(_number(remedy.value)) or preset is None


def test_a_key_that_leads_nowhere_is_found():
    for key in ("buffer.num_prompts", "kl.coeff", "MaxKL.bound", "reward-model", "trainer.gpus"):
        with pytest.raises((AssertionError, KeyError)):
            place_of(key)


def test_what_the_doctor_turns_is_a_dial():
    dials = ppo_dials(PPOConfig(), KLConfig())
    for card in HANDBOOK.values():
        for turn in card.turns:
            assert turn.dial in dials
            assert (turn.factor is not None) + (turn.value is not None) + turn.by_spread == 1


def test_a_remedy_tells_its_figures():
    remedy = Remedy(key="kl.coef", factor=4.0, field="kl_coef", why="pull")
    assert remedy.text(healthy(0)) == "`kl.coef` 0.1 → 0.4: pull"
    assert remedy.text() == "`kl.coef` × 4: pull"
    unpenalised = Remedy(key="kl.coef", factor=4.0, from_zero=0.05, field="kl_coef", why="pull")
    assert unpenalised.text(healthy(0, kl_coef=0.0)) == "`kl.coef` 0 → 0.05: pull"
    assert unpenalised.text(healthy(0)) == "`kl.coef` 0.1 → 0.4: pull"
    assert Remedy(key="actor.lr", factor=0.1, why="x").text() == "`actor.lr` ÷ 10: x"
    assert Remedy(key="ppo.target_kl", value=0.02, why="x").text() == "`ppo.target_kl`: 0.02: x"
    epochs = Remedy(key="e", value=2.0, field="epochs_done", why="x")
    assert epochs.text(healthy(0)) == "`e` 4 → 2: x"
    for done in (1.0, 2.0):
        told = epochs.text(healthy(0, epochs_done=done))
        assert told == f"`e` is {done:g} already: look at the others"
