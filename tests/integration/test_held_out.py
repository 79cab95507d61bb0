"""Held-out prompts through Lightning's own calls."""

import itertools

import lightning.pytorch as pl
import pytest

from ppo_lightning.modules import Answer
from tests.helpers.runs import Recorder, data_module, fit, ppo_module, trainer


def test_predict_returns_answers_to_python_users(tiny_model_dir, tmp_path):
    module = ppo_module(tiny_model_dir)
    data = data_module(val_prompts=["the cat", "hello you"])
    (answers,) = trainer(tmp_path).predict(module, data)
    assert all(isinstance(answer, Answer) for answer in answers)
    assert [answer.mode for answer in answers] == ["greedy", "greedy", "sampled", "sampled"]


def test_reference_answers_belong_to_the_prompts_at_hand(tiny_llama_dir, tmp_path):
    """They are made once for each prompt, and not taken from other prompts' batch."""
    module = ppo_module(tiny_llama_dir)
    fit(tmp_path, module, data_module(val_prompts=["the cat"]), max_epochs=1)
    recorder = Recorder()
    trainer(tmp_path, callbacks=[recorder]).test(
        module, data_module(val_prompts=["who are you"]), verbose=False
    )
    assert {answer.prompt for answer in recorder.answers[-1]} == {"who are you"}


def test_reference_answers_are_made_once(tiny_llama_dir, tmp_path, monkeypatch):
    module = ppo_module(tiny_llama_dir)
    module.configure_model()
    calls = []
    lend = module.reference.causal_lm
    monkeypatch.setattr(module.reference, "causal_lm", lambda: calls.append(1) or lend())
    lent = []

    class Count(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            lent.append(len(calls))

    fit(
        tmp_path,
        module,
        data_module(val_prompts=["the cat"]),
        max_epochs=3,
        callbacks=[Count()],
        enable_checkpointing=False,
    )
    grown = [later - earlier for earlier, later in itertools.pairwise(lent)]
    assert lent[0] > grown[0] == grown[1]


@pytest.mark.filterwarnings("ignore:`.*score.*")
def test_a_metric_that_was_not_measured_leaves_no_older_value_to_act_on(tiny_llama_dir, tmp_path):
    from ppo_lightning.modules.reporting import log_iteration

    holder = trainer(tmp_path)
    log_iteration(holder, {"rollout/score_mean": 1.0, "update/kl_old": 0.1}, iteration=0)
    holder.callback_metrics["val/greedy/score"] = 3.0
    log_iteration(holder, {"update/kl_old": 0.2}, iteration=1)
    assert set(holder.callback_metrics) == {"update/kl_old", "val/greedy/score"}
    assert float(holder.callback_metrics["update/kl_old"]) == pytest.approx(0.2)
