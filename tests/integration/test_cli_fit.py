"""The command line from config to files: everything in this process, with tiny models."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger

from ppo_lightning.io import read_jsonl
from ppo_lightning.metrics import read_metrics
from tests.helpers.cli import changed, run_cli, tiny_config, write_config

ARGS = "model.init_args"

# What Lightning says of a folder that was written to before is meant for people, not for a test.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


@pytest.fixture
def config(tiny_llama_dir, tmp_path):
    return tiny_config(tiny_llama_dir, tmp_path / "run")


def run(monkeypatch, tmp_path, command, config, *arguments):
    path = write_config(tmp_path / "c.yaml", config)
    return run_cli(monkeypatch, command, "--config", path, *arguments)


def newest(folder: Path) -> Path:
    """Folder of the last run with TensorBoard's default."""
    versions = (folder / "lightning_logs").iterdir()
    return max(versions, key=lambda path: int(path.name.removeprefix("version_")))


def lines(path):
    return [record for _, record in read_jsonl(path)]


def test_fit_leaves_config_metrics_samples_and_checkpoints(monkeypatch, tmp_path, config, capsys):
    assert run(monkeypatch, tmp_path, "fit", config) == 0
    folder = newest(tmp_path / "run")
    assert [stats.iteration for stats in read_metrics(folder / "metrics.jsonl")] == [0, 1]
    saved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert saved["model"]["class_path"] == "ppo_lightning.PPOModule"
    assert saved["model"]["init_args"]["actor"]["lr"] == 1e-3
    assert saved["seed_everything"] == 1
    assert sorted(path.name for path in (folder / "samples").iterdir()) == [
        "iteration_0000.jsonl",
        "iteration_0001.jsonl",
    ]
    [first, *_] = lines(folder / "samples/iteration_0001.jsonl")
    assert {"policy", "reference", "policy_score", "policy_kl_ref"} <= set(first)
    assert (folder / "checkpoints/last.ckpt").is_file()
    assert list(folder.glob("events.out.tfevents.*"))
    assert "iteration 2/2: score " in capsys.readouterr().err


def test_the_saved_config_repeats_the_run(monkeypatch, tmp_path, config):
    assert run(monkeypatch, tmp_path, "fit", config) == 0
    first = newest(tmp_path / "run")
    assert run_cli(monkeypatch, "fit", "--config", first / "config.yaml") == 0
    second = newest(tmp_path / "run")
    assert second != first
    scores = [[s.score_mean for s in read_metrics(f / "metrics.jsonl")] for f in (first, second)]
    assert scores[0] == scores[1]


def test_t02_a_config_in_the_folder_is_kept_and_the_run_goes_on(monkeypatch, tmp_path, config):
    config = changed(config, "trainer.logger", False)
    folder = tmp_path / "run"
    for lr in (1e-3, 2e-3):
        assert run(monkeypatch, tmp_path, "fit", changed(config, f"{ARGS}.actor.lr", lr)) == 0
    longer = changed(config, "trainer.max_epochs", 3)
    [checkpoint] = folder.glob("checkpoints/last.ckpt")
    assert run(monkeypatch, tmp_path, "fit", longer, "--ckpt_path", checkpoint) == 0
    rates = [
        yaml.safe_load((folder / name).read_text(encoding="utf-8"))["model"]["init_args"]["actor"][
            "lr"
        ]
        for name in ("config.1.yaml", "config.2.yaml", "config.yaml")
    ]
    assert rates == [1e-3, 2e-3, 1e-3]
    # A new run puts the file of an earlier one aside; a resumed run goes on in it.
    assert [s.iteration for s in read_metrics(folder / "metrics.1.jsonl")] == [0, 1]
    assert [s.iteration for s in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--trainer.gradient_clip_val=1.0", "model.init_args.actor.max_grad_norm"),
        ("--trainer.accumulate_grad_batches=4", "model.init_args.ppo.microbatch_tokens"),
        ("--trainer.max_steps=3", "trainer.max_epochs"),
    ],
)
def test_t43_flags_that_do_not_fit_are_refused_before_models_load(
    monkeypatch, tmp_path, config, capsys, option, setting
):
    def no_loading(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("ppo_lightning.modules.ppo.build_actor_critic", no_loading)
    assert run(monkeypatch, tmp_path, "fit", config, option) == 2
    text = capsys.readouterr().err
    assert option.split("=")[0].removeprefix("--") in text
    assert setting in text


def parsed(monkeypatch, tmp_path, capsys, config, *arguments):
    capsys.readouterr()
    assert run(monkeypatch, tmp_path, "fit", config, *arguments, "--print_config") == 0
    return yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]


def test_t01_numbers_with_exponents_are_numbers_everywhere(monkeypatch, tmp_path, config, capsys):
    text = yaml.safe_dump(config).replace("lr: 0.001", "lr: 1e-6").replace("lr: 0.003", "lr: 5e-06")
    arguments = "optimizer: {options: {foreach: 1e-6, nested: [5e-06, {x: 1E+3}]}}"
    text = text.replace("    policy:", f"    {arguments}\n    policy:")
    reward = """\
    gold:
      class_path: ppo_lightning.rewards.FunctionReward
      init_args: {function: "builtins:len", arguments: {scale: 1e-6}}
"""
    text = text.replace("    guards:", f"{reward}    guards:")
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    assert run_cli(monkeypatch, "fit", "--config", path, "--print_config") == 0
    found = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]
    assert found["actor"]["lr"] == 1e-6
    assert found["critic"]["lr"] == 5e-6
    assert found["optimizer"]["options"] == {"foreach": 1e-6, "nested": [5e-6, {"x": 1e3}]}
    assert found["gold"]["init_args"]["arguments"] == {"scale": 1e-6}


def test_t01_numbers_on_the_command_line(monkeypatch, tmp_path, config, capsys):
    options = ["--model.actor.lr=1e-6", "--model.optimizer.options={foreach: 5e-06}"]
    found = parsed(monkeypatch, tmp_path, capsys, config, *options)
    assert found["actor"]["lr"] == 1e-6
    assert found["optimizer"]["options"] == {"foreach": 5e-6}


def test_print_config_and_help_load_no_weights(monkeypatch, tmp_path, config, capsys):
    config = changed(config, f"{ARGS}.policy.path", "no/such/folder")
    assert parsed(monkeypatch, tmp_path, capsys, config)["policy"]["path"] == "no/such/folder"
    assert run_cli(monkeypatch, "fit", "--help") == 0
    assert "PPO_LIGHTNING_FIT__TRAINER__MAX_EPOCHS" in capsys.readouterr().out


def test_environment_variables_are_settings(monkeypatch, tmp_path, config, capsys):
    monkeypatch.setenv("PPO_LIGHTNING_FIT__TRAINER__MAX_EPOCHS", "7")
    config = changed(config, "trainer.max_epochs", ...)
    path = write_config(tmp_path / "c.yaml", config)
    assert run_cli(monkeypatch, "fit", "--config", path, "--print_config") == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_epochs"] == 7


def test_validate_test_and_predict_answer_held_out_prompts(monkeypatch, tmp_path, config, capsys):
    for command in ("validate", "test"):
        assert run(monkeypatch, tmp_path, command, config) == 0
        table = capsys.readouterr().out
        assert "greedy" in table.splitlines()[0]
        assert any(line.startswith("score ") for line in table.splitlines())
        samples = newest(tmp_path / "run") / f"samples/{command}.jsonl"
        assert [row["number"] for row in lines(samples)] == [0, 0, 1, 1]
    assert run(monkeypatch, tmp_path, "predict", config) == 0
    records = lines(newest(tmp_path / "run") / "predictions.jsonl")
    assert [(r["number"], r["mode"]) for r in records] == [
        (0, "greedy"),
        (0, "sampled"),
        (1, "greedy"),
        (1, "sampled"),
    ]
    first = records[0]
    assert first["prompt"] == "hello"
    assert first["rewards"] == {"length": first["score"]}
    assert abs(first["kl_ref"]) < 1e-4  # nothing was trained
    assert first["num_tokens"] <= 4


def test_predictions_without_held_out_prompts_name_the_setting(
    monkeypatch, tmp_path, config, capsys
):
    config = changed(config, "data.init_args.val_prompts", ...)
    assert run(monkeypatch, tmp_path, "predict", config) == 2
    text = capsys.readouterr().err
    assert "`predict` answers held-out prompts: set `data.init_args.val_prompts`" in text


def test_callbacks_of_the_config_take_the_place_of_defaults(monkeypatch, tmp_path, config):
    callbacks = [
        {"class_path": "ppo_lightning.callbacks.MetricsFile", "init_args": {"filename": "m.jsonl"}},
        {"class_path": "lightning.pytorch.callbacks.TQDMProgressBar"},
    ]
    config = changed(config, "trainer.callbacks", callbacks)
    assert run(monkeypatch, tmp_path, "fit", config) == 0
    folder = newest(tmp_path / "run")
    assert (folder / "m.jsonl").exists()
    assert not (folder / "metrics.jsonl").exists()


def test_fast_dev_run_and_no_logger_write_no_metrics(monkeypatch, tmp_path, config):
    assert run(monkeypatch, tmp_path, "fit", config, "--trainer.fast_dev_run=true") == 0
    assert not list((tmp_path / "run").rglob("*.jsonl"))


def test_a_reward_that_fails_ends_with_its_name(monkeypatch, tmp_path, config, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text("def score(responses):\n    return [1.0]\n", encoding="utf-8")
    component = {
        "class_path": "ppo_lightning.rewards.FunctionReward",
        "init_args": {"function": f"{broken}:score"},
    }
    config = changed(config, f"{ARGS}.rewards.0.component", component)
    assert run(monkeypatch, tmp_path, "fit", config) == 2
    assert "ppo-lightning: reward `length`" in capsys.readouterr().err


def test_side_by_side_texts_go_to_tensorboard(monkeypatch, tmp_path, config):
    shown = []
    monkeypatch.setattr(
        TensorBoardLogger,
        "experiment",
        property(lambda self: Writer(shown)),
    )
    assert run(monkeypatch, tmp_path, "fit", config) == 0
    assert [(tag, step) for tag, text, step in shown] == [("samples", 0), ("samples", 1)]
    assert "| hello |" in shown[0][1]


class Writer:
    """Stands for TensorBoard's writer and keeps the texts."""

    def __init__(self, shown):
        self.shown = shown

    def add_text(self, tag, text, global_step):
        self.shown.append((tag, text, global_step))

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


# ---------------------------------------------------------------------- export and sample


KINDS = {
    "full": {},
    "lora": {f"{ARGS}.policy.lora": {"rank": 2}},
    "shared": {f"{ARGS}.critic_model": {"kind": "shared"}},
}


@pytest.fixture(scope="module")
def checkpoints(tiny_llama_dir, tmp_path_factory):
    """By kind of run: its last checkpoint, which no test changes."""

    @cache
    def made(kind):
        folder = tmp_path_factory.mktemp(kind)
        config = tiny_config(tiny_llama_dir, folder / "run")
        for key, value in KINDS[kind].items():
            config = changed(config, key, value)
        with pytest.MonkeyPatch.context() as patch:
            assert run(patch, folder, "fit", config) == 0
        return newest(folder / "run") / "checkpoints/last.ckpt"

    return made


@pytest.fixture(params=list(KINDS))
def trained(request, checkpoints):
    """A checkpoint of each kind of run."""
    return checkpoints(request.param)


@pytest.fixture
def checkpoint(checkpoints):
    return checkpoints("full")


def test_exported_actor_and_critic_equal_those_of_the_run(monkeypatch, tmp_path, trained):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from ppo_lightning.checkpointing import load_actor, load_critic, read_models
    from ppo_lightning.models import ModelInputs

    models = read_models(trained)
    actor = load_actor(models)
    critic = load_critic(models, actor)
    ids = torch.tensor([[5, 9, 7, 11], [8, 6, 12, 10]])
    mask, places = torch.ones_like(ids), torch.arange(4).expand(2, 4)
    assert run_cli(monkeypatch, "export", trained, tmp_path / "actor") == 0
    assert run_cli(monkeypatch, "export", trained, tmp_path / "critic", "--critic") == 0
    with torch.no_grad():
        wanted = actor(input_ids=ids, attention_mask=mask).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")(ids).logits
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        values = critic.all_values(ModelInputs(ids, mask, places))[:, -1]
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
        scores = classifier(input_ids=ids, attention_mask=mask).logits[:, 0]
        torch.testing.assert_close(scores, values, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "actor")
    assert tokenizer("the cat")["input_ids"]
    # Trained: neither the head's zeros nor the starting weights.
    assert values.abs().max() > 0
    start = AutoModelForCausalLM.from_pretrained(models.policy.path)(ids).logits
    assert (start - wanted).abs().max() > 1e-3


def test_samples_of_checkpoint_and_export_agree(monkeypatch, tmp_path, trained, capsys):
    assert run_cli(monkeypatch, "export", trained, tmp_path / "actor") == 0
    options = ["--prompt", "the cat", "--prompt", "no", "--json", "--max-new-tokens", "5"]
    capsys.readouterr()
    found = {}
    for name, model, more in (
        ("ckpt", trained, ["--reference"]),
        ("export", tmp_path / "actor", ["--chat", "false"]),  # which a checkpoint knows
        ("chat", trained, ["--chat", "auto"]),
        ("again", trained, ["--seed", "1"]),
        ("greedy", trained, ["--greedy", "--seed", "5"]),
        ("greedy again", trained, ["--greedy", "--seed", "6"]),
    ):
        assert run_cli(monkeypatch, "sample", model, *options, *more) == 0
        found[name] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in found["ckpt"]] == ["the cat", "no"]
    texts = {name: [row["policy"] for row in rows] for name, rows in found.items()}
    assert texts["ckpt"] == texts["export"] != texts["again"]
    assert texts["ckpt"] != texts["chat"]
    assert texts["greedy"] == texts["greedy again"]
    assert all("reference" in row for row in found["ckpt"])


def test_export_refuses_what_it_must_not_replace(monkeypatch, tmp_path, checkpoint, capsys):
    target = tmp_path / "out"
    target.mkdir()
    (target / "diary.txt").write_text("mine", encoding="utf-8")
    assert run_cli(monkeypatch, "export", checkpoint, target) == 2
    assert "is not empty" in capsys.readouterr().err
    assert run_cli(monkeypatch, "export", checkpoint, target, "--overwrite") == 2
    assert "holds no model" in capsys.readouterr().err
    assert (target / "diary.txt").read_text(encoding="utf-8") == "mine"
    (target / "config.json").write_text("{}", encoding="utf-8")
    assert run_cli(monkeypatch, "export", checkpoint, target, "--overwrite") == 0
    assert (target / "model.safetensors").is_file()
    assert not (target / "diary.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_export_leaves_the_earlier_model(monkeypatch, tmp_path, checkpoint):
    target = tmp_path / "out"
    assert run_cli(monkeypatch, "export", checkpoint, target) == 0
    before = (target / "model.safetensors").read_bytes()

    def broken(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("ppo_lightning.checkpointing.export.save_model", broken)
    with pytest.raises(OSError, match="disk full"):
        run_cli(monkeypatch, "export", checkpoint, target, "--overwrite")
    assert (target / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_has_no_reference_of_its_own(monkeypatch, tiny_llama_dir, capsys):
    arguments = ["sample", tiny_llama_dir, "--prompt", "no", "--reference"]
    assert run_cli(monkeypatch, *arguments) == 2
    assert "--reference MODEL" in capsys.readouterr().err
    assert run_cli(monkeypatch, *arguments, tiny_llama_dir) == 0
    policy, reference = capsys.readouterr().out.split("\n")[1:3]
    assert policy.removeprefix("policy") == reference.removeprefix("reference")


def test_the_frozen_weights_must_be_those_of_the_run(monkeypatch, tmp_path, checkpoints, capsys):
    from tests.helpers.tiny_models import build_llama

    other = build_llama(tmp_path / "other", initializer_range=0.1)
    arguments = ["export", checkpoints("lora"), tmp_path / "out", "--policy-path", other]
    assert run_cli(monkeypatch, *arguments) == 2
    assert "differ from those" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["missing", "text", "foreign"])
def test_files_that_are_no_checkpoint(monkeypatch, tmp_path, capsys, content):
    path = tmp_path / "x.ckpt"
    if content == "text":
        path.write_text("hello", encoding="utf-8")
    elif content == "foreign":
        torch.save({"state_dict": {}}, path)
    assert run_cli(monkeypatch, "export", path, tmp_path / "out") == 2
    message = {
        "missing": "does not exist",
        "text": "x.ckpt` cannot be read (it is no file that `torch.save` has written, or is cut",
        "foreign": "was not written by a module of ppo-lightning",
    }[content]
    assert message in capsys.readouterr().err


def test_another_architecture_is_no_starting_model(
    monkeypatch, tmp_path, checkpoint, tiny_gpt2_dir, capsys
):
    arguments = ["sample", checkpoint, "--prompt", "no", "--policy-path", tiny_gpt2_dir]
    assert run_cli(monkeypatch, *arguments) == 2
    text = capsys.readouterr().err.strip()
    assert len(text.splitlines()) == 1
    assert f"`{checkpoint}` does not fit `{tiny_gpt2_dir}`: `" in text
    assert "`--policy-path`" in text


def test_a_file_is_no_folder_to_export_to(monkeypatch, tmp_path, checkpoint, capsys):
    target = tmp_path / "c.yaml"
    target.touch()
    for path, said in ((target, "is a file."), (target / "x", "File exists")):
        assert run_cli(monkeypatch, "export", checkpoint, path) == 2
        assert f"`{target}`" in (text := capsys.readouterr().err)
        assert said in text
