"""Early stop and best checkpoint by the gold score."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from ppo_lightning.callbacks import BestByGold, GoldEarlyStopping
from ppo_lightning.configs import ValidationConfig
from ppo_lightning.errors import ConfigError
from ppo_lightning.rewards import Reward
from tests.helpers.runs import Recorder, data_module, fit, ppo_module

PEAK_AT_2 = (0.0, 1.0, 2.0, 1.5, 1.0, 0.5, 0.0)


class WrittenDown(Reward):
    """A gold score by number of the iteration, whatever the answers."""

    def __init__(self, scores):
        self.scores, self.module = scores, None

    def __call__(self, completions):
        return [self.scores[self.module.iteration]] * len(completions.responses)


def judged(model_dir, scores=PEAK_AT_2, **overrides):
    gold = WrittenDown(scores)
    module = ppo_module(model_dir, gold=gold, **overrides)
    gold.module = module
    return module


def run(folder, module, callbacks, **options):
    data = data_module(val_prompts=["the cat", "no"])
    return fit(folder, module, data, callbacks=callbacks, **({"max_epochs": 7} | options))


def files(folder):
    return sorted(file.name for file in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("answers", ["sampled", "greedy"])
def test_the_run_ends_when_gold_falls_and_the_best_file_is_the_best_iterations(
    tiny_llama_dir, tmp_path, answers
):
    module = judged(tiny_llama_dir)
    stop = GoldEarlyStopping(patience=2, answers=answers)
    best = BestByGold(answers=answers)
    stats = run(tmp_path, module, [stop, best]).stats
    assert [s.iteration for s in stats] == [0, 1, 2, 3, 4]  # best at 2, two validations without
    assert files(tmp_path) == [f"best-{answers}-epoch=2.ckpt", "last.ckpt"]
    assert float(best.best_model_score) == 2.0
    kept = torch.load(best.best_model_path, weights_only=True)
    assert kept["ppo_lightning"]["controls"]["iteration"] == 2
    assert kept["ppo_lightning"]["complete"]
    last = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert last["ppo_lightning"]["controls"]["iteration"] == 4


def test_iterations_without_validation_count_for_nothing(tiny_llama_dir, tmp_path):
    """The score of an earlier validation is not taken for that of an iteration without one."""
    module = judged(tiny_llama_dir, scores=(9.0, 2.0, 9.0, 1.0, 9.0, 0.0, 9.0))
    stop, best = GoldEarlyStopping(patience=2), BestByGold()
    stats = run(tmp_path, module, [stop, best], check_val_every_n_epoch=2).stats
    assert [s.iteration for s in stats] == [0, 1, 2, 3, 4, 5]
    assert files(tmp_path) == ["best-sampled-epoch=1.ckpt", "last.ckpt"]
    assert float(best.best_model_score) == 2.0


def test_min_delta_and_threshold(tiny_llama_dir, tmp_path):
    rising = (0.0, 0.1, 0.2, 0.3, 0.4, 5.0, 6.0)
    stats = run(
        tmp_path / "a", judged(tiny_llama_dir, rising), [GoldEarlyStopping(min_delta=1.0)]
    ).stats
    assert len(stats) == 4
    stats = run(
        tmp_path / "b",
        judged(tiny_llama_dir, rising),
        [GoldEarlyStopping(stopping_threshold=0.25)],
    ).stats
    assert len(stats) == 4


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_stops_and_keeps_as_the_whole_one(tiny_llama_dir, tmp_path):
    def callbacks():
        return [
            GoldEarlyStopping(patience=2),
            BestByGold(),
            ModelCheckpoint(filename="all-{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
        ]

    run(tmp_path / "whole", judged(tiny_llama_dir), callbacks())
    file = tmp_path / "whole/checkpoints/all-epoch=3.ckpt"  # one validation without a new best
    again = callbacks()
    stats = run(tmp_path / "again", judged(tiny_llama_dir), again, ckpt=file).stats
    assert [s.iteration for s in stats] == [4]
    assert again[0].wait_count == 2
    assert float(again[0].best_score) == 2.0


def test_beside_lightnings_own(tiny_llama_dir, tmp_path):
    own = EarlyStopping("val/sampled/gold", mode="max", patience=1)
    plain = ModelCheckpoint(monitor="val/greedy/score", save_on_train_epoch_end=True)
    callbacks = [GoldEarlyStopping(patience=6), own, BestByGold(save_last=False), plain]
    stats = run(tmp_path, judged(tiny_llama_dir), callbacks).stats
    assert len(stats) == 4  # whichever is first
    assert "best-sampled-epoch=2.ckpt" in files(tmp_path)
    assert len(files(tmp_path)) == 2
    assert len({type(c).__name__: c.state_key for c in callbacks}.values()) == 4


@pytest.mark.parametrize("callback", [GoldEarlyStopping, BestByGold])
@pytest.mark.parametrize(
    ("settings", "val_prompts", "named"),
    [
        ({}, ["no"], r"set `model\.init_args\.gold`, the independent reward\.$"),
        ({"gold": WrittenDown(PEAK_AT_2)}, None, r"set `data\.init_args\.val_prompts`"),
        (
            {"gold": WrittenDown(PEAK_AT_2), "validation": ValidationConfig(num_samples=0)},
            ["no"],
            r"set `model\.init_args\.validation\.num_samples`",
        ),
        ({}, None, "gold`, the independent reward and `data"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_loaded(
    tiny_llama_dir, tmp_path, callback, settings, val_prompts, named
):
    module = ppo_module(tiny_llama_dir, **settings)
    with pytest.raises(ConfigError, match=named):
        fit(tmp_path, module, data_module(val_prompts=val_prompts), callbacks=[callback()])
    assert module.networks is None


def test_greedy_answers_must_be_given(tiny_llama_dir, tmp_path):
    module = judged(tiny_llama_dir, validation=ValidationConfig(greedy=False))
    with pytest.raises(ConfigError, match="greedy: true"):
        run(tmp_path, module, [BestByGold(answers="greedy")])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: GoldEarlyStopping(patience=0), "`patience`"),
        (lambda: GoldEarlyStopping(min_delta=-1.0), "`min_delta`"),
        (lambda: GoldEarlyStopping(answers="best"), "`answers`"),
        (lambda: BestByGold(answers="best"), "`answers`"),
        (lambda: BestByGold(save_top_k=0), "`save_top_k`"),
    ],
)
def test_nonsense_is_refused(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_other_commands_ask_for_nothing(tiny_llama_dir, tmp_path):
    """``test`` of a run's config needs no gold reward."""
    module, recorder = ppo_module(tiny_llama_dir), Recorder()
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        callbacks=[recorder, GoldEarlyStopping(), BestByGold()],
        **options,
    ).test(module, data_module(val_prompts=["no"]), verbose=False)
    assert recorder.answers
