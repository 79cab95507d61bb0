"""The page of settings says what the code says."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pytest

import ppo_lightning.configs as room
from ppo_lightning.configs import GroupConfig
from ppo_lightning.configs.docs import SECTIONS, argument_docs, settings_markdown, type_text
from ppo_lightning.modules import PPOModule, RewardModule
from ppo_lightning.rewards import RewardTerm
from ppo_lightning.rollout import RolloutDataModule

ROOT = Path(__file__).parents[3]


def test_the_committed_page_is_current():
    # If it is not: python -m ppo_lightning.configs.docs > docs/configuration.md
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == settings_markdown()


def test_every_config_of_the_room_is_on_the_page():
    public = {getattr(room, name) for name in room.__all__}
    assert {c for c in public if isinstance(c, type)} == {record for _, record, _ in SECTIONS}


@pytest.mark.parametrize("record", list(dict.fromkeys(record for _, record, _ in SECTIONS)))
def test_every_field_is_described(record):
    assert list(argument_docs(record)) == [field.name for field in fields(record)]


def test_sections_stand_where_the_page_says_and_have_its_defaults():
    required = {"policy", "backbone"}  # they hold a key that has no default
    for place, record, remark in SECTIONS:
        top, _, key, *inner = place.split(".")
        owner = RewardModule if "`RewardModule`" in remark else PPOModule
        if key == "rewards[]":
            (field,) = [f for f in fields(RewardTerm) if f.name == inner[0]]
            assert record.__name__ in str(field.type)
            continue
        default = inspect.signature(RolloutDataModule if top == "data" else owner).parameters[key]
        if key == "ptx":
            assert default.default is None
        elif key not in required:
            assert default.default == record()
        assert not inner or inner == ["lora"]


def test_the_critics_own_rate_is_named():
    own = inspect.signature(PPOModule).parameters["critic"].default
    assert own == GroupConfig(lr=5e-6)
    assert f"the default `lr` of the critic is `{own.lr:g}`" in settings_markdown()


@dataclass
class Sample:
    """What it is.

    Args:
        first: One
            and a half: lines.
        second: Two.

    Raises:
        third: Nothing.
    """

    first: int
    second: int


def test_arguments_are_read_from_the_docstring():
    assert argument_docs(Sample) == {"first": "One and a half: lines.", "second": "Two."}


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (Literal["a", "b"], "`a` or `b`"),
        (float | None, "number or null"),
        (tuple[int, int] | None, "list of 2: whole number, whole number or null"),
        (str | Sequence[str], "text or list of texts"),
        (Mapping[str, Any], "keys with values"),
        (Sample | None, "section or null"),
        (bool, "true or false"),
    ],
)
def test_types_in_words(hint, text):
    assert type_text(hint) == text
