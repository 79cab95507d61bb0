"""Runs whose updates begin behind frozen blocks are the runs that pass through all of them."""

import weakref
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close

from ppo_lightning.callbacks import DumpBuffers
from ppo_lightning.configs import LoraConfig, RewardProcessing
from ppo_lightning.rollout import ReplayDataModule, load_buffer
from tests.helpers.runs import data_module, fit, parameters, ppo_module, trainer


class CountsBlocks(pl.Callback):
    """Counts the passes through the first and the last block within optimiser steps."""

    def __init__(self):
        self.updating, self.first, self.last = False, 0, 0
        self.states = []

    def on_fit_start(self, trainer, module):
        first, *_, last = next(
            m for m in module.networks.actor.modules() if isinstance(m, torch.nn.ModuleList)
        )
        for name, block in (("first", first), ("last", last)):
            block.forward = self._counting(name, block.forward)

    def _counting(self, name, forward):
        def counting(*args, **options):
            setattr(self, name, getattr(self, name) + self.updating)
            return forward(*args, **options)

        return counting

    def on_train_batch_start(self, trainer, module, batch, *_):
        self.updating = True
        self.states.append(batch.experience.sequences.trunk)

    def on_train_batch_end(self, *_):
        self.updating = False


def module_of(folder: Path, *, cache=True, kind="separate", **settings):
    policy = {"lora": LoraConfig(rank=4, layers=1), "dtype": "float64", "cache_frozen_trunk": cache}
    return ppo_module(folder, policy=policy, critic_model={"kind": kind}, **settings)


def comparable(stats):
    skipped = ("time/", "run/memory_gib")
    return {k: v for k, v in stats.to_log().items() if not k.startswith(skipped)}


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_a_run_is_the_same_and_its_updates_leave_frozen_blocks_alone(
    tiny_model_dir, tmp_path, kind
):
    runs, blocks, files = {}, {}, {}
    for cache in (True, False):
        module = module_of(tiny_model_dir, cache=cache, kind=kind, ppo={"microbatch_tokens": 40})
        blocks[cache] = CountsBlocks()
        callbacks = [blocks[cache], ModelCheckpoint(filename="{epoch}")]
        found = fit(tmp_path / str(cache), module, data_module(), callbacks=callbacks)
        runs[cache] = found.stats, parameters(module)
        (file,) = (tmp_path / str(cache)).rglob("epoch=2.ckpt")
        files[cache] = torch.load(file, weights_only=True)
    (stats, weights), (expected_stats, expected) = runs[True], runs[False]
    for now, then in zip(stats, expected_stats, strict=True):
        assert comparable(now) == pytest.approx(comparable(then), rel=1e-6, abs=1e-9, nan_ok=True)
    for name, value in expected.items():
        assert_close(weights[name], value, rtol=1e-9, atol=1e-9, msg=name)
    assert (blocks[True].first, blocks[False].first) == (0, blocks[False].last)
    assert blocks[True].last == blocks[False].last > 0
    assert all(trunk is None for trunk in blocks[False].states)
    assert files[True]["state_dict"].keys() == files[False]["state_dict"].keys()
    assert files[True]["ppo_lightning"].keys() == files[False]["ppo_lightning"].keys()


class Lifetimes(pl.Callback):
    """Looks, when a buffer has been made, whether states of an earlier one are still there."""

    def __init__(self):
        self.made, self.left = [], 0

    def on_rollout_end(self, trainer, module, collected):
        self.left += sum(states() is not None for states in self.made)
        self.made.append(weakref.ref(collected.experience.sequences.trunk.states))


def test_states_are_gone_with_their_buffer(tiny_llama_dir, tmp_path):
    lifetimes = Lifetimes()
    run = trainer(tmp_path, callbacks=[lifetimes])
    run.fit(module_of(tiny_llama_dir), data_module(val_prompts=["a big tree"]))
    assert len(lifetimes.made) == 3
    assert lifetimes.left == 0


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_replay_makes_the_states_again_of_all_that_was_sampled(tiny_llama_dir, tmp_path):
    cut = RewardProcessing(mask_truncated=True)
    keep = ModelCheckpoint(filename="{epoch}", save_top_k=-1)
    blocks = CountsBlocks()
    settings = {"reward_processing": cut, "sampling": {"max_new_tokens": 40}}
    module = module_of(tiny_llama_dir, **settings)
    callbacks = [keep, DumpBuffers(), blocks]
    original = fit(tmp_path, module, data_module(), max_epochs=2, callbacks=callbacks)
    file = tmp_path / "buffers/iteration_0001.rank0.pt"
    dumped = load_buffer(file)
    assert dumped.experience.sequences.trunk is None
    assert dumped.response_mask.sum() > dumped.experience.sequences.response_mask.sum()
    again, replayed_blocks = module_of(tiny_llama_dir, **settings), CountsBlocks()
    replayed = fit(
        tmp_path / "again",
        again,
        ReplayDataModule(str(file)),
        ckpt=tmp_path / "checkpoints/epoch=0.ckpt",
        max_epochs=2,
        callbacks=[replayed_blocks],
    )
    assert torch.equal(replayed_blocks.states[-1].states, blocks.states[-1].states)
    assert replayed.stats[0].policy_loss == original.stats[1].policy_loss
    for name, value in parameters(module).items():
        assert value.equal(dict(again.named_parameters())[name]), name
