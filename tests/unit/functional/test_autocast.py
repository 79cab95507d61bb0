"""Autocast off for a block, and as it was after it."""

import torch

from ppo_lightning.functional import autocast_off
from ppo_lightning.models.value_network import ValueHead


def product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_products_have_the_dtype_of_the_tensors_inside_and_autocasts_outside():
    with torch.autocast("cpu", torch.bfloat16):
        with autocast_off("cpu"):
            assert product() == torch.float32
        assert product() == torch.bfloat16
    with autocast_off("cpu"):
        assert product() == torch.float32


def test_nothing_is_entered_where_it_is_off(monkeypatch):
    monkeypatch.setattr(torch, "autocast", None)
    with autocast_off("cpu"):
        assert product() == torch.float32


def test_a_compiled_head_is_one_graph_with_autocast_and_without():
    head, states = ValueHead(4, init="normal"), torch.randn(3, 4)
    expected = head(states)
    compiled = torch.compile(head, backend="eager", fullgraph=True)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert torch.equal(compiled(states), expected)
