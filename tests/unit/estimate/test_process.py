"""What a process takes beside its tensors."""

import pytest
import torch

from ppo_lightning.configs import LoraConfig, PolicyConfig
from ppo_lightning.estimate import Run, estimate, maps_blocks, process
from ppo_lightning.estimate.process import (
    ADAPTER_LIBRARY,
    KERNELS,
    LIBRARIES,
    MAPPED,
    MIXED,
    PLAIN,
    QUANTISER_LIBRARY,
    RECOMPUTED,
    VOCABULARY_ENTRY,
    HeapShares,
    process_bytes,
)
from ppo_lightning.modules.host_memory import KEPT_BYTES


@pytest.mark.parametrize("installed", [True, False])
def test_libraries_grow_with_what_is_used(monkeypatch, installed):
    monkeypatch.setattr(process, "find_spec", lambda name: installed or None)

    def libraries(**settings):
        given = {"vocabulary": 0, "adapted": False, "computes": False} | settings
        return process_bytes(0, 0, PLAIN, **given)["libraries"]

    assert libraries() == LIBRARIES
    assert libraries(vocabulary=10) == LIBRARIES + 10 * VOCABULARY_ENTRY
    adapters = ADAPTER_LIBRARY + installed * QUANTISER_LIBRARY
    assert libraries(adapted=True, computes=True) == LIBRARIES + adapters + KERNELS


def test_the_heap_keeps_shares_of_this_stage_and_of_those_before():
    given = {"vocabulary": 0, "adapted": False, "computes": True}
    shares = HeapShares(0.5, 0.1)
    assert process_bytes(100, 1000, shares, **given)["heap"] == 50 + 90
    assert process_bytes(100, 80, shares, **given)["heap"] == 50
    assert process_bytes(0, 2 * KEPT_BYTES, shares, **given)["heap"] == KEPT_BYTES // 10


def holding(size):
    """A stage whose tensors take so many bytes."""
    return lambda *_: torch.empty(size, dtype=torch.uint8), ("policy",)


@pytest.fixture
def parts_of(tiny_llama_dir, monkeypatch):
    passes = {"rollout": holding(4000), "reward": holding(1000), "update": holding(2000)}
    monkeypatch.setattr("ppo_lightning.estimate.memory._PASSES", passes)

    def parts(*, lora=None, gradient_checkpointing=False, **settings):
        policy = PolicyConfig(
            path=str(tiny_llama_dir), lora=lora, gradient_checkpointing=gradient_checkpointing
        )
        found = estimate(Run(policy=policy, prompt_tokens=5, **settings))
        return {stage.name: stage.parts for stage in found.stages}

    return parts


def test_nothing_has_been_computed_when_everything_is_loaded(parts_of):
    load, *others = (parts["libraries"] for parts in parts_of().values())
    assert {size - load for size in others} == {KERNELS}


@pytest.mark.parametrize(
    ("settings", "reward", "update"),
    [
        ({}, PLAIN, PLAIN),
        ({"lora": LoraConfig(rank=2)}, PLAIN, MIXED),  # a reward model has no adapters
        ({"precision": "bf16-mixed"}, PLAIN, MIXED),
        ({"gradient_checkpointing": True}, PLAIN, RECOMPUTED),
        ({"mapped": True}, MAPPED, MAPPED),
    ],
)
def test_what_a_stage_leaves_in_the_heap_follows_from_its_tensors(
    parts_of, settings, reward, update
):
    parts = parts_of(**settings)
    assert parts["reward"]["heap"] == int(1000 * reward.own + 3000 * reward.before)
    assert parts["update"]["heap"] == int(2000 * update.own + 2000 * update.before)


def test_blocks_are_mapped_where_the_environment_fixes_the_bound():
    assert maps_blocks({"MALLOC_MMAP_THRESHOLD_": "131072"})
    assert not maps_blocks({"HOME": "/"})
