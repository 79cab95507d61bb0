"""Records that stand in a config: what is written there as text stays text."""

import json
from pathlib import Path

import pytest
import yaml

from tests.helpers.cli import changed, run_cli, tiny_config, write_config

TEXTS = ["no", "4", "null", "true", "~", "[a]", "{a: 1}", "2020-01-01"]
RECORDS = [
    {"prompt": text, "response": text, "answer": 4, "extra": {"a": text, "deep": [text]}}
    for text in TEXTS
]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "assistant", "content": text},
        ],
        "chosen": text,
        "rejected": [{"role": "assistant", "content": text}],
        "margin": 1.5,
        "right": True,
    }
    for text in TEXTS
]
PPO, SFT, RM = "RolloutDataModule", "SFTDataModule", "PreferenceDataModule"
SETTINGS = [
    (PPO, "data.init_args.prompts", [*TEXTS, *RECORDS, *CHATS]),
    (PPO, "data.init_args.val_prompts", [*TEXTS, *RECORDS, *CHATS]),
    (PPO, "model.init_args.ptx.texts", TEXTS),
    (PPO, "model.init_args.ptx.demonstrations", [*RECORDS, *CHATS]),
    (SFT, "data.init_args.demonstrations", [*TEXTS, *RECORDS, *CHATS]),
    (SFT, "data.init_args.val_demonstrations", [*TEXTS, *RECORDS, *CHATS]),
    (RM, "data.init_args.pairs", [*RECORDS, *CHATS]),
    (RM, "data.init_args.val_pairs", [*RECORDS, *CHATS]),
]
NEEDED = {PPO: "prompts", SFT: "demonstrations", RM: "pairs"}


def config_of(data, tmp_path):
    config = tiny_config("no/such/folder", tmp_path / "run")
    config["model"]["class_path"] = "ppo_lightning.modules.PPOModule"
    if data != PPO:
        needed = {NEEDED[data]: [{"prompt": "a"}]}
        room = "ppo_lightning.data"
        config["data"] = {"class_path": f"{room}.{data}", "init_args": needed}
    return config


def printed(monkeypatch, capsys, config, *arguments):
    path = write_config(Path("c.yaml"), config)
    assert run_cli(monkeypatch, "fit", "--config", path, *arguments, "--print_config") == 0
    return yaml.safe_load(capsys.readouterr().out)


def value_at(config, key):
    for part in key.split("."):
        config = config[part]
    return config


@pytest.mark.parametrize(("data", "setting", "given"), SETTINGS)
def test_t01_text_stays_text_in_files_options_and_saved_configs(
    monkeypatch, capsys, tmp_path, data, setting, given
):
    monkeypatch.chdir(tmp_path)
    config = config_of(data, tmp_path)
    option = f"--{setting.replace('.init_args', '')}={json.dumps(given)}"
    of_file = printed(monkeypatch, capsys, changed(config, setting, given))
    of_option = printed(monkeypatch, capsys, config, option)
    again = printed(monkeypatch, capsys, of_file)  # as a run's own config.yaml, run once more
    for found in (of_file, of_option, again):
        assert value_at(found, setting) == given
