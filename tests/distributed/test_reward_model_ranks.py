"""A reward model on two gloo ranks: the result of a single process."""

import json

import lightning.pytorch as pl
import pytest
from torch.testing import assert_close

from ppo_lightning.configs import GroupConfig, OptimizerConfig
from ppo_lightning.metrics import RewardModelStats, read_step_metrics
from tests.helpers.preferences import pair_data, reward_module, rule_pairs
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import parameters, trainer

VARIANTS = {
    "full": {},
    "lora": {"lora": {"rank": 4}},
    "hard": {"negatives": "hardest", "hard_share": 0.5},
    "frozen": {"backbone": {"trainable_layers": 1}},
}


def train(folder, run, variant, ranks):
    """Fit eleven pairs in steps of four: the last step has three, and parts differ in number."""
    settings = {key: dict(v) if isinstance(v, dict) else v for key, v in VARIANTS[variant].items()}
    exact = {"dtype": "float64", "head_init": "normal"}
    settings["backbone"] = exact | settings.get("backbone", {})
    pl.seed_everything(0, verbose=False)
    module = reward_module(
        folder,
        group=GroupConfig(lr=1e-2),
        optimizer=OptimizerConfig(name="SGD"),
        microbatch_tokens=60,
        **settings,
    )
    records = rule_pairs(11)
    for row, other in zip(records, rule_pairs(11, seed=9), strict=True):
        if variant == "hard":
            row["rejected"] = [row["rejected"], other["rejected"]]
    data = pair_data(records, batch_size=4, val_pairs=rule_pairs(7, seed=4), val_batch_size=2)
    used = trainer(
        run,
        max_epochs=2,
        strategy="ddp" if ranks > 1 else "auto",
        devices=ranks,
        enable_checkpointing=False,
    )
    used.fit(module, data)
    logged = {k: float(v) for k, v in used.callback_metrics.items() if k[:4] in ("trai", "val/")}
    return {name: value.numpy() for name, value in parameters(module).items()}, logged


@pytest.mark.parametrize("variant", VARIANTS)
def test_t39_t40_t49_two_ranks_give_the_result_of_one(tiny_gpt2_dir, tmp_path, variant):
    alone, logged = train(tiny_gpt2_dir, tmp_path / "one", variant, 1)
    first, second = run_on_ranks(train, 2, tiny_gpt2_dir, tmp_path / "two", variant, 2)
    for name, value in alone.items():
        assert (first[0][name] == second[0][name]).all(), name
        assert_close(first[0][name], value, rtol=0, atol=1e-7, msg=name)
    assert first[1] == second[1]
    assert first[1].keys() == logged.keys()
    for name, number in logged.items():
        assert first[1][name] == pytest.approx(number, abs=1e-5), name
    reports = [
        json.loads((tmp_path / run / "reward_report.json").read_text(encoding="utf-8"))
        for run in ("one", "two")
    ]
    assert reports[0]["num_pairs"] == reports[1]["num_pairs"] == 7
    assert [p["origin"] for p in reports[0]["most_wrong"]] == [
        p["origin"] for p in reports[1]["most_wrong"]
    ]
    rows = read_step_metrics(tmp_path / "two/metrics.jsonl", RewardModelStats)
    assert rows[-1].val_examples == 7
