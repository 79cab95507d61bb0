import re
import subprocess
import sys

import pytest

import ppo_lightning


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_importing_the_package_loads_nothing_heavy():
    heavy = "{'torch', 'lightning', 'transformers', 'jsonargparse', 'numpy'}"
    assert run(f"import sys, ppo_lightning; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_version_is_one_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", ppo_lightning.__version__)


def test_public_names_are_listed_before_they_are_imported():
    assert set(ppo_lightning.__all__) <= set(dir(ppo_lightning))


@pytest.mark.parametrize("name", ["PPOModule", "RolloutDataModule"])
def test_public_names_are_found_on_first_use(name):
    assert getattr(ppo_lightning, name).__name__ == name


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'PPOModul'"):
        _ = ppo_lightning.PPOModul


def test_reading_and_judging_a_run_loads_no_torch():
    code = "import sys, ppo_lightning.diagnostics, ppo_lightning.io; print('torch' in sys.modules)"
    assert run(code) == "False"
