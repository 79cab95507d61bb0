"""The recommended set, laid over a config of one's own."""

from itertools import pairwise

import yaml

from ppo_lightning.cli.config_files import shipped_configs
from ppo_lightning.cli.lightning import PPOLightningCLI
from ppo_lightning.metrics import read_metrics
from tests.helpers.cli import run_cli, tiny_config, write_config

NAMES = [
    "ValueWarmup",
    "AdaptiveKL",
    "MaxKL",
    "EntropyTarget",
    "BufferScheduler",
    "Doctor",
    "CheckpointRollback",
]


def test_it_runs_over_a_config_and_keeps_its_callbacks(tiny_llama_dir, tmp_path, monkeypatch):
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    config["trainer"]["max_epochs"] = 4
    config["trainer"]["callbacks"] = [{"class_path": "ppo_lightning.callbacks.ActorEMA"}]
    path = write_config(tmp_path / "mine.yaml", config)
    options = ["--config", path, "--config", "ppo-lightning:stable"]
    quiet = ["--model.guards.advice", "off"]  # a tiny model has much to be warned of
    assert run_cli(monkeypatch, "fit", *options, *quiet) == 0
    (saved,) = (tmp_path / "run").rglob("config.yaml")
    callbacks = yaml.safe_load(saved.read_text(encoding="utf-8"))["trainer"]["callbacks"]
    assert [c["class_path"].rpartition(".")[2] for c in callbacks] == ["ActorEMA", *NAMES]
    (metrics,) = (tmp_path / "run").rglob("metrics.jsonl")
    stats = read_metrics(metrics)
    assert [s.policy_loss is None for s in stats] == [True, True, False, False]  # value warm-up
    # The first iteration with an actor was the third; its KL, below the target, lowered β.
    assert [s.kl_coef for s in stats[:3]] == [0.05] * 3
    assert 0.049 < stats[3].kl_coef < 0.05


def overlay(tmp_path, tiny_llama_dir, *changes):
    """A short run's config with the set over it, and files of changes after that; as options."""
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    config["trainer"]["max_epochs"] = 3
    files = [write_config(tmp_path / "mine.yaml", config), "ppo-lightning:stable"]
    files += [
        write_config(tmp_path / f"changes{number}.yaml", change)
        for number, change in enumerate(changes)
    ]
    return [*(part for file in files for part in ("--config", file)), "--model.guards.advice=off"]


def used(monkeypatch):
    """The callbacks of the Trainer that the command line has made."""
    found = []
    real = PPOLightningCLI.fit

    def fit(self, **settings):
        found.extend(self.trainer.callbacks)
        real(self, **settings)

    monkeypatch.setattr(PPOLightningCLI, "fit", fit)
    return found


def test_a_later_files_callback_takes_the_place_of_its_like(
    tiny_llama_dir, tmp_path, monkeypatch, caplog
):
    mine = [
        {"class_path": f"ppo_lightning.callbacks.{name}", "init_args": arguments}
        for name, arguments in [
            ("MaxKL", {"max_kl_ref": 50.0, "action": "stop_run"}),  # another action: beside it
            ("AdaptiveKL", {"target": 3.0, "horizon": 500}),
            ("CheckpointRollback", {"max_rollbacks": 1}),
        ]
    ]
    callbacks = used(monkeypatch)
    options = overlay(tmp_path, tiny_llama_dir, {"trainer": {"callbacks+": mine}})
    assert run_cli(monkeypatch, "fit", *options) == 0
    names = [type(callback).__name__ for callback in callbacks]
    assert names[: len(NAMES) + 1] == [*NAMES, "MaxKL"]
    assert callbacks[NAMES.index("AdaptiveKL")].target == 3.0
    assert callbacks[NAMES.index("CheckpointRollback")].max_rollbacks == 1
    said = caplog.text
    assert "`trainer.callbacks`: AdaptiveKL is there twice; the later one is used" in said
    assert "CheckpointRollback is there twice" in said
    assert "MaxKL is there twice" not in said


def test_the_gold_score_is_added_as_the_head_says(tiny_llama_dir, tmp_path, monkeypatch):
    lines = shipped_configs()["stable"].read_text(encoding="utf-8").splitlines()
    first = lines.index("#   trainer:")
    last = next(n for n in range(first, len(lines)) if lines[n] == "#")
    text = "\n".join(line.removeprefix("#   ") for line in lines[first:last])
    callbacks = used(monkeypatch)
    options = overlay(tmp_path, tiny_llama_dir, yaml.safe_load(text))
    assert run_cli(monkeypatch, "fit", *options) == 0
    names = [type(callback).__name__ for callback in callbacks]
    assert names[: len(NAMES) + 1] == [*NAMES, "GoldEarlyStopping"]
    assert "BestByGold" in names
    (metrics,) = (tmp_path / "run").rglob("metrics.jsonl")
    assert all(row.val_sampled.gold is not None for row in read_metrics(metrics))


def test_how_often_to_validate_is_left_to_the_config_below():
    stable = yaml.safe_load(shipped_configs()["stable"].read_text(encoding="utf-8"))
    assert list(stable["trainer"]) == ["callbacks+"]


def test_beta_does_not_fall_out_of_sight_while_the_kl_is_small():
    stable = yaml.safe_load(shipped_configs()["stable"].read_text(encoding="utf-8"))
    arguments = next(
        c["init_args"] for c in stable["trainer"]["callbacks+"] if c["class_path"][-2:] == "KL"
    )
    first = stable["model"]["init_args"]["kl"]["coef"]
    assert first / 4 < arguments["min_coef"] < first


def test_every_line_gives_its_reason():
    lines = shipped_configs()["stable"].read_text(encoding="utf-8").splitlines()
    body = lines[next(i for i, line in enumerate(lines) if line.startswith("trainer:")) :]
    for before, line in pairwise(body):
        if not line.rstrip().endswith(":"):
            assert "#" in line or "#" in before, line
