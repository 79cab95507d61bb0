"""Two ranks, each with a process that samples for it."""

import os
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import GroupConfig, OptimizerConfig
from ppo_lightning.distributed import whole
from ppo_lightning.errors import RolloutError
from ppo_lightning.modules import FSDP2Strategy
from ppo_lightning.rollout import AsyncEngine
from ppo_lightning.rollout.engines.shared_weights import SharedWeights
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import data_module, fit, parameters, ppo_module
from tests.helpers.sampling_process import Faulty, fork_samplers, lives

STRATEGIES = {"ddp": lambda: "ddp", "fsdp": FSDP2Strategy}
BUFFER = {"num_prompts": 7, "num_minibatches": 3}


def train(model_dir, folder, ckpt, *, strategy=None, epochs=3):
    """Fit in float64, and return parameters, lags and the number of the sampling process."""
    engine = AsyncEngine(timeout=90)
    module = ppo_module(
        model_dir,
        policy={"dtype": "float64"},
        actor=GroupConfig(lr=1e-2),
        optimizer=OptimizerConfig(name="SGD"),
        engine=engine,
    )
    pids, begin = set(), engine.begin

    def noted(*arguments, **settings):
        begin(*arguments, **settings)
        pids.add(engine.pid)

    engine.begin = noted
    recorder = fit(
        folder,
        module,
        data_module(buffer=BUFFER, val_prompts=["no"]),
        ckpt=ckpt,
        strategy=STRATEGIES[strategy]() if strategy else "auto",
        devices=2 if strategy else 1,
        max_epochs=epochs,
    )
    values = {name: whole(value).numpy() for name, value in parameters(module).items()}
    lags = [(s.iteration, s.lag_max) for s in recorder.stats]
    return values, lags, pids


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_t40_t49_two_ranks_give_the_result_of_one_which_goes_on_from_their_file(
    tiny_llama_dir, tmp_path, monkeypatch, strategy
):
    fork_samplers(monkeypatch)
    alone, lags, _ = train(tiny_llama_dir, tmp_path / "one", None)
    two_ranks = partial(train, strategy=strategy, epochs=2)
    first, second = run_on_ranks(two_ranks, 2, tiny_llama_dir, tmp_path / "two", None)
    assert first[1] == second[1] == [(0, 0), (1, 1)]
    assert len(first[2] | second[2]) == 2
    assert not any(lives(pid) for pid in first[2] | second[2])
    for name, value in first[0].items():
        assert (value == second[0][name]).all()
    file = tmp_path / "two/checkpoints/last.ckpt"
    resumed, rest, _ = train(tiny_llama_dir, tmp_path / "two", file)
    assert rest == lags[2:] == [(2, 1)]
    for name, value in alone.items():
        assert_close(torch.tensor(resumed[name]), torch.tensor(value), rtol=0, atol=1e-9)


def one_fails(model_dir, folder):
    """The process of the second rank is killed in its second buffer."""
    second = os.environ["RANK"] == "1"
    engine = AsyncEngine(Faulty("SIGKILL", at=2) if second else None, timeout=90)
    module = ppo_module(model_dir, engine=engine)
    with pytest.raises(RolloutError) as caught:
        fit(folder, module, data_module(), strategy="ddp", devices=2)
    return str(caught.value)


@pytest.mark.slow
def test_t42_a_process_that_dies_ends_all_ranks(tiny_llama_dir, tmp_path):
    first, second = run_on_ranks(one_fails, 2, tiny_llama_dir, tmp_path)
    assert "failed on another rank" in first
    assert "killed by SIGKILL" in second


def sharded():
    """Write a weight that two ranks share; what arrives on each."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo")
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(10.0).view(5, 2)
    weights = {"a": distribute_tensor(whole, mesh, [Shard(0)]), "b": whole[0]}
    shared, target = SharedWeights(weights), {"a": torch.zeros(5, 2), "b": torch.zeros(2)}
    assert shared.write(weights) == 12 * 4
    shared.read_into(target)
    return target["a"].equal(whole), target["b"].equal(whole[0])


def test_weights_that_are_sharded_arrive_whole_on_every_rank():
    assert run_on_ranks(sharded, 2) == [(True, True)] * 2
