"""Supervised fine-tuning on two gloo processes: the result of a single process."""

import json

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import GroupConfig, LoraConfig, OptimizerConfig
from ppo_lightning.metrics import SFTStats, read_step_metrics
from tests.helpers.processes import run_on_ranks
from tests.helpers.sft_runs import fit_sft, sft_data, sft_module, weights_of

VARIANTS = {
    "full": {},
    "lora": {"policy": {"lora": LoraConfig(rank=4)}},
    "cut": {"microbatch_tokens": 12},
    "packed": {"packing": True, "microbatch_tokens": 30},
}


def train(model_dir, folder, variant, *, ranks, batch_size=3):
    """Fit; return the weights and the rows, without times."""
    torch.manual_seed(0)  # adapters begin at random
    settings = dict(VARIANTS[variant])
    policy = {"dtype": "float64", **settings.pop("policy", {})}
    module = sft_module(
        model_dir,
        policy=policy,
        actor=GroupConfig(lr=1e-1),
        optimizer=OptimizerConfig(name="SGD"),
        **settings,
    )
    recorder = fit_sft(
        folder,
        module,
        sft_data(batch_size=batch_size, val_batch_size=1),
        strategy="ddp" if ranks > 1 else "auto",
        devices=ranks,
    )
    rows = [
        {k: v for k, v in row.to_log().items() if k[:4] != "time" and "memory" not in k}
        for row in recorder.rows
    ]
    weights = {name: value.numpy() for name, value in weights_of(module).items()}
    return weights, rows, recorder.read


@pytest.mark.parametrize(
    ("variant", "family"),
    [("full", "gpt2"), ("lora", "llama"), ("cut", "llama"), ("packed", "gpt2")],
)
def test_t39_t40_two_ranks_give_the_weights_and_rows_of_one(request, tmp_path, variant, family):
    """Seven examples in steps of three: the last step leaves a rank without any."""
    tiny_model_dir = request.getfixturevalue(f"tiny_{family}_dir")
    alone, rows, _ = train(tiny_model_dir, tmp_path / "one", variant, ranks=1)
    arguments = (tiny_model_dir, tmp_path / "two", variant)
    first, second = run_on_ranks(two_ranks, 2, *arguments)
    for name, value in alone.items():
        assert (first[0][name] == second[0][name]).all(), name
        assert_close(torch.tensor(first[0][name]), torch.tensor(value), rtol=0, atol=1e-9)
    padding = "train/padding_share"  # ranks pad apart
    for ours, theirs, one in zip(first[1], second[1], rows, strict=True):
        assert ours == theirs
        one, ours = ({k: v for k, v in row.items() if k != padding} for row in (one, ours))
        assert ours == pytest.approx(one, rel=1e-6)
    for mine, other in zip(first[2], second[2], strict=True):
        assert not set(mine) & set(other)
    if variant == "full":
        both = read_step_metrics(tmp_path / "two" / "metrics.jsonl", SFTStats)
        assert [row.step for row in both] == [row["run/step"] for row in rows]
        samples = sorted((tmp_path / "two" / "samples").iterdir())
        texts = [json.loads(line) for line in samples[0].read_text().splitlines()]
        assert [text["number"] for text in texts] == [0, 1, 2]
        assert (tmp_path / "two" / "model" / "config.json").is_file()


def two_ranks(model_dir, folder, variant):
    return train(model_dir, folder, variant, ranks=2)
