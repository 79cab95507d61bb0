"""The summary at the end of a run, with a tiny model."""

import json

import lightning.pytorch as pl
import pytest

from ppo_lightning.callbacks import BeforeAfter
from ppo_lightning.configs import ValidationConfig
from tests.helpers.runs import IdReward, data_module, fit, ppo_module, trainer

# Lightning warns of a folder that was written to before.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")

HELD_OUT = ["no", "the cat", "we saw a big tree"]


def summarised(tmp_path, policy, *, gold=None, validation=None, **options):
    module = ppo_module(
        policy, gold=gold, validation=validation or ValidationConfig(greedy=False, num_samples=2)
    )
    callbacks = options.pop("callbacks", [BeforeAfter()])
    fit(tmp_path, module, data_module(val_prompts=HELD_OUT), callbacks=callbacks, **options)
    return module


def test_the_end_of_fit_leaves_table_texts_and_cost(tiny_llama_dir, tmp_path, capsys):
    module = summarised(tmp_path, tiny_llama_dir, gold=IdReward())
    printed = capsys.readouterr().out
    assert "After 3 iterations; 3 prompts x 2 sampled answers" in printed
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    own = [answer for answer in module.answers if answer.writer == "policy"]
    mean = sum(answer.score for answer in own) / len(own)
    proxy = summary["changes"]["proxy reward"]
    assert proxy["after"] == pytest.approx(mean)
    assert proxy["gain"] == pytest.approx(proxy["after"] - proxy["before"])
    assert proxy["low"] <= proxy["gain"] <= proxy["high"]
    assert summary["changes"]["gold reward"] == proxy  # the judge is the proxy here
    assert summary["iterations"] == 3
    assert [row["prompt"] for row in summary["texts"]] == HELD_OUT
    assert all({"policy", "reference"} <= set(row) for row in summary["texts"])
    assert 0.05 < summary["memory_gib"] < 64
    assert summary["seconds"] > 0
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    table = [line for line in text.split("\n") if line.startswith("| proxy reward")]
    assert table == [line for line in printed.split("\n") if line.startswith("| proxy reward")]
    assert f"{proxy['after']:.3f}" in table[0]


def test_without_a_judge_and_with_greedy_answers_alone(tiny_gpt2_dir, tmp_path, capsys):
    greedy = ValidationConfig(greedy=True, num_samples=0, num_texts=1)
    summarised(tmp_path, tiny_gpt2_dir, validation=greedy)
    printed = capsys.readouterr().out
    assert "gold" not in printed
    assert "After 3 iterations; 3 prompts x 1 greedy answer" in printed
    assert len(json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["texts"]) == 1


def test_a_second_run_keeps_the_first_summary(tiny_llama_dir, tmp_path):
    for _ in range(2):
        summarised(tmp_path, tiny_llama_dir, max_epochs=1)
    assert (tmp_path / "summary.1.json").exists()
    assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(("every_n", "validated"), [(2, [1, 2]), (5, [2])])
def test_the_last_iteration_is_validated_for_it(
    tiny_llama_dir, tmp_path, capsys, every_n, validated
):
    done = []

    class Validations(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            done.append(trainer.current_epoch)

    ended = summarised(
        tmp_path,
        tiny_llama_dir,
        callbacks=[BeforeAfter(), Validations()],
        check_val_every_n_epoch=every_n,
    )
    assert done == validated
    assert "After 3 iterations" in capsys.readouterr().out
    assert ended.trainer.check_val_every_n_epoch == every_n  # as it was given


class StopAfter(pl.Callback):
    def __init__(self, iterations):
        self.iterations = iterations

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch + 1 >= self.iterations


def test_a_stopped_run_is_compared_as_it_was_last_validated(tiny_llama_dir, tmp_path, capsys):
    callbacks = [BeforeAfter(), StopAfter(3)]
    summarised(
        tmp_path, tiny_llama_dir, callbacks=callbacks, check_val_every_n_epoch=2, max_epochs=6
    )
    assert "After 2 iterations" in capsys.readouterr().out


def test_a_run_that_stopped_before_it_was_validated_says_what_is_missing(tiny_llama_dir, tmp_path):
    callbacks = [BeforeAfter(), StopAfter(1)]
    with pytest.warns(UserWarning, match=r"lower `trainer\.check_val_every_n_epoch`, which is 2"):
        summarised(tmp_path, tiny_llama_dir, callbacks=callbacks, check_val_every_n_epoch=2)
    assert not (tmp_path / "summary.json").exists()


def test_without_held_out_prompts_it_says_what_is_missing(tiny_llama_dir, tmp_path, capsys):
    module = ppo_module(tiny_llama_dir)
    with pytest.warns(UserWarning, match=r"Give some as `data\.init_args\.val_prompts`"):
        fit(tmp_path, module, data_module(), callbacks=[BeforeAfter()], max_epochs=1)
    assert "After" not in capsys.readouterr().out
    assert not (tmp_path / "summary.json").exists()


def test_an_exception_leaves_the_trainer_as_it_was(tiny_llama_dir, tmp_path):
    class Breaks(pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            raise RuntimeError("broken")

    run = trainer(
        tmp_path, callbacks=[BeforeAfter(), Breaks()], check_val_every_n_epoch=4, max_epochs=1
    )
    with pytest.raises(RuntimeError, match="broken"):
        run.fit(ppo_module(tiny_llama_dir), data_module(val_prompts=HELD_OUT))
    assert run.check_val_every_n_epoch == 4


def test_a_trial_run_prints_and_writes_nothing(tiny_llama_dir, tmp_path, capsys):
    summarised(tmp_path, tiny_llama_dir, fast_dev_run=True, max_epochs=None)
    assert "After 1 iterations" in capsys.readouterr().out
    assert not (tmp_path / "summary.json").exists()
