"""The layout rules hold in the package, and the reader that says so can see them broken."""

from pathlib import Path

import pytest

from tests.helpers.layering import PACKAGE, ROOMS, oversize, violations

ROOT = Path(__file__).parents[1]

# Functions and files that may be longer than the rest, each with its reason. Empty is right.
ALLOWED: dict[str, str] = {}


def test_rooms_keep_the_layout():
    assert violations(ROOT / PACKAGE) == []


@pytest.mark.parametrize("folder", [PACKAGE, "tests", "experiments"])
def test_functions_and_files_stay_small(folder):
    assert oversize(ROOT / folder, ALLOWED) == []


def test_rooms_are_listed_once():
    assert len(set(ROOMS)) == len(ROOMS) == 19


# The reader itself, on made-up packages


def package(folder, files):
    for place, text in files.items():
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


CLEAN = {
    "__init__.py": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from ppo_lightning.functional import kl1\n"
        "__all__ = ['kl1', 'X', '__version__']\n__version__ = '1'\n"
        "def __getattr__(name): ...\n"
    ),
    "functional/__init__.py": (
        "from ppo_lightning.functional.kl import k1 as kl1\n__all__ = ['kl1']\n"
    ),
    "functional/kl.py": "import torch\ndef k1(): ...\ndef _helper(): ...\n",
    "functional/stats.py": "from ppo_lightning.functional.kl import _helper\n",
    "models/loading.py": "import transformers\nfrom ppo_lightning import __version__\n",
    "models/__init__.py": "__all__ = []\n",
    "data/__init__.py": "__all__ = ['load']\ndef load(): ...\n",
    "data/datamodules.py": "import lightning.pytorch as pl\nfrom ppo_lightning import functional\n",
    "distributed/__init__.py": "__all__ = []\n",
    "distributed/strategies.py": "from lightning.pytorch.strategies import DDPStrategy\n",
    "cli/__init__.py": "__all__ = []\n",
    "cli/main.py": "import ppo_lightning.functional.kl\nfrom ppo_lightning.models import loading\n",
}


def test_reader_finds_nothing_in_a_clean_package(tmp_path):
    assert violations(package(tmp_path, CLEAN)) == []


@pytest.mark.parametrize(
    ("place", "text", "expected"),
    [
        (
            "functional/losses.py",
            "from ppo_lightning.configs import PPOConfig\n",
            "functional/losses.py:1: `functional` must not import `configs`",
        ),
        (
            "functional/losses.py",
            "def f():\n    import ppo_lightning.cli.main\n",
            "functional/losses.py:2: `functional` must not import `cli`",
        ),
        (
            "functional/losses.py",
            "from ppo_lightning import models\n",
            "functional/losses.py:1: `functional` must not import `models`",
        ),
        (
            "functional/losses.py",
            "from ..models import loading\n",
            "functional/losses.py:1: `functional` must not import `models`",
        ),
        (
            "functional/losses.py",
            "from .. import models\n",
            "functional/losses.py:1: `functional` must not import `models`",
        ),
        (
            "functional/losses.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers\n",
            "functional/losses.py:3: `transformers` may not be imported here",
        ),
        (
            "data/prompts/sources.py",
            "import lightning\n",
            "data/prompts/sources.py:1: `lightning` may not be imported here",
        ),
        (
            "modules.py",
            "import pytorch_lightning as pl\n",
            "modules.py:1: `pytorch_lightning` may not be imported here",
        ),
        (
            "rollout/engines/native.py",
            "from transformers import AutoModel\n",
            "rollout/engines/native.py:1: `transformers` may not be imported here",
        ),
        (
            "configs.py",
            "from ppo_lightning.functional.kl import _helper\n",
            "configs.py:1: `_helper` is private to `functional`",
        ),
        (
            "configs.py",
            "from ppo_lightning.functional._kl import k1\n",
            "configs.py:1: `_kl` is private to `functional`",
        ),
        (
            "configs.py",
            "from ppo_lightning import PPOModule\n",
            "configs.py:1: `PPOModule` is no room; name the room in full",
        ),
        ("utils/text.py", "", "utils/text.py: `utils` is not in the list of rooms"),
        (
            "__init__.py",
            "from ppo_lightning.functional import k1\n__all__ = ['k1']\n",
            "__init__.py:1: importing the package must not load `functional`",
        ),
        (
            "models/__init__.py",
            "from ppo_lightning.models.loading import load\n",
            "models/__init__.py: no `__all__`, a literal list of the room's public names",
        ),
        (
            "models/__init__.py",
            "",
            "models/__init__.py: no `__all__`, a literal list of the room's public names",
        ),
        (
            "models/__init__.py",
            "from ppo_lightning.models.loading import load\n__all__ = []\n",
            "models/__init__.py: imports `load` but does not list it in `__all__`",
        ),
        (
            "models/__init__.py",
            "__all__ = ['load']\n",
            "models/__init__.py: `__all__` lists `load`, which is not there",
        ),
    ],
)
def test_reader_sees_each_rule_broken(tmp_path, place, text, expected):
    assert violations(package(tmp_path, {**CLEAN, place: text})) == [expected]


LONG = "def f():\n" + '    """Doc.\n\n    More.\n    """\n' + "    x = 1\n" * 40


def test_reader_measures_functions_without_their_docstrings(tmp_path):
    package(tmp_path, {"a.py": LONG.replace("    x = 1\n", "", 1)})  # 1 + 39 lines
    assert oversize(tmp_path, {}) == []
    package(tmp_path, {"a.py": LONG})
    assert oversize(tmp_path, {}) == ["a.py:f has 41 lines, more than 40"]
    assert oversize(tmp_path, {"a.py:f": "a reason"}) == []


def test_reader_measures_files(tmp_path):
    package(tmp_path, {"x/a.py": "a = 1\n" * 501, "x/b.py": "a = 1\n" * 500})
    assert oversize(tmp_path, {}) == ["x/a.py has 501 lines, more than 500"]
