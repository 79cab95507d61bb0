"""What one optimiser step of a reward model does: microbatches, loss terms, harder negatives."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import GroupConfig, OptimizerConfig
from ppo_lightning.data import read_pairs
from ppo_lightning.data.preferences.pair_batches import PairBatch
from ppo_lightning.metrics import RewardModelStats, read_step_metrics
from tests.helpers.preferences import (
    FAMILIES,
    build_backbone,
    fit,
    pair_data,
    reward_module,
)
from tests.helpers.runs import parameters


@pytest.fixture(scope="module")
def backbones(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("backbones")
    return {family: build_backbone(family, folder / family) for family in FAMILIES}


# ---------------------------------------------------------------------- the step


def step_parameters(folder, tmp_path, **settings):
    module = reward_module(
        folder,
        group=GroupConfig(lr=1e-2, max_grad_norm=None),
        optimizer=OptimizerConfig(name="SGD"),
        backbone={"dtype": "float64", "head_init": "normal"},
        **settings,
    )
    used = fit(tmp_path, module, pair_data(), max_epochs=1, enable_checkpointing=False)
    return parameters(module), {k: float(v) for k, v in used.callback_metrics.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_t38_t39_the_cut_into_microbatches_changes_nothing(backbones, tmp_path, family):
    """In float64: to the order in which it is added up (the head itself is float32)."""
    run = partial(step_parameters, backbones[family], centering_coef=0.1, label_smoothing=0.1)
    whole, logged = run(tmp_path / "whole", microbatch_tokens=None)
    for tokens in (1, 90):
        cut, seen = run(tmp_path / str(tokens), microbatch_tokens=tokens)
        for name, value in whole.items():
            assert_close(cut[name], value, rtol=0, atol=1e-7, msg=name)
        for name in ("train/loss", "train/accuracy", "train/score_std", "val/loss"):
            assert seen[name] == pytest.approx(logged[name], abs=1e-6), name


def loss_of(module, records) -> tuple[float, dict[str, float]]:
    """Loss of one part with given scores: rows of one token, the score is the token's number."""
    data = pair_data(records)
    data.trainer = type("T", (), {"lightning_module": module})()
    batch = PairBatch(
        examples=tuple(data._examples(read_pairs(data.source))), epoch=0, step=0, num_steps=1
    )
    (part,) = module.parts(batch)
    loss, sums = module.loss_sum(part)
    return float(loss) / len(batch), {name: float(v) for name, v in sums.items()}


def test_the_loss_has_margin_centring_and_smoothing(backbones, monkeypatch):
    """Scores by hand: chosen 2, rejected 1."""
    records = [{"prompt": "a", "chosen": " cat", "rejected": " dog", "margin": 0.5}]

    def module(**settings):
        made = reward_module(backbones["gpt2"], **settings)
        monkeypatch.setattr(made, "scores", lambda ids, mask: torch.tensor([2.0, 1.0]))
        return made

    def sure(lead):
        return math.log1p(math.exp(-lead))

    loss, sums = loss_of(module(), records)
    assert loss == pytest.approx(sure(0.5) + 0.01 * 9)
    assert sums == pytest.approx(
        {"preference_loss": sure(0.5), "correct": 1, "gap": 1, "score": 1.5, "score_square": 2.5}
    )
    plain = {"use_margin": False, "centering_coef": 0.0}
    assert loss_of(module(**plain), records)[0] == pytest.approx(sure(1.0))
    smooth = loss_of(module(**plain, label_smoothing=0.2), records)[0]
    assert smooth == pytest.approx(0.8 * sure(1.0) + 0.2 * sure(-1.0))


# ---------------------------------------------------------------------- harder negatives


class ByLength:
    """Stands in for scores: the longer row scores higher."""

    def __call__(self, ids, mask):
        return mask.sum(1).float()


def chosen_of(module, records, monkeypatch):
    monkeypatch.setattr(module, "scores", ByLength())
    module.configure_model()
    data = pair_data(records)
    data.trainer = type("T", (), {"lightning_module": module})()
    examples = data._examples(read_pairs(data.source), each=not module.keeps_negatives)
    batch = PairBatch(examples=tuple(examples), epoch=0, step=0, num_steps=1)
    return module._harder(batch).examples


def test_the_hardest_rejected_answer_is_the_one_that_scores_highest(backbones, monkeypatch):
    records = [
        {"prompt": "a", "chosen": " cat", "rejected": [" b", " a long one", " or"]},
        {"prompt": "a", "chosen": " cat", "rejected": " dog"},
    ]
    module = reward_module(backbones["gpt2"], negatives="hardest")
    first, second = chosen_of(module, records, monkeypatch)
    assert first.pair.rejected[0][0]["content"] == " a long one"
    assert second.pair.rejected[0][0]["content"] == " dog"
    module = reward_module(backbones["gpt2"])
    assert len(chosen_of(module, records, monkeypatch)) == 4


def test_a_share_of_the_hardest_pairs_is_learned_from(backbones, monkeypatch):
    records = [
        {"prompt": "a", "chosen": " c" + " i" * lead, "rejected": " d e f"} for lead in range(8)
    ]
    module = reward_module(backbones["gpt2"], hard_share=0.3)
    kept = chosen_of(module, records, monkeypatch)
    assert [example.number for example in kept] == [0, 1, 2]  # ceil(0.3 · 8) of the smallest leads
    records[7]["margin"] = 100.0
    kept = chosen_of(reward_module(backbones["gpt2"], hard_share=0.3), records, monkeypatch)
    assert [example.number for example in kept] == [0, 1, 7]


def test_only_the_chosen_pairs_are_counted(backbones, tmp_path):
    module = reward_module(backbones["gpt2"], hard_share=0.5)
    used = fit(tmp_path, module, pair_data(batch_size=10, val_share=0.0), max_epochs=1)
    rows = read_step_metrics(tmp_path / "metrics.jsonl", RewardModelStats)
    assert sum(row.examples for row in rows if row.examples is not None) == 20
    assert used.global_step == 4
