"""One option for a part of a list, from the command line to the run."""

import pytest
import yaml

from tests.helpers.cli import changed, run_cli, tiny_config, write_config

ARGS = "model.init_args"


@pytest.fixture
def config(tiny_llama_dir, tmp_path):
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    callback = {
        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
        "init_args": {"monitor": "reward/score", "patience": 2},
    }
    config["trainer"] |= {"callbacks": [callback], "logger": False}
    sources = [{"source": ["the cat"], "weight": 3}, {"source": ["no"], "weight": 1, "name": "b"}]
    mixture = {"class_path": "ppo_lightning.data.MixturePrompts", "init_args": {"parts": sources}}
    return changed(config, "data.init_args.prompts", mixture)


def printed(monkeypatch, tmp_path, capsys, config, *options):
    path = write_config(tmp_path / "c.yaml", config)
    assert run_cli(monkeypatch, "fit", "--config", path, *options, "--print_config") == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_parts_of_lists_are_changed(monkeypatch, tmp_path, config, capsys):
    found = printed(
        *(monkeypatch, tmp_path, capsys, config, "--model.rewards[length].weight", "1e-2"),
        *("--model.init_args.rewards[0].component.target_tokens=7",),
        *("--trainer.callbacks[0].patience", "5", "--data.prompts.parts[b].weight", "9"),
    )
    [reward] = found["model"]["init_args"]["rewards"]
    assert (reward["name"], reward["weight"]) == ("length", 0.01)
    assert reward["component"]["init_args"]["target_tokens"] == 7
    assert found["trainer"]["callbacks"][0]["init_args"]["patience"] == 5
    first, second = found["data"]["init_args"]["prompts"]["init_args"]["parts"]
    assert (first["weight"], second["weight"]) == (3, 9)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("model.rewards[0].wieght", 1, "unknown key `wieght`"),
        ("model.rewards[0].wieght", 1, "`weight`"),
        ("model.rewards[0].component.target_token", 1, "did you mean `target_tokens`"),
        ("model.rewards[0].component.target_tokens", 1.5, "must be a whole number, got `1.5`"),
        ("model.rewards[len].weight", 1, "did you mean `[length]`?"),
        ("model.reward[0].weight", 1, "did you mean `model.rewards`?"),
        ("trainer.callbacks[0].patients", 1, "did you mean `patience`?"),
    ],
)
def test_a_typo_is_told_with_the_nearest(monkeypatch, tmp_path, config, capsys, option, value, message):  # fmt: skip  # noqa: E501
    path = write_config(tmp_path / "c.yaml", config)
    assert run_cli(monkeypatch, "fit", "--config", path, f"--{option}", str(value)) == 2
    assert message in capsys.readouterr().err


def test_the_saved_config_holds_the_result(monkeypatch, tmp_path, config, capsys):
    path = write_config(tmp_path / "c.yaml", changed(config, "trainer.max_epochs", 1))
    option = ("--model.rewards[length].component.target_tokens", "2")
    assert run_cli(monkeypatch, "validate", "--config", path, *option) == 0
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    [reward] = saved["model"]["init_args"]["rewards"]
    assert reward["component"]["init_args"]["target_tokens"] == 2
