"""Groups, places and histograms of two ranks are those of one."""

import pytest

from ppo_lightning.configs import GroupConfig, OptimizerConfig
from ppo_lightning.data import MixturePart, MixturePrompts
from ppo_lightning.metrics import read_histograms
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import data_module, fit, logged, ppo_module


def train(model_dir, folder, ranks):
    """Seven responses of two parts, uneven on two ranks."""
    parts = [
        MixturePart(source=["the cat", "a dog ran"], name="animals", weight=2),
        MixturePart(source=["hello world you", "no"]),
    ]
    module = ppo_module(
        model_dir,
        policy={"dtype": "float64"},
        actor=GroupConfig(lr=1e-1),
        optimizer=OptimizerConfig(name="SGD"),
    )
    recorder = fit(
        folder,
        module,
        data_module(prompts=MixturePrompts(parts), buffer={"num_prompts": 7}),
        max_epochs=2,
        strategy="ddp" if ranks > 1 else "auto",
        devices=ranks,
        enable_checkpointing=False,
    )
    return logged(recorder)


def test_t40_two_ranks_measure_what_one_does(tiny_gpt2_dir, tmp_path):
    alone = train(tiny_gpt2_dir, tmp_path / "one", 1)
    first, second = run_on_ranks(train, 2, tiny_gpt2_dir, tmp_path / "two", 2)
    names = [
        *(f"rollout/group/{group}/entropy" for group in ("animals", "part_1")),
        "rollout/group/animals/score",
        "rollout/entropy_at/0/mean",
        "rollout/entropy_at/2-3/mean",
        "rollout/entropy_relative",
        "rollout/behaviour_kl",
        "update/clip_fraction_positive",
        "update/clip_fraction_negative",
        "update/ratio_beyond_2",
    ]
    for ours, theirs, one in zip(first, second, alone, strict=True):
        assert ours == theirs
        assert {name: ours[name] for name in names} == pytest.approx(
            {name: one[name] for name in names}, rel=1e-6, abs=1e-9
        )
        counts = [one[f"rollout/group/{name}/num_responses"] for name in ("animals", "part_1")]
        assert counts == [ours[f"rollout/group/{n}/num_responses"] for n in ("animals", "part_1")]
        assert sum(counts) == 7
    found = [read_histograms(tmp_path / name / "histograms.jsonl") for name in ("one", "two")]
    for one, two in zip(*found, strict=True):
        assert one.response_length == two.response_length
        assert one.raw_score.counts == two.raw_score.counts
        assert one.raw_score.edges == pytest.approx(two.raw_score.edges)
