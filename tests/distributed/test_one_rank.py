"""DDP on one rank: it wraps the model and counts what a backward pass reaches, all the same."""

import pytest

from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import data_module, fit, ppo_module


def train(model_dir, folder, ppo):
    """Fit one iteration; returns how many steps it took."""
    recorder = fit(
        folder,
        ppo_module(model_dir, ppo=ppo),
        data_module(),
        strategy="ddp",
        devices=1,
        max_epochs=1,
        enable_checkpointing=False,
    )
    return [stats.steps_taken for stats in recorder.stats]


@pytest.mark.parametrize(
    ("ppo", "steps"),
    [({}, 4), ({"update_order": "in_turn"}, 8), ({"extra_critic_epochs": 1}, 6)],
    ids=["as it comes", "in turn", "extra passes"],
)
def test_the_passes_of_an_update_reach_every_parameter(tiny_llama_dir, tmp_path, ppo, steps):
    assert run_on_ranks(train, 1, tiny_llama_dir, tmp_path, ppo) == [[steps]]
