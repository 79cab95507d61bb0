"""Bytes are counted once, while they are there."""

import torch
from torch import nn

from ppo_lightning.estimate.tally import Blank, ByteTally, claiming_gradients


def test_what_is_freed_no_longer_counts_and_the_peak_is_remembered():
    with ByteTally() as tally:
        a = torch.ones(256)  # 1 KiB
        b = a + 1
        del a
        view = b.view(2, 128)
        assert (tally.total, tally.peak) == (1024, 2048)
        tally.restart()
        assert tally.peak == 1024
        del b
        assert tally.total == 1024  # the view keeps it
        del view
    assert tally.total == 0


def test_kinds_add_up_to_the_peak():
    weight = torch.ones(4, 8)
    tally = ByteTally(logits_width=4)
    tally.claim([weight, weight.t()], "actor")
    with tally:
        hidden = torch.ones(3, 8)
        logits = hidden @ weight.t()
        assert logits.shape == (3, 4)
    assert tally.at_peak == {"actor": 128, "activations": 96, "logits": 48}
    tally.rename("activations", "KV cache")
    assert tally.now == {"actor": 128, "KV cache": 96, "logits": 48}


def test_blank_weights_stay_tied_and_what_they_touch_is_blank():
    blank, net = Blank(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    blank.fill(net)
    assert net[0].weight is net[1].weight
    assert blank.is_blank(net[0].weight)
    lengths = torch.tensor([2, 1])  # of the ordinary kind: looked at by the code that is tried
    assert lengths.tolist() == [2, 1]
    assert blank.is_blank(net(torch.ones(2, 4))[lengths])


def test_gradients_are_counted_as_such():
    net = nn.Linear(8, 8, bias=False)
    tally = ByteTally()
    with tally, claiming_gradients(tally, net):
        net(torch.ones(2, 8)).sum().backward()
    assert tally.now["gradients"] == 256
    assert net._parameters["weight"]._post_accumulate_grad_hooks == {}
