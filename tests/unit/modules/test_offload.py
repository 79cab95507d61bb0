"""Adam whose states stay on the CPU: the plain class's numbers, state and settings."""

import math
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from torch.testing import assert_close

from ppo_lightning.callbacks.pull_back import clear_state
from ppo_lightning.configs import OptimizerConfig
from ppo_lightning.errors import ConfigError
from ppo_lightning.modules import offload
from ppo_lightning.modules.offload import OffloadedAdam
from ppo_lightning.modules.optim import clip_gradients, gradient_norm, optimizer_over

SHAPES = ((7, 5), (11,), (3, 4, 2), (6,))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _as_from_elsewhere(monkeypatch):
    """Bring down a copy, as from a GPU, also of what lies on the CPU."""
    real = offload.to_cpu

    def copied(tensor):
        return tensor.clone() if tensor.device.type == "cpu" else real(tensor)

    monkeypatch.setattr(offload, "to_cpu", copied)


def weights(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in SHAPES
    ]  # fmt: skip


def build(parameters, *, offload=True, **config):
    groups = {"actor": (parameters[:2], 1e-2), "critic": (parameters[2:], 3e-3)}
    return optimizer_over(groups, OptimizerConfig(offload=offload, weight_decay=0.1, **config))


def step(optimizer, seed, *, idle=(), scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            grad = scale * torch.randn(p.shape, generator=generator)
            p.grad = None if group["name"] in idle else grad.to(p.device)
        clip_gradients(group["params"], max_norm=1.0, norm=gradient_norm(group["params"]))
    optimizer.step()
    optimizer.zero_grad()


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def require_same(found, expected, **tolerances):
    """Weights and everything in the state, bitwise unless tolerances are given."""
    tolerances = tolerances or {"rtol": 0, "atol": 0}
    for mine, theirs in zip(parameters_of(found), parameters_of(expected), strict=True):
        assert_close(mine.detach().cpu(), theirs.detach().cpu(), **tolerances)
    mine, theirs = found.state_dict(), expected.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for key, state in mine["state"].items():
        assert type(state) is dict  # a checkpoint holds plain containers
        assert state.keys() == theirs["state"][key].keys()
        for name, value in state.items():
            assert_close(value.cpu(), theirs["state"][key][name].cpu(), **tolerances)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("portion", [1, 40, 10**6])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": False}], ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_numbers_are_those_of_the_plain_class(name, options, portion, device, monkeypatch):
    monkeypatch.setattr(offload, "PORTION", portion)
    found = build(weights(device), name=name, options=options)
    expected = build(weights(), offload=False, name=name, options=options)
    for seed in range(4):
        for optimizer in (found, expected):
            idle = ("actor",) if seed == 2 else ()
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + seed)  # as a schedule does
            step(optimizer, seed, idle=idle, scale=10.0)
    tolerances = {} if device == "cpu" else {"rtol": 1e-5, "atol": 1e-6}
    require_same(found, expected, **tolerances)


@pytest.mark.parametrize("to_offload", [True, False])
def test_a_run_may_switch_on_resume(to_offload):
    before, whole = build(weights(), offload=not to_offload), build(weights(), offload=False)
    for seed in range(2):
        step(before, seed)
        step(whole, seed)
    after = build([torch.nn.Parameter(p.detach().clone()) for p in parameters_of(before)],
                  offload=to_offload)  # fmt: skip
    after.load_state_dict(before.state_dict())
    for seed in range(2, 4):
        step(after, seed)
        step(whole, seed)
    require_same(after, whole)


def test_weights_that_others_change_between_steps_are_seen():
    found, expected = build(weights()), build(weights(), offload=False)
    for optimizer in (found, expected):
        step(optimizer, 0)
        with torch.no_grad():
            parameters_of(optimizer)[0].mul_(0.5)
        parameters_of(optimizer)[1].data.zero_()  # no version counter sees this one
        step(optimizer, 1)
    require_same(found, expected)


def test_parameters_stay_the_tensors_that_others_hold():
    parameters = weights()
    held = [p.data_ptr() for p in parameters]
    before = [p.detach().clone() for p in parameters]
    step(build(parameters), 0)
    assert [p.data_ptr() for p in parameters] == held
    assert not any(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


class Elsewhere(torch.Tensor):
    """Stands for a tensor on a GPU."""

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_states_stay_where_they_are_when_lightning_moves_them(monkeypatch):
    found = build(weights())
    move = "lightning.fabric.utilities.optimizer.move_data_to_device"
    monkeypatch.setattr(move, lambda value, device: value.as_subclass(Elsewhere))
    _optimizer_to_device(found, "cuda")
    parameter = parameters_of(found)[0]
    found.state[parameter] = {"exp_avg": torch.zeros(7, 5).as_subclass(Elsewhere)}
    assert {type(v) for state in found.state.values() for v in state.values()} == {torch.Tensor}


@pytest.mark.gpu
def test_states_stay_on_the_cpu_of_a_gpu():
    found = build(weights("cuda"))
    _optimizer_to_device(found, "cuda")
    found.load_state_dict(build(weights("cuda"), offload=False).state_dict())
    step(found, 0)
    kinds = {v.device.type for state in found.state.values() for v in state.values()}
    assert kinds == {"cpu"}


def test_what_is_remembered_of_a_group_can_be_cleared():
    found, expected = build(weights()), build(weights(), offload=False)
    for optimizer in (found, expected):
        step(optimizer, 0)
        clear_state(optimizer, "actor")
        step(optimizer, 1)
    require_same(found, expected)


def test_a_gradient_scaler_skips_a_step_that_overflowed():
    found, expected = build(weights()), build(weights(), offload=False)
    for optimizer in (found, expected):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (1.0, math.inf, 2.0):
            loss = sum((p * factor).square().sum() for p in parameters_of(optimizer))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    require_same(found, expected)
    assert int(found.state_dict()["state"][0]["step"]) == 2


class Regression(pl.LightningModule):
    """Fits by a closure that Lightning hands to the optimiser."""

    def __init__(self, offload):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.offload = torch.nn.Linear(3, 1), offload

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        config = OptimizerConfig(offload=self.offload)
        return optimizer_over({"all": (list(self.parameters()), 1e-2)}, config)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightnings_own_loop_and_precision(precision, tmp_path):
    found = []
    for offloaded in (True, False):
        data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
        trainer = pl.Trainer(
            max_epochs=2,
            precision=precision,
            accelerator="cpu",
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Regression(offloaded)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        found.append(module.layer.weight.detach())
    assert torch.equal(*found)


def test_other_classes_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"^`optimizer\.offload` is for Adam and AdamW.* SGD"):
        build(weights(), name="SGD")


def test_shards_are_refused(monkeypatch):
    shard = torch.nn.Parameter(torch.zeros(2))
    shard.full_tensor = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"in shards cannot be offloaded; leave `offload` out"):
        build([shard, shard])


def test_on_a_cpu_nothing_is_copied(monkeypatch):
    monkeypatch.undo()
    tensor = torch.ones(3)
    assert offload.to_cpu(tensor) is tensor
    assert OffloadedAdam([{"params": weights()}], torch.optim.AdamW, lr=1e-2)


def test_states_need_not_be_there_before_the_first_step():
    """``optimizer_over`` fills them; the class alone does not need it."""
    found = []
    for kind in (
        lambda groups, **o: OffloadedAdam(groups, torch.optim.AdamW, **o),
        torch.optim.AdamW,
    ):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([{"params": [weight]}], lr=0.1)
        for gradient in (1.0, -3.0, 2.0):
            weight.grad = torch.full((3,), gradient)
            optimizer.step()
        found.append(weight.detach())
    assert_close(*found)
