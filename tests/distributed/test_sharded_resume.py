"""Runs with weights in shards, stopped and gone on with: with shards, without, on other ranks."""

import lightning.pytorch as pl
import pytest
import torch

from ppo_lightning.callbacks import ActorEMA
from ppo_lightning.configs import GroupConfig, LoraConfig, OptimizerConfig
from ppo_lightning.distributed import mapped, rank, whole
from ppo_lightning.modules import FSDP2Strategy, last_checkpoint
from tests.helpers.deaths import exit_codes
from tests.helpers.everything import (
    ITERATIONS,
    data_with_everything,
    every_callback,
    module_with_everything,
    state_of,
    without_times,
)
from tests.helpers.faults import same
from tests.helpers.layouts import check_change
from tests.helpers.runs import (
    Recorder,
    data_module,
    ppo_module,
    sampled_ids,
    trainer,
)

LAYOUTS = {
    "one": lambda: ("auto", 1),
    "ddp": lambda: ("ddp", 2),
    "fsdp": lambda: (FSDP2Strategy(), 2),
    "tensor": lambda: (FSDP2Strategy(tensor_parallel_size=2), 2),
    "parts": lambda: (FSDP2Strategy(sharded_checkpoints=True), 2),
    "tensor-parts": lambda: (
        FSDP2Strategy(tensor_parallel_size=2, sharded_checkpoints=True),
        2,
    ),
    "four-parts": lambda: (
        FSDP2Strategy(tensor_parallel_size=2, sharded_checkpoints=True),
        4,
    ),
}


def fit(model_dir, folder, layout):
    """All iterations, from the newest file that there is."""
    strategy, ranks = LAYOUTS[layout]()
    pl.seed_everything(0, verbose=False)
    run = trainer(
        folder,
        callbacks=every_callback(),
        strategy=strategy,
        devices=ranks,
        max_epochs=ITERATIONS,
    )
    module = module_with_everything(model_dir)
    run.fit(module, data_with_everything(), ckpt_path=last_checkpoint(run))
    found = mapped(without_times(state_of(run, module)), whole)
    torch.save(found, folder / f"final{rank()}.pt")


def finish(model_dir, folder, layout):
    """Run to the end; what each rank leaves."""
    log = folder / "log.txt"
    codes = exit_codes(fit, model_dir, folder, layout, num_ranks=2, log=log)
    assert codes == [0, 0], log.read_text(encoding="utf-8")
    return [torch.load(folder / f"final{number}.pt") for number in (0, 1)]


@pytest.fixture(
    scope="module",
    params=[
        "fsdp",
        pytest.param("tensor", marks=pytest.mark.slow),
        pytest.param("parts", marks=pytest.mark.slow),
    ],
)
def uninterrupted(request, even_llama_dir, tmp_path_factory):
    """A layout, and what each rank leaves of a run that is never stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return request.param, finish(even_llama_dir, folder, request.param)


def test_t42_ranks_with_shards_decide_and_stay_alike(uninterrupted):
    first, second = uninterrupted[1]
    assert first["callbacks"]["CheckpointRollback"]["num_rollbacks"] == 1
    for part in ("weights", "optimizer", "controls", "rewards", "data"):
        assert same(first[part], second[part]), part


@pytest.mark.parametrize(
    "faults",
    [
        {0: "step:14", 1: "step:14"},
        # A rank that is told to end tells the others, whatever the strategy: test_interrupts.py.
        pytest.param({1: "step:9:TERM"}, marks=pytest.mark.slow),
    ],
)
def test_killed_ranks_with_shards_go_on_bit_for_bit(
    even_llama_dir, tmp_path, uninterrupted, faults
):
    layout, wanted = uninterrupted
    codes = exit_codes(fit, even_llama_dir, tmp_path, layout, num_ranks=2, faults=faults)
    assert 0 not in codes
    found = finish(even_llama_dir, tmp_path, layout)
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(same(ours[part], value) for part, value in theirs.items())


class Loaded(Recorder):
    """Keeps the weights that a run begins with, too."""

    def on_train_start(self, trainer, pl_module):
        self.weights = whole_weights(pl_module)


def whole_weights(module):
    return {name: whole(p.detach()).numpy().copy() for name, p in module.named_parameters()}


def go_on(model_dir, folder, layout, iterations, variant):
    """Train up to a number of iterations, from the file that is there."""
    strategy, ranks = LAYOUTS[layout]()
    module = ppo_module(
        model_dir,
        policy={"dtype": "float64", "lora": LoraConfig(rank=4) if variant == "lora" else None},
        critic_model={"kind": "shared" if variant == "shared" else "separate"},
        actor=GroupConfig(lr=1e-2),
        optimizer=OptimizerConfig(name="SGD", options={"momentum": 0.5}),
    )
    loaded = Loaded()
    run = trainer(
        folder,
        callbacks=[loaded, ActorEMA(decay=0.9)],
        strategy=strategy,
        devices=ranks,
        max_epochs=iterations,
    )
    run.fit(module, data_module(), ckpt_path=last_checkpoint(run))
    ids = sampled_ids(loaded)
    return loaded.weights, ids, whole_weights(module)


@pytest.mark.parametrize(
    ("first", "second", "variant"),
    [
        # Each layout is left and gone on with once; the rest are other pairs of them.
        pytest.param("one", "fsdp", "separate", marks=pytest.mark.slow),
        pytest.param("one", "tensor", "lora", marks=pytest.mark.slow),
        pytest.param("ddp", "one", "shared", marks=pytest.mark.slow),
        ("ddp", "fsdp", "lora"),
        pytest.param("fsdp", "one", "separate", marks=pytest.mark.slow),
        pytest.param("fsdp", "ddp", "shared", marks=pytest.mark.slow),
        ("fsdp", "tensor", "separate"),
        pytest.param("tensor", "one", "separate", marks=pytest.mark.slow),
        pytest.param("tensor", "fsdp", "lora", marks=pytest.mark.slow),
        ("parts", "one", "separate"),
        pytest.param("parts", "ddp", "lora", marks=pytest.mark.slow),
        pytest.param("tensor-parts", "fsdp", "shared", marks=pytest.mark.slow),
        pytest.param("fsdp", "tensor-parts", "separate", marks=pytest.mark.slow),
        pytest.param("four-parts", "parts", "separate", marks=pytest.mark.slow),
    ],
)
def test_t51_a_run_goes_on_under_another_strategy_on_other_ranks(
    even_llama_dir, tmp_path, first, second, variant
):
    check_change(
        go_on,
        LAYOUTS,
        even_llama_dir,
        tmp_path,
        first=first,
        second=second,
        variant=variant,
        atol=1e-8,
    )
