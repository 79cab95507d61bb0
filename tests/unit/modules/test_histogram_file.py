"""``histograms.jsonl`` of tiny runs, and the entropy beside that of the start."""

from dataclasses import replace

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.callbacks import HistogramFile
from ppo_lightning.metrics import IterationStats, read_histograms
from ppo_lightning.modules.slices import buffer_histograms, response_rows
from tests.helpers.runs import data_module, fit, ppo_module


def run(folder, model_dir, *, epochs=2, **options):
    options = {"enable_checkpointing": False} | options
    return fit(folder, ppo_module(model_dir), data_module(), max_epochs=epochs, **options)


def test_each_buffer_is_counted(tiny_gpt2_dir, tmp_path):
    recorder = run(tmp_path, tiny_gpt2_dir)
    found = read_histograms(tmp_path / "histograms.jsonl")
    assert found == [
        buffer_histograms(response_rows(collected), iteration=number)
        for number, collected in enumerate(recorder.collected)
    ]
    assert [sum(row.raw_score.counts) for row in found] == [8, 8]


def test_another_name_and_none_on_trial(tiny_gpt2_dir, tmp_path):
    run(tmp_path / "a", tiny_gpt2_dir, epochs=1, callbacks=[HistogramFile("h.jsonl")])
    assert len(read_histograms(tmp_path / "a/h.jsonl")) == 1
    assert not (tmp_path / "a/histograms.jsonl").exists()
    run(tmp_path / "b", tiny_gpt2_dir, epochs=1, fast_dev_run=True)
    assert not list(tmp_path.rglob("b/*.jsonl"))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_run_goes_on_in_the_file(tiny_gpt2_dir, tmp_path):
    """And keeps the entropy of the start."""
    files = [ModelCheckpoint(filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)]
    options = {"enable_checkpointing": True, "callbacks": files, "epochs": 3}
    whole = run(tmp_path, tiny_gpt2_dir, **options)
    rows = read_histograms(tmp_path / "histograms.jsonl")
    [first] = tmp_path.rglob("epoch=0.ckpt")
    keep = first.rename(tmp_path / "first.ckpt")
    files = [ModelCheckpoint(filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)]
    resumed = run(tmp_path, tiny_gpt2_dir, ckpt=keep, **{**options, "callbacks": files})
    assert read_histograms(tmp_path / "histograms.jsonl") == rows
    assert [row.iteration for row in rows] == [0, 1, 2]
    start = whole.stats[0].entropy
    for stats in (*whole.stats, *resumed.stats):
        assert stats.entropy_start == start
        assert stats.entropy_relative == stats.entropy / start
    assert whole.stats[0].entropy_relative == 1
    assert whole.stats[2].entropy_relative not in (None, 1.0)


@pytest.mark.parametrize(
    ("entropy", "version", "start", "expected"),
    [
        (2.0, 0.0, None, (2.0, 1.0)),
        (1.0, 4.0, 2.0, (2.0, 0.5)),
        (1.0, 0.0, 2.0, (2.0, 0.5)),  # a second buffer of the same weights
        (1.0, 4.0, None, (None, None)),  # what it began with is not known any more
        (None, 4.0, 2.0, (2.0, None)),  # all responses were dropped
        (0.0, 0.0, None, (0.0, None)),  # a policy without a choice from the start
    ],
)
def test_the_start_is_the_first_buffer_before_any_step(
    tiny_gpt2_dir, entropy, version, start, expected
):
    module = ppo_module(tiny_gpt2_dir)
    module.entropy_start = start
    stats = IterationStats(iteration=1, entropy=entropy, policy_version=version)
    found = replace(stats, **module._since_start(stats))
    assert (found.entropy_start, found.entropy_relative) == expected
