"""The model that a run leaves behind, and when it leaves none."""

import json
import os
import shutil
import signal

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_lightning.callbacks import ActorEMA, ExportModel
from ppo_lightning.configs import LoraConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import load_causal_lm, local_path
from ppo_lightning.models.card import read_card, was_changed, weights_fingerprint
from ppo_lightning.modules.export_model import export_callback
from tests.helpers.cli import changed, run_cli, tiny_config, write_config
from tests.helpers.runs import data_module, fit, ppo_module, trainer
from tests.helpers.sft_runs import fit_sft, sft_data, sft_module

VARIANTS = {"full": {}, "lora": {"policy": {"lora": LoraConfig(rank=4)}}}
LORA = {"policy": {"lora": LoraConfig(rank=4)}}

UNGIVEN = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


def actor_weights(module):
    """Of the actor as one plain model, adapters merged."""
    return {n: w.clone() for n, w in module.export_network.state_dict().items()}


def written(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_trained_actor_is_left_as_a_plain_folder(tiny_llama_dir, tmp_path, variant):
    module = ppo_module(tiny_llama_dir, **VARIANTS[variant])
    fit(tmp_path, module, data_module(), callbacks=[ExportModel()], max_epochs=1)
    found = written(tmp_path / "model")
    start = load_causal_lm(module.policy).state_dict()
    assert any(not torch.equal(found[name], start[name]) for name in start)
    if variant == "full":
        assert_close(found, actor_weights(module), rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == module.tokenizer.chat_template
    assert local_path(str(tmp_path)) == str(tmp_path / "model")
    assert not list(tmp_path.glob(".model*"))


def test_the_card_says_what_it_is_and_what_it_was_made_from(tiny_llama_dir, tmp_path):
    module = ppo_module(tiny_llama_dir)
    module.export_settings = lambda: {"answer": 42}
    fit(tmp_path / "a", module, data_module(), callbacks=[ExportModel()], max_epochs=1)
    card = read_card(str(tmp_path / "a"))
    assert card.kind == "ppo"
    assert card.settings == {"answer": 42}
    assert card.fingerprint == weights_fingerprint(str(tmp_path / "a" / "model"))
    (origin,) = card.made_from
    assert origin.path == str(tiny_llama_dir)
    assert origin.kind == ""
    assert origin.fingerprint == weights_fingerprint(str(tiny_llama_dir)) != card.fingerprint
    assert not was_changed(str(tmp_path / "a"))

    module = ppo_module(tmp_path / "a")
    fit(tmp_path / "b", module, data_module(), callbacks=[ExportModel()], max_epochs=1)
    second = read_card(str(tmp_path / "b"))
    assert [model.fingerprint for model in second.made_from] == [
        card.fingerprint,
        origin.fingerprint,
    ]
    assert second.made_from[0].kind == "ppo"


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_names_the_origin_that_it_began_with(tiny_llama_dir, tmp_path):
    """Weights that are all trained come from the checkpoint, whatever the path holds by then."""
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(tiny_llama_dir, base)
    began = weights_fingerprint(str(base))
    fit_sft(run, sft_module(base), sft_data(), max_epochs=1)
    shutil.rmtree(base)
    shutil.copytree(run / "model", base)
    last, again = run / "checkpoints" / "last.ckpt", tmp_path / "again"
    with pytest.warns(UserWarning, match="other weights now than when this run began"):
        fit_sft(again, sft_module(base), sft_data(), max_epochs=2, ckpt=last)
    assert read_card(str(again)).made_from[0].fingerprint == began


class Metric(pl.Callback):
    """Logs a number of its own at the end of each iteration, and keeps the weights of all."""

    def __init__(self, values):
        self.values, self.weights = values, []

    def on_train_epoch_end(self, trainer, pl_module):
        value = self.values[trainer.current_epoch]
        trainer.callback_metrics["mine"] = torch.tensor(value)
        self.weights.append(actor_weights(pl_module))


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("max", [1.0, 3.0, 2.0], 1),
        ("min", [2.0, 1.0, 1.0], 1),
        ("max", [float("nan"), 1.0, float("inf")], 1),
        ("max", [float("nan")] * 3, 2),
    ],
)
def test_the_best_epoch_is_written_where_a_metric_is_watched(
    tiny_gpt2_dir, tmp_path, mode, values, best
):
    module, metric = ppo_module(tiny_gpt2_dir), Metric(values)
    callbacks = [metric, ExportModel(monitor="mine", mode=mode)]
    if all(value != value for value in values):
        with pytest.warns(UserWarning, match="no finite `mine`"):
            fit(tmp_path, module, data_module(), callbacks=callbacks)
    else:
        fit(tmp_path, module, data_module(), callbacks=callbacks)
    found = written(tmp_path / "model")
    for epoch, weights in enumerate(metric.weights):
        same = all(torch.equal(found[name], weights[name]) for name in found)
        assert same is (epoch == best)
    # The module goes on with its own weights.
    assert_close(actor_weights(module), metric.weights[-1], rtol=0, atol=0)


@UNGIVEN
def test_a_resumed_run_knows_the_best_weights_of_before(tiny_gpt2_dir, tmp_path):
    first, metric = ppo_module(tiny_gpt2_dir), Metric([3.0, 1.0, 2.0])
    watch, before, after = {"monitor": "mine", "mode": "max"}, tmp_path / "a", tmp_path / "b"
    fit(before, first, data_module(), callbacks=[metric, ExportModel(**watch)], max_epochs=2)
    shutil.copytree(before / "model", after / "model")  # the same run's, from before it went on
    fit(
        after,
        ppo_module(tiny_gpt2_dir),
        data_module(),
        callbacks=[Metric([3.0, 1.0, 2.0]), ExportModel(**watch)],
        ckpt=before / "checkpoints" / "epoch=1.ckpt",
        enable_checkpointing=False,
    )
    found = written(after / "model")
    assert all(torch.equal(found[name], metric.weights[0][name]) for name in found)
    assert [place.name for place in after.glob("*model*")] == ["model"]


class HeldOut(pl.Callback):
    """A number of each validation, and the weights that were validated."""

    def __init__(self, *values):
        self.values, self.weights = list(values), []

    def on_validation_epoch_end(self, trainer, pl_module):
        trainer.callback_metrics["val/mine"] = torch.tensor(self.values.pop(0))
        self.weights.append(actor_weights(pl_module))


def test_the_number_of_a_validation_is_not_taken_for_a_later_epochs(tiny_gpt2_dir, tmp_path):
    """The second validation is the best; the epoch after it shows its number still."""
    module, held_out = ppo_module(tiny_gpt2_dir), HeldOut(1.0, 2.0)
    callbacks = [held_out, ExportModel(monitor="val/mine", mode="max")]
    data = data_module(val_prompts=["no"])
    often = {"max_epochs": 5, "check_val_every_n_epoch": 2, "enable_checkpointing": False}
    fit(tmp_path, module, data, callbacks=callbacks, **often)
    found = written(tmp_path / "model")
    assert len(held_out.weights) == 2
    assert all(torch.equal(found[name], held_out.weights[1][name]) for name in found)


@UNGIVEN
def test_a_complete_run_that_is_resumed_has_only_the_model_to_write(tiny_gpt2_dir, tmp_path):
    module = ppo_module(tiny_gpt2_dir)
    fit(tmp_path / "a", module, data_module(), max_epochs=1)
    assert not (tmp_path / "a" / "model").exists()
    fit(
        tmp_path / "b",
        ppo_module(tiny_gpt2_dir),
        data_module(),
        callbacks=[ExportModel()],
        ckpt=tmp_path / "a" / "checkpoints" / "last.ckpt",
        max_epochs=1,
        enable_checkpointing=False,
    )
    found, trained = written(tmp_path / "b" / "model"), actor_weights(module)
    assert all(torch.equal(found[name], trained[name]) for name in found)


class Stopped(pl.Callback):
    """Is told to end in the second iteration."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_sigterm_stops_leaves_no_model(tiny_gpt2_dir, tmp_path):
    callbacks = [ExportModel(), Stopped()]
    with pytest.raises(SIGTERMException):
        fit(tmp_path, ppo_module(tiny_gpt2_dir), data_module(), callbacks=callbacks)
    assert not list(tmp_path.glob("*model*"))
    with pytest.raises(ModelError, match=r"ppo-lightning export .*last\.ckpt"):
        local_path(str(tmp_path))


def test_what_was_validated_is_what_is_written(tiny_gpt2_dir, tmp_path):
    """The average, where it answers the held-out prompts; the actor keeps its own weights."""
    module, ema = ppo_module(tiny_gpt2_dir, **LORA), ActorEMA(decay=0.9)
    fit(tmp_path, module, data_module(), callbacks=[ema, ExportModel()], max_epochs=2)
    own = actor_weights(module)
    average = ema.state_dict()["weights"]
    module.export_network.load_state_dict(average, strict=False)
    module.export(tmp_path / "as average")
    assert weights_fingerprint(str(tmp_path / "as average")) == weights_fingerprint(str(tmp_path))
    module.export_network.load_state_dict(own)
    unseen = ActorEMA(decay=0.9, validate=False)
    fit(
        tmp_path / "b",
        ppo_module(tiny_gpt2_dir, **LORA),
        data_module(),
        callbacks=[unseen, ExportModel()],
        max_epochs=2,
    )
    module.trainer.callbacks.remove(ema)
    module.export(tmp_path / "as actor")
    last = weights_fingerprint(str(tmp_path / "b"))
    assert weights_fingerprint(str(tmp_path / "as actor")) == last
    assert last != weights_fingerprint(str(tmp_path))


class Dies(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        raise RuntimeError("power cut")


def test_a_run_that_fails_leaves_no_model(tiny_gpt2_dir, tmp_path):
    with pytest.raises(RuntimeError, match="power cut"):
        fit(tmp_path, ppo_module(tiny_gpt2_dir), data_module(), callbacks=[ExportModel(), Dies()])
    assert not list(tmp_path.glob("*model*"))


def test_a_failure_while_writing_leaves_the_earlier_model(tiny_gpt2_dir, tmp_path, monkeypatch):
    short = {"max_epochs": 1, "enable_checkpointing": False}
    fit(tmp_path, ppo_module(tiny_gpt2_dir), data_module(), callbacks=[ExportModel()], **short)
    before = weights_fingerprint(str(tmp_path))

    def full_disk(folder, card):
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr("ppo_lightning.modules.export_model.write_card", full_disk)
    module = ppo_module(tiny_gpt2_dir)
    with pytest.raises(OSError, match="No space left"):
        fit(tmp_path, module, data_module(seed=5), callbacks=[ExportModel()], **short)
    assert weights_fingerprint(str(tmp_path)) == before
    assert [place.name for place in tmp_path.glob("*model*")] == ["model"]


def test_what_a_killed_write_left_behind_is_cleared_away(tiny_gpt2_dir, tmp_path):
    """Killed between two renames, the run's own earlier model lies under its hidden name."""
    for name in (".model.0a.new", ".model.0b.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"large")
    options = {"max_epochs": 1, "enable_checkpointing": False}
    fit(tmp_path, ppo_module(tiny_gpt2_dir), data_module(), callbacks=[ExportModel()], **options)
    assert [place.name for place in tmp_path.glob("*model*")] == ["model"]


def test_an_earlier_runs_model_is_kept_under_another_name(tiny_gpt2_dir, tmp_path):
    for seed in (3, 4):
        fit(
            tmp_path,
            ppo_module(tiny_gpt2_dir),
            data_module(seed=seed),
            callbacks=[ExportModel(every_n_epochs=1)],
            enable_checkpointing=False,
        )
    assert sorted(place.name for place in tmp_path.glob("*model*")) == ["model", "model.1"]
    own, earlier = (weights_fingerprint(str(tmp_path / name)) for name in ("model", "model.1"))
    assert own != earlier


def test_a_module_adds_one_where_the_user_gave_none(tmp_path):
    assert export_callback(trainer(tmp_path, callbacks=[ExportModel()])) == []
    assert [type(added) for added in export_callback(trainer(tmp_path))] == [ExportModel]


def test_a_trial_run_writes_nothing(tiny_gpt2_dir, tmp_path):
    fit(
        tmp_path,
        ppo_module(tiny_gpt2_dir),
        data_module(),
        callbacks=[ExportModel()],
        fast_dev_run=True,
    )
    assert not (tmp_path / "model").exists()


def test_changed_weights_are_noticed(tiny_gpt2_dir, tmp_path):
    callbacks = [ExportModel()]
    fit(tmp_path, ppo_module(tiny_gpt2_dir), data_module(), callbacks=callbacks, max_epochs=1)
    card = json.loads((tmp_path / "model" / "ppo_lightning.json").read_text())
    (tmp_path / "model" / "ppo_lightning.json").write_text(json.dumps(card | {"fingerprint": "0"}))
    assert was_changed(str(tmp_path))
    with pytest.warns(UserWarning, match="its weights were changed after `ppo_lightning.json`"):
        fit(
            tmp_path / "next",
            ppo_module(tmp_path),
            data_module(),
            callbacks=[ExportModel()],
            max_epochs=1,
        )


def test_on_the_command_line_a_run_is_the_next_commands_model(
    tiny_llama_dir, tmp_path, monkeypatch, capsys
):
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    config = changed(config, "trainer.max_epochs", 1)
    callbacks = [{"class_path": "ppo_lightning.callbacks.ExportModel"}]
    config = changed(config, "trainer.callbacks", callbacks)
    path = write_config(tmp_path / "c.yaml", config)
    assert run_cli(monkeypatch, "fit", "--config", path) == 0
    capsys.readouterr()
    asked = ["--prompt", "hello", "--max-new-tokens", "4", "--device", "cpu"]
    assert run_cli(monkeypatch, "sample", tmp_path / "run", *asked) == 0
    said = capsys.readouterr()
    assert "prompt: hello" in said.out
    assert "is a run's folder: its model is" in said.err
    wrong = changed(config, "trainer.callbacks.0.init_args", {"monitor": "val/no_such"})
    assert run_cli(monkeypatch, "fit", "--config", write_config(path, wrong)) == 2
    assert "ExportModel watches `monitor: val/no_such`" in capsys.readouterr().err
