"""Strategies, architectures and hardware: what they say, and what they refuse."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ppo_lightning.configs import PolicyConfig
from ppo_lightning.estimate import (
    ARCHITECTURES,
    HARDWARE,
    Architecture,
    Run,
    Strategy,
    hardware_of,
    named_architecture,
    strategy_of,
)

# Counted from the files on the hub: what a model card shows as its parameters.
PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
}


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("ddp", (False, False, False)),
        ("deepspeed_stage_1", (True, False, False)),
        ("deepspeed", (True, True, False)),
        ("deepspeed_stage_3", (True, True, True)),
        ("fsdp", (True, True, True)),
    ],
)
def test_what_each_strategy_cuts(name, cuts):
    found = strategy_of(name, ranks=8)
    assert (found.cuts_states, found.cuts_gradients, found.cuts_weights) == cuts


def test_auto_is_one_process_or_ddp():
    assert [strategy_of("auto", ranks=n).kind for n in (1, 2)] == ["single", "ddp"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: strategy_of("fsdp1", ranks=2), "`trainer.strategy: fsdp1` cannot be estimated"),
        (lambda: Strategy(kind="ddp", tensor=2), "tensor parallel goes with `fsdp`, not"),
        (lambda: Strategy(kind="deepspeed", stage=4), "`stage` of DeepSpeed must be 1, 2 or 3"),
        (lambda: Strategy(kind="fsdp", stage=1), "`stage` is DeepSpeed's; `fsdp` has none"),
        (lambda: Strategy(kind="fsdp", tensor=0), "`tensor` must be at least 1, got 0"),
        (lambda: named_architecture("gpt-9"), "`--architecture gpt-9` is not known: take one of"),
        (
            lambda: ARCHITECTURES["llama-3.1-8b"].on_one_of(3),
            r"`--tensor-parallel 3` does not divide the model's heads \(32\)",
        ),
        (
            lambda: Architecture.of_settings({"model_type": "gpt2"}, "x"),
            "`x` is of the family 'gpt2'",
        ),
        (
            lambda: Run(
                policy=PolicyConfig(path="x"),
                prompt_tokens=4,
                ranks=6,
                strategy=Strategy(kind="fsdp", tensor=4),
            ),
            "`--tensor-parallel 4` does not divide the 6 ranks",
        ),
        (lambda: hardware_of(["tpu"]), "`--hardware tpu` is not known: take one of h100"),
        (lambda: hardware_of(["h100", "h200"]), "`--hardware` takes one name"),
        (lambda: hardware_of(["flop=1"]), "there is no flop; known are flops"),
        (lambda: hardware_of(["memory=much"]), "`--hardware memory=much`: 'much' is no number"),
        (lambda: hardware_of(["flops_share=2"]), r"`flops_share` must lie in .*, got 2"),
        (lambda: hardware_of(["memory=0"]), "`memory` must be .* 0"),
        (lambda: hardware_of(["node_gpus=2.5"]), "must be a whole number"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("name", PUBLISHED)
def test_architectures_have_the_published_number_of_weights(name):
    assert ARCHITECTURES[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_as_transformers_makes_them(tied):
    shape = Architecture(
        layers=3,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_width=8,
        intermediate=48,
        vocabulary=50,
        tied=tied,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape.settings()))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    assert shape.block_parameters == block
    assert Architecture.of_settings(shape.settings(), "x") == shape
    # Two ranks: half of the products, both norms, all of the embedding.
    half = shape.on_one_of(2)
    assert half.block_parameters == (block - 64) // 2 + 64
    assert half.other_parameters == shape.other_parameters
    assert half.kv_width == shape.kv_width / 2


def test_hardware_is_named_and_changed():
    found = hardware_of(["h200", "network_bandwidth=25e9", "node_gpus=4"])
    assert (found.memory, found.network_bandwidth, found.node_gpus) == (141e9, 25e9, 4)
    assert hardware_of([]) == HARDWARE["h100"]


def test_a_ring_over_nodes_is_as_fast_as_the_network_cards_of_its_ranks():
    h = hardware_of(["network_share=1"])
    assert h.link(8) == 450e9
    assert h.link(16) == 400e9  # eight cards of 50 GB/s
    assert h.link(8, apart=8) == 50e9  # one rank of each node
    assert h.link(2, apart=4) == 450e9  # both in one node
    assert HARDWARE["h100"].link(8) == pytest.approx(0.7 * 450e9)
