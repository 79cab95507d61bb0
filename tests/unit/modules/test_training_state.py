"""What is captured of a module, and that it comes back bitwise into the same tensors."""

import lightning.pytorch as pl
import pytest
import torch

from ppo_lightning.checkpointing import copied
from ppo_lightning.configs import GroupConfig, LoraConfig, OptimizerConfig, RewardProcessing
from ppo_lightning.errors import CheckpointError
from ppo_lightning.modules.training_state import all_finite, capture, finite_weights, restore
from tests.helpers.runs import data_module, fit, ppo_module

VARIANTS = {
    "separate": {},
    "shared": {"critic_model": {"kind": "shared"}},
    "lora": {"policy": {"lora": LoraConfig(rank=4)}},
    "sgd": {"optimizer": OptimizerConfig(name="SGD", options={"momentum": 0.9})},
    "normalised": {"reward_processing": RewardProcessing(normalize="running")},
}


def alike(one, two):
    """Bitwise equality of nested containers."""
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.cpu().equal(two.cpu())
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(alike(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(alike, one, two))
    return one == two


class BackAndForth(pl.Callback):
    """Captures after the first iteration, restores after the second, looks after the third."""

    def __init__(self):
        self.seen, self.addresses, self.rates = [], [], []

    def on_iteration_end(self, trainer, module, stats):
        if stats.iteration == 0:
            self.kept = copied(capture(module))
            self.before = copied(self.kept)
        self.seen.append(copied(capture(module)))
        self.addresses.append([p.data_ptr() for p in module.parameters()])
        if stats.iteration == 1:
            module.skips.in_a_row = 1
            restore(module, self.kept)
            self.restored = copied(capture(module))


@pytest.mark.parametrize("variant", VARIANTS)
def test_restore_is_bitwise_in_place_and_leaves_the_snapshot_alone(
    tiny_llama_dir, tmp_path, variant
):
    schedule = {
        "actor": GroupConfig(lr=1e-3, warmup=3, schedule="cosine"),
        "critic": GroupConfig(lr=3e-3, schedule="linear"),
    }
    module, there = ppo_module(tiny_llama_dir, **VARIANTS[variant], **schedule), BackAndForth()
    fit(tmp_path, module, data_module(), callbacks=[there], enable_checkpointing=False)
    first, second, third = there.seen
    for part in ("weights", "optimizer", "scheduler"):
        assert not alike(first[part], second[part]), part
    if variant == "normalised":
        assert first["rewards"] != second["rewards"]
    assert alike(there.restored, there.kept)
    assert not alike(third["weights"], first["weights"]), "the run went on"
    assert alike(there.kept, there.before), "the run changed the snapshot"
    assert there.addresses[0] == there.addresses[2]


def test_only_what_is_trained_is_captured(tiny_llama_dir, tmp_path):
    module = ppo_module(tiny_llama_dir, **VARIANTS["lora"])
    there = BackAndForth()
    fit(tmp_path, module, data_module(), callbacks=[there], enable_checkpointing=False)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained <= there.kept["weights"].keys()
    assert not any("base_layer" in name for name in there.kept["weights"])


class Average(pl.Callback):
    """Follows the run, and goes back with it if it says so."""

    def __init__(self, goes_back):
        self.goes_back, self.value = goes_back, torch.zeros(1)

    def on_update_end(self, trainer, module, stats):
        self.value.add_(1)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


@pytest.mark.parametrize(("goes_back", "value"), [(True, 2), (False, 3)])
def test_callbacks_that_say_so_go_back_as_well(tiny_llama_dir, tmp_path, goes_back, value):
    average, there = Average(goes_back), BackAndForth()
    module = ppo_module(tiny_llama_dir)
    fit(tmp_path, module, data_module(), callbacks=[average, there], enable_checkpointing=False)
    assert average.value == value
    assert alike(there.kept, there.before)


class Mismatched(pl.Callback):
    def on_iteration_end(self, trainer, module, stats):
        state = copied(capture(module))
        name, value = next(iter(state["weights"].items()))
        state["weights"][name] = value[:1]
        before = copied(dict(module.state_dict()))
        with pytest.raises(CheckpointError, match=f"other networks: `{name}`"):
            restore(module, state)
        assert alike(before, copied(dict(module.state_dict())))
        self.done = True


def test_a_state_of_other_networks_is_refused_before_anything_is_changed(tiny_llama_dir, tmp_path):
    there = Mismatched()
    module = ppo_module(tiny_llama_dir)
    options = {"max_epochs": 1, "enable_checkpointing": False}
    fit(tmp_path, module, data_module(), callbacks=[there], **options)
    assert there.done


def test_a_number_that_is_not_finite_is_found_in_weights_and_moments():
    moments = {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)}}
    state = {"weights": {"w": torch.zeros(2)}, "optimizer": {"state": moments}}
    assert all_finite(state)
    moments[0]["exp_avg"][1] = torch.inf
    assert not all_finite(state)
    linear = torch.nn.Linear(1, 1)
    assert finite_weights(linear)
    linear.bias.data.fill_(torch.nan)
    assert not finite_weights(linear)
    linear.bias.requires_grad_(False)
    assert finite_weights(linear), "frozen weights are not looked at"
