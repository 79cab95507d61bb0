"""The page on troubleshooting is made of the rules, and its settings exist."""

from dataclasses import fields
from pathlib import Path

import pytest

import ppo_lightning.callbacks
from ppo_lightning.configs import (
    BufferConfig,
    GroupConfig,
    KLConfig,
    PPOConfig,
    RewardProcessing,
    StalenessConfig,
)
from ppo_lightning.diagnostics import HANDBOOK, Remedy, RuleLimits
from ppo_lightning.diagnostics.docs import troubleshooting
from ppo_lightning.modules.controls import ppo_dials
from tests.helpers.courses import healthy

SECTIONS = {
    "ppo": PPOConfig,
    "kl": KLConfig,
    "actor": GroupConfig,
    "critic": GroupConfig,
    "buffer": BufferConfig,
    "reward_processing": RewardProcessing,
    "staleness": StalenessConfig,
}


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
    assert page.read_text(encoding="utf-8") == troubleshooting()


def test_the_page_has_every_limit():
    page = troubleshooting()
    assert all(f"| `{field.name}` | {field.default:g} |" in page for field in fields(RuleLimits))


REMEDIES = [(name, remedy) for name, card in HANDBOOK.items() for remedy in card.remedies]


@pytest.mark.parametrize(("illness", "remedy"), REMEDIES, ids=lambda x: getattr(x, "key", x))
def test_what_is_to_be_tried_exists(illness, remedy):
    section, _, name = remedy.key.partition(".")
    if section in SECTIONS and name:
        assert name in {field.name for field in fields(SECTIONS[section])}
        if isinstance(remedy.value, float):
            whole = {"num_update_epochs", "max_lag"}
            value = int(remedy.value) if name in whole else remedy.value
            assert getattr(SECTIONS[section](**{name: value}), name) == value
    elif section[0].isupper():
        known = set(ppo_lightning.callbacks.__all__) | {"Watchdog"}
        assert section in known
    assert remedy.why
    assert remedy.text(healthy(3))


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
