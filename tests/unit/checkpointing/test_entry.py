"""What a checkpoint leaves out, and how it is put back."""

import copy

import pytest
import torch
from torch import nn

from ppo_lightning.checkpointing.entry import (
    KEY,
    check_beside,
    pack_checkpoint,
    unpack_checkpoint,
)
from ppo_lightning.errors import CheckpointError
from ppo_lightning.models import fingerprint

BESIDE = {"`reference.path`": "", "`path` of the reward `judge`": "ab"}


class Small(nn.Module):
    """A frozen trunk whose two ends are tied, an adapter, a critic."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Embedding(5, 3).requires_grad_(False)
        self.lm_head = nn.Linear(3, 5, bias=False).requires_grad_(False)
        self.lm_head.weight = self.trunk.weight
        self.adapter = nn.Linear(3, 3)
        self.critic = nn.Linear(3, 1)
        self.register_buffer("counter", torch.tensor(3.0))


def packed(module, *, complete=True):
    checkpoint = {"state_dict": copy.deepcopy(module.state_dict()), "epoch": 3}
    pack_checkpoint(
        checkpoint, module, complete=complete, extra={"controls": {"a": [1]}}, beside=BESIDE
    )
    return checkpoint


def test_t55_frozen_weights_stay_out_under_either_of_their_names():
    checkpoint = packed(Small())
    trained = {f"{part}.{kind}" for part in ("adapter", "critic") for kind in ("weight", "bias")}
    assert set(checkpoint["state_dict"]) == trained | {"counter"}
    assert checkpoint[KEY]["controls"] == {"a": [1]}


def test_t51_the_way_back_loads_strictly_and_keeps_the_running_trunk(tmp_path):
    module = Small()
    with torch.no_grad():
        module.adapter.weight.fill_(7.0)
    torch.save(packed(module), tmp_path / "c.ckpt")
    checkpoint = torch.load(tmp_path / "c.ckpt", weights_only=True)  # T56
    resumed = Small()
    entry = unpack_checkpoint(checkpoint, resumed)
    resumed.load_state_dict(checkpoint["state_dict"], strict=True)
    assert entry["controls"] == {"a": [1]}
    for name, value in module.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert resumed.lm_head.weight is resumed.trunk.weight


def test_t55_the_fingerprint_is_of_the_frozen_weights_alone():
    module = Small()
    before = fingerprint(module)
    with torch.no_grad():
        module.adapter.weight.add_(1.0)
    assert fingerprint(module) == before
    with torch.no_grad():
        module.trunk.weight[4, 2] += 1e-3
    assert fingerprint(module) != before
    assert fingerprint(nn.Linear(2, 2)) == ""


def refused(change, match, module=None):
    checkpoint = packed(Small())
    change(checkpoint)
    with pytest.raises(CheckpointError, match=match):
        unpack_checkpoint(checkpoint, module or Small())


def test_files_that_cannot_be_resumed_say_why():
    refused(lambda c: c.pop(KEY), r"policy\.path")
    refused(lambda c: c[KEY].update(format_version=99), "format 99.*update ppo-lightning")
    refused(lambda c: c[KEY].update(format_version=1), "format 1, of an earlier version.*export")
    refused(lambda c: c[KEY].update(complete=False), "inside an iteration")
    refused(lambda c: None, "base weights", module=Small(seed=1))
    refused(lambda c: c["state_dict"].pop("adapter.bias"), r"lacks 1 weights.*adapter\.bias")


@pytest.mark.parametrize(
    ("kind", "slot"), [("ppo", "policy"), ("sft", "policy"), ("reward", "backbone")]
)
def test_another_base_is_named_by_its_option_and_by_what_it_was(kind, slot):
    """A run's folder means its latest model, which another run may have written since."""
    checkpoint = packed(Small())
    checkpoint[KEY].update(kind=kind, models={slot: {"path": "runs/sft"}})
    match = rf"`{slot}\.path`.*`runs/sft`.*lightning_logs/version_"
    with pytest.raises(CheckpointError, match=match):
        unpack_checkpoint(checkpoint, Small(seed=1), kind=kind)


@pytest.mark.parametrize("lost", [["critic.bias"], ["critic.weight", "critic.bias"]])
def test_t51_a_missing_critic_is_named(lost):
    def change(checkpoint):
        for name in lost:
            del checkpoint["state_dict"][name]

    refused(change, "lacks the critic's weights.*ppo-lightning export")


class Other(Small):
    """A policy of another family, whose weights have other names."""

    def __init__(self):
        super().__init__()
        self.layer, self.adapter = self.adapter, None
        self.critic = nn.Linear(4, 1)


def test_another_policy_or_critic_is_not_called_a_missing_critic():
    def named_models(checkpoint):
        paths = {"policy": {"path": "first/model"}, "critic_model": {"path": None}}
        checkpoint[KEY]["models"] = paths

    refused(
        named_models, r"another policy .*`adapter\.weight`.* from `first/model`.*policy`", Other()
    )

    wide, bigger = Small(), Small()
    wide.critic, bigger.adapter = nn.Linear(4, 1), nn.Linear(3, 4)
    refused(named_models, r"another critic .*\[1, 3\] there and \[1, 4\] here", wide)
    refused(named_models, r"another policy .*\[3, 3\] there and \[4, 3\] here", bigger)


def test_models_beside_the_module_are_compared_by_name():
    entry = packed(Small())[KEY]
    check_beside(entry, BESIDE)
    check_beside(entry, {"`path` of the reward `new`": "cd"})  # rewards may come and go
    check_beside({}, BESIDE)  # a file of an earlier version
    with pytest.raises(CheckpointError, match=r"^`reference\.path`: other weights"):
        check_beside(entry, BESIDE | {"`reference.path`": "cd"})
    with pytest.raises(
        CheckpointError, match=r"^`path` of the reward `judge`: other .* Give the former model; to"
    ):
        check_beside(entry, BESIDE | {"`path` of the reward `judge`": "cd"})
