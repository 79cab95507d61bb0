"""The dial of the sampling temperature on two ranks: one value for all, or an error on all."""

import os

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import GroupConfig, OptimizerConfig
from ppo_lightning.errors import RolloutError
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import (
    data_module,
    fit,
    logged,
    merged_ids,
    parameters,
    ppo_module,
    sampled_ids,
)
from tests.helpers.turns import Turns


def train(model_dir, folder, *, ranks=2, only=None):
    """Fit in float64; parameters, sampled ids and statistics.

    Args:
        model_dir: Of the model.
        folder: Of the run.
        ranks: Processes.
        only: The rank that asks, where it is not all of them.
    """
    module = ppo_module(
        model_dir,
        policy={"dtype": "float64"},
        actor=GroupConfig(lr=1e-2),
        optimizer=OptimizerConfig(name="SGD"),
    )
    asks = only is None or os.environ["RANK"] == str(only)
    recorder = fit(
        folder,
        module,
        data_module(buffer={"num_prompts": 7, "num_minibatches": 3}),
        strategy="ddp" if ranks > 1 else "auto",
        devices=ranks,
        enable_checkpointing=False,
        callbacks=[Turns("temperature", {0: 0.7, 1: 1.6})] if asks else [],
    )
    values = {name: value.numpy() for name, value in parameters(module).items()}
    return values, sampled_ids(recorder), logged(recorder)


def test_two_ranks_give_the_result_of_one(tiny_model_dir, tmp_path):
    alone, ids, stats = train(tiny_model_dir, tmp_path, ranks=1)
    found = run_on_ranks(train, 2, tiny_model_dir, tmp_path)
    assert merged_ids(found) == ids
    for values, _, rows in found:
        assert [row["rollout/temperature"] for row in rows] == [1.0, 0.7, 1.6]
        assert rows[-1] == pytest.approx(stats[-1], rel=1e-6, abs=1e-6)
        for name, value in alone.items():
            assert_close(torch.tensor(values[name]), torch.tensor(value), rtol=0, atol=1e-9)


def one_asks(model_dir, folder):
    with pytest.raises(RolloutError) as caught:
        train(model_dir, folder, only=1)
    return str(caught.value)


def test_a_request_of_one_rank_alone_ends_all(tiny_llama_dir, tmp_path):
    """T42: they would sample one buffer at two temperatures."""
    for said in run_on_ranks(one_asks, 2, tiny_llama_dir, tmp_path):
        assert said.startswith("the dial `temperature` is 0.7 on one rank and 1 on another")
