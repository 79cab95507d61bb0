"""Runs under DeepSpeed's ZeRO, stopped and gone on with: under it, without, on other ranks."""

import lightning.pytorch as pl
import pytest
import torch

from ppo_lightning.configs import GroupConfig, LoraConfig, OptimizerConfig
from ppo_lightning.distributed import rank, whole
from ppo_lightning.modules import ZeROStrategy, last_checkpoint
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

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (extra `deepspeed`)")

SCATTERED = {"stage3_param_persistence_threshold": 0}
LAYOUTS = {
    "one": lambda: ("auto", 1),
    "ddp": lambda: ("ddp", 2),
    "stage 1": lambda: (ZeROStrategy(stage=1), 2),
    "stage 2": lambda: (ZeROStrategy(stage=2), 2),
    "stage 3": lambda: (ZeROStrategy(stage=3, zero=SCATTERED), 2),
}


def fit(model_dir, folder, layout):
    """All iterations, from the newest file that there is; in stage 3 without what reads weights."""
    strategy, ranks = LAYOUTS[layout]()
    callbacks = every_callback()
    if layout == "stage 3":
        callbacks = [c for c in callbacks if not getattr(c, "reads_weights", False)]
    pl.seed_everything(0, verbose=False)
    run = trainer(
        folder, callbacks=callbacks, strategy=strategy, devices=ranks, max_epochs=ITERATIONS
    )
    module = module_with_everything(model_dir)
    names = {type(callback).__name__ for callback in callbacks}
    found = {}

    class AtTheEnd(pl.Callback):
        """Takes the state while the run still has it."""

        def on_train_end(self, trainer, pl_module):
            state = state_of(trainer, pl_module, names)
            weights = {n: whole(p).detach().clone() for n, p in pl_module.named_parameters()}
            found.update(without_times({**state, "weights": weights}))

    run.callbacks.append(AtTheEnd())
    run.fit(module, data_with_everything(), ckpt_path=last_checkpoint(run))
    torch.save(found, folder / f"final{rank()}.pt")


def finish(model_dir, folder, layout):
    """Run to the end; what each rank leaves."""
    log = folder / "log.txt"
    codes = exit_codes(fit, model_dir, folder, layout, num_ranks=2, log=log)
    assert codes == [0, 0], log.read_text(encoding="utf-8")
    return [torch.load(folder / f"final{number}.pt") for number in (0, 1)]


@pytest.fixture(scope="module", params=["stage 2", "stage 3"])
def uninterrupted(request, tiny_gpt2_dir, tmp_path_factory):
    """A stage, and what each rank leaves of a run that is never stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return request.param, finish(tiny_gpt2_dir, folder, request.param)


def test_t42_t49_ranks_decide_and_stay_alike(uninterrupted):
    layout, (first, second) = uninterrupted
    if layout == "stage 2":
        assert first["callbacks"]["CheckpointRollback"]["num_rollbacks"] == 1
    for part in ("weights", "optimizer", "controls", "rewards", "data"):
        assert same(first[part], second[part]), part


@pytest.mark.parametrize("faults", [{0: "step:26", 1: "step:26"}, {1: "step:17:TERM"}])
def test_killed_ranks_go_on_bit_for_bit(tiny_gpt2_dir, tmp_path, uninterrupted, faults):
    layout, wanted = uninterrupted
    codes = exit_codes(fit, tiny_gpt2_dir, tmp_path, layout, num_ranks=2, faults=faults)
    assert 0 not in codes
    assert list(tmp_path.rglob("*.ckpt"))
    found = finish(tiny_gpt2_dir, tmp_path, layout)
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(same(ours[part], value) for part, value in theirs.items())


class Loaded(Recorder):
    """Keeps the weights that a run begins with, too."""

    def on_train_start(self, trainer, pl_module):
        self.weights = {
            n: whole(p).detach().numpy().copy() for n, p in pl_module.named_parameters()
        }


def go_on(model_dir, folder, layout, iterations, variant):
    """Train up to a number of iterations, from the file that is there."""
    strategy, ranks = LAYOUTS[layout]()
    adam = variant == "adam"
    module = ppo_module(
        model_dir,
        policy={"lora": LoraConfig(rank=4) if variant == "lora" else None},
        critic_model={"kind": "shared" if variant == "shared" else "separate"},
        actor=GroupConfig(lr=1e-4 if adam else 1e-2),
        optimizer=OptimizerConfig(
            **({"eps": 1e-3} if adam else {"name": "SGD", "options": {"momentum": 0.5}})
        ),
    )
    loaded = Loaded()
    run = trainer(
        folder, callbacks=[loaded], strategy=strategy, devices=ranks, max_epochs=iterations
    )
    run.fit(module, data_module(seed=4), ckpt_path=last_checkpoint(run))
    ids = sampled_ids(loaded)
    return loaded.weights, ids, {n: p.detach().numpy() for n, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("first", "second", "variant"),
    [
        ("one", "stage 2", "separate"),
        ("one", "stage 3", "lora"),
        ("ddp", "stage 1", "adam"),
        ("stage 1", "stage 3", "shared"),
        ("stage 2", "one", "lora"),
        ("stage 3", "ddp", "adam"),
        ("stage 3", "one", "separate"),
    ],
)
def test_t51_a_run_goes_on_under_another_strategy_on_other_ranks(
    tiny_gpt2_dir, tmp_path, first, second, variant
):
    check_change(
        go_on,
        LAYOUTS,
        tiny_gpt2_dir,
        tmp_path,
        first=first,
        second=second,
        variant=variant,
        atol=1e-6,
    )
