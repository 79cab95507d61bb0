"""Two gloo processes with weights in shards (FSDP2): the result of a single process."""

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import GroupConfig, OptimizerConfig
from ppo_lightning.distributed import whole
from ppo_lightning.modules import FSDP2Strategy
from tests.distributed.test_two_ranks import VARIANTS
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import data_module, fit, ppo_module

ALL = {
    **VARIANTS,
    "checkpointing": {"policy": {"gradient_checkpointing": True}},
    "lora-shared": {**VARIANTS["lora"], **VARIANTS["shared"]},
    "padded": {"policy": {"padding_free": False}},
}


def strategy(ranks):
    return FSDP2Strategy() if ranks > 1 else "auto"


def train(model_dir, folder, variant, ranks):
    """Fit, and return parameters, sampled ids by response number, and statistics."""
    settings = {k: dict(v) for k, v in ALL[variant].items()}
    settings["policy"] = {"dtype": "float64", **settings.get("policy", {})}
    module = ppo_module(
        model_dir,
        actor=GroupConfig(lr=1e-2),
        optimizer=OptimizerConfig(name="SGD"),
        **settings,
    )
    recorder = fit(
        folder,
        module,
        data_module(
            buffer={"num_prompts": 7, "num_minibatches": 3}, val_prompts=["no", "you", "yes yes"]
        ),
        strategy=strategy(ranks),
        devices=ranks,
        enable_checkpointing=False,
    )
    ids = [
        dict(
            zip(c.experience.indices.tolist(), map(tuple, c.completions.response_ids), strict=True)
        )
        for c in recorder.collected
    ]
    stats = [
        {k: v for k, v in s.to_log().items() if k[:4] not in ("time", "run/")}
        for s in recorder.stats
    ]
    return {n: whole(p.detach()).numpy() for n, p in module.named_parameters()}, ids, stats


@pytest.mark.parametrize("variant", ALL)
def test_t47_t48_t49_shards_give_the_result_of_one_process(tiny_model_dir, tmp_path, variant):
    """Seven responses in three minibatches on two ranks: the same responses and parameters."""
    (alone,) = run_on_ranks(train, 1, tiny_model_dir, tmp_path, variant, 1)
    first, second = run_on_ranks(train, 2, tiny_model_dir, tmp_path, variant, 2)
    assert [a | b for a, b in zip(first[1], second[1], strict=True)] == alone[1]
    for name, value in alone[0].items():
        assert (first[0][name] == second[0][name]).all(), name
        # Llama computes its norms in float32.
        found, wanted = torch.tensor(first[0][name]), torch.tensor(value)
        assert_close(found, wanted, rtol=0, atol=1e-8, msg=name)
    for ours, theirs, one in zip(first[2], second[2], alone[2], strict=True):
        assert ours == pytest.approx(theirs, nan_ok=True)
        assert ours == pytest.approx(one, rel=1e-6, abs=1e-6, nan_ok=True)
