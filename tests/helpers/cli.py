"""Tiny configs for the command line, and a call of it in this process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_lightning.cli.main import main

KEEP_ENVIRONMENT = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


def tiny_config(policy: Path | str, folder: Path | str) -> dict[str, Any]:
    """Two short iterations of a tiny model, on the CPU."""
    return {
        "seed_everything": 1,
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "default_root_dir": str(folder)},
        "model": {
            "init_args": {
                "policy": {"path": str(policy)},
                "sampling": {"max_new_tokens": 4},
                "ppo": {"num_update_epochs": 1},
                "actor": {"lr": 1e-3},
                "critic": {"lr": 3e-3},
                "guards": {"advice": "off"},
                "rewards": [
                    {
                        "name": "length",
                        "component": {
                            "class_path": "ppo_lightning.rewards.TargetLengthReward",
                            "init_args": {"target_tokens": 3},
                        },
                    }
                ],
            }
        },
        "data": {
            "init_args": {
                "prompts": ["the cat", "a dog ran", "no"],
                "val_prompts": ["hello", "we saw"],
                "buffer": {"num_prompts": 4, "num_minibatches": 2},
                "chat": False,
            }
        },
    }


def changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with one key (``model.init_args.ppo.clip_range``) set; ``...`` takes it away."""
    result = copy.deepcopy(config)
    *above, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    place: Any = result
    for part in above:
        place = place[part] if isinstance(part, int) else place.setdefault(part, {})
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return result


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """Write a config as YAML."""
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Call the command line; what it does to the environment is undone after the test."""
    for name in KEEP_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return main([str(argument) for argument in arguments])
