"""Weights in shards: put together, cut again, and copied in each of the forms that they come in."""

import pytest
import torch
from torch import nn

from ppo_lightning.distributed import (
    gathered,
    is_sharded,
    local,
    mapped,
    num_copies,
    placed_like,
    rank,
    shard,
    whole,
    whole_on_cpu,
)
from tests.helpers.processes import run_on_ranks


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))


def cut():
    """A network of two layers over two ranks."""
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    made = network()
    shard(made, made, mesh)
    return made


def put_together():
    made, plain = cut(), network()
    shares = [local(p.detach()).shape for p in made.parameters()]
    x = torch.ones(2, 3)
    with gathered(made), torch.no_grad():
        inside = [p.shape for p in made.parameters()]
        own = made(x) if rank() else made(made(x)[:, :1].expand(2, 3))  # ranks make other passes
    after = [local(p.detach()).shape for p in made.parameters()]
    with torch.no_grad():
        made[0].weight.mul_(2)
        plain[0].weight.mul_(2)
    with gathered(made), torch.no_grad():
        renewed = torch.equal(made(x), plain(x))
    return shares == after, inside, [p.shape for p in plain.parameters()], renewed, own.shape


def test_t47_weights_are_whole_inside_and_shares_afterwards():
    for same, inside, wanted, renewed, _ in run_on_ranks(put_together, 2):
        assert same
        assert inside == wanted
        assert renewed


def placed():
    made, plain = cut(), network()
    found = []
    for share, full in zip(made.parameters(), plain.parameters(), strict=True):
        share, full = share.detach(), full.detach()
        forms = (full, local(share), share)
        found += [torch.equal(whole(placed_like(form, share)), full) for form in forms]
        found.append(torch.equal(placed_like(share, full), full))
        found.append(num_copies(share, 2) == 1)
    tree = {"a": [made[0].weight.detach(), 3], "b": (made[1].bias.detach(),)}
    kept = whole_on_cpu(tree, keep=rank() == 0)
    sizes = [kept["a"][0].numel(), kept["b"][0].numel()]
    return all(found), is_sharded(made), is_sharded(plain), sizes, kept["a"][1]


def test_tensors_come_to_where_others_lie_whole_in_parts_or_in_shards():
    first, second = run_on_ranks(placed, 2)
    assert first == (True, True, False, [15, 1], 3)
    assert second == (True, True, False, [0, 0], 3)


def test_plain_tensors_are_left_alone():
    tensor = torch.ones(2)
    assert whole(tensor) is tensor
    assert local(tensor) is tensor
    assert placed_like(tensor, torch.zeros(2)) is tensor
    with gathered(network()):
        pass


def test_containers_are_copied_with_every_tensor_changed():
    tree = {"a": [torch.ones(1)], "b": ("text", torch.zeros(1))}
    found = mapped(tree, lambda tensor: tensor + 1)
    assert found == {"a": [torch.tensor([2.0])], "b": ("text", torch.tensor([1.0]))}
    assert tree["a"][0] == 1


def test_an_error_inside_leaves_shares():
    assert run_on_ranks(left_by_an_error, 2) == [True, True]


def left_by_an_error():
    made = cut()
    with pytest.raises(ValueError, match="a bad draw"), gathered(made):
        raise ValueError("a bad draw")
    return all(hasattr(p, "full_tensor") for p in made.parameters())
