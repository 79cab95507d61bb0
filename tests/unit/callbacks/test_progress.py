from types import SimpleNamespace

import torch

from ppo_lightning.callbacks import StageProgress
from ppo_lightning.callbacks.progress import result_parts
from ppo_lightning.metrics import AnswerStats, IterationStats

TRAINER = SimpleNamespace(
    current_epoch=2, max_epochs=12, num_training_batches=4, state=SimpleNamespace(fn="fit")
)
STATS = IterationStats(
    iteration=2,
    score_mean=0.5125,
    kl_ref=1.25,
    response_length_mean=20.0,
    rollout_tokens_per_second=310.4,
    iteration_seconds=12.34,
    val_greedy=AnswerStats(score=0.25, gold=0.75),
)


def test_result_has_score_and_kl_first():
    assert result_parts(STATS) == [
        "score 0.512",
        "KL 1.25",
        "length 20",
        "held-out score 0.25 (gold 0.75)",
        "310 tokens/s",
        "12.3 s",
    ]
    assert result_parts(IterationStats(iteration=0)) == []


def test_without_a_terminal_each_iteration_is_one_line(capsys):
    progress = StageProgress()
    progress.on_train_epoch_start(TRAINER, None)
    progress.on_stage_start(TRAINER, None, "rollout")
    progress.on_train_batch_end(TRAINER, None, None, None, 0)
    assert capsys.readouterr().err == ""
    progress.on_iteration_end(TRAINER, None, STATS)
    text = capsys.readouterr().err
    assert text.startswith("iteration 3/12: score 0.512, KL 1.25")
    assert text.count("\n") == 1


def test_an_endless_run_has_no_last_iteration(capsys):
    progress = StageProgress()
    endless = SimpleNamespace(**{**vars(TRAINER), "max_epochs": -1})
    progress.on_iteration_end(endless, None, STATS)
    assert capsys.readouterr().err.startswith("iteration 3: ")


def test_other_ranks_are_silent(capsys):
    progress = StageProgress(live=True)
    progress.disable()
    progress.on_train_epoch_start(TRAINER, None)
    progress.on_stage_start(TRAINER, None, "rollout")
    progress.on_iteration_end(TRAINER, None, STATS)
    assert capsys.readouterr().err == ""


def test_the_bar_names_stage_and_fresh_buffer(capsys):
    progress = StageProgress(live=True)
    progress.on_train_epoch_start(TRAINER, None)
    progress.on_stage_start(TRAINER, None, "rollout")
    assert "iteration 3/12 rollout" in capsys.readouterr().err
    progress.on_stage_end(TRAINER, None, "rollout")
    sequences = SimpleNamespace(response_mask=torch.ones(2, 3, dtype=torch.bool))
    experience = SimpleNamespace(
        old_logprobs=torch.full((2, 3), -1.0),
        ref_logprobs=torch.full((2, 3), -1.5),
        sequences=sequences,
    )
    result = SimpleNamespace(scores=torch.tensor([1.0, 2.0]))
    progress.on_rollout_end(TRAINER, None, SimpleNamespace(experience=experience, result=result))
    # KL is summed over the 3 tokens of a response: 3 x 0.5 nats.
    assert "score 1.5, KL 1.5, " in capsys.readouterr().err
    progress.on_train_batch_end(TRAINER, None, None, None, 1)
    assert "2/4" in capsys.readouterr().err
    progress.on_train_end(TRAINER, None)
