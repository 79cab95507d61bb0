"""What the command refuses before it listens; that it serves is seen in `integration`."""

import importlib

import pytest

from ppo_lightning.cli.components import read_component
from ppo_lightning.cli.main import main
from ppo_lightning.errors import ConfigError
from ppo_lightning.rewards import RegexReward
from ppo_lightning.rewards.extras import import_extra

GOOD = "class_path: ppo_lightning.rewards.RegexReward\ninit_args: {pattern: 'a+', reward: 1e1}\n"


def refused(capsys, *arguments):
    assert main(["serve-reward", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_a_component_comes_from_yaml_or_json(tmp_path):
    file = tmp_path / "c.yaml"
    for text in (GOOD, '{"class_path": "RegexReward", "init_args": {"pattern": "a"}}'):
        file.write_text(text, encoding="utf-8")
        assert isinstance(read_component(file), RegexReward)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "must hold a component as a config names it"),
        ("init_args: {}\n", "must hold a component as a config names it"),
        ("a: [", "is no YAML or JSON"),
        ("class_path: ppo_lightning.rewards.NoReward\n", "NoReward"),
        ("class_path: torch.nn.Linear\n", "torch.nn.Linear"),
        (GOOD.replace("pattern", "patern"), "patern"),
        (GOOD.replace("'a+'", "'('"), "pattern"),
    ],
)
def test_files_that_name_no_component(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        read_component(file)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_component(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a reward model or `--component FILE`"),
        (["model", "--component", "c.yaml"], "give either a reward model or `--component FILE`"),
        (["model", "--host", "0.0.0.0"], "`--host 0.0.0.0` lets other machines in"),
        (["model", "--token-env", "NO_SUCH_TOKEN"], "`NO_SUCH_TOKEN` is not set"),
        (["model", "--max-batch", "0"], "`--max-batch` must be at least 1, got 0"),
        (["model", "--max-wait-ms", "-1"], "`--max-wait-ms` must be at least 0, got -1"),
        (["model", "--max-queue", "9"], "`--max-items` must be at most `--max-queue`, which is 9"),
        (["model", "--port", "70000"], "`--port` must lie in [0, 65535]"),
        (["model", "--device", "gpu"], "`--device gpu` cannot be used"),
        (["model", "--max-bach", "3"], "Did you mean `--max-batch`?"),
        (["--component", "c.yaml", "--dtype", "float16"], "`--dtype` is for a model"),
        (["/no/such/model", "--port", "0"], "`/no/such/model` does not exist"),
    ],
)
def test_what_is_refused(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys, package):
    def missing(module, **options):
        if module == package:
            monkeypatch.setattr("ppo_lightning.rewards.extras.import_module", _no_module)
        return import_extra(module, **options)

    monkeypatch.setattr("ppo_lightning.rewards.extras.import_extra", missing)
    told = refused(capsys, "model")
    assert f"needs the package {package}" in told
    assert "pip install 'ppo-lightning[server]'" in told


def _no_module(name):
    raise ModuleNotFoundError(name)


def test_help_names_the_extra_commands(capsys):
    assert main(["serve-reward", "--help"]) == 0
    assert "--max-wait-ms" in capsys.readouterr().out
    assert importlib.util.find_spec("ppo_lightning.cli.serve_reward")


def test_a_model_that_cannot_be_loaded_is_an_error_without_a_traceback(tmp_path, caplog, capsys):
    assert main(["serve-reward", str(tmp_path), "--port", "0"]) == 2
    assert "config.json" in capsys.readouterr().err
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]
