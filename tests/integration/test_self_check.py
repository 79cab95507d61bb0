"""In bfloat16, too, the check of the first ratio lets rounding pass and finds what it is for."""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch

from ppo_lightning.configs import GuardConfig
from ppo_lightning.errors import UpdateError
from tests.helpers.runs import Recorder, data_module, ppo_module, trainer


class Fault(pl.Callback):
    """Lets the update read a buffer otherwise than the pass that made it."""

    def __init__(self, kind):
        self.kind = kind

    def on_train_start(self, trainer, module):
        objective, networks = module.updater.objective, module.networks
        if self.kind == "temperature":
            module.updater.objective = replace(objective, networks=_colder(networks))
        if self.kind == "mask":
            module.updater.objective = replace(objective, networks=_off_by_one(networks))
        if self.kind == "dropout":
            for layer in networks.actor.model.layers:
                layer.register_forward_hook(_drop)


def _colder(networks):
    """Scored at another temperature than the buffer's."""

    def read(sequences, *, temperature, **options):
        return networks(sequences, temperature=0.95 * temperature, **options)

    return _instead_of(networks, read)


def _off_by_one(networks):
    """The last token of every prompt is taken for padding."""

    def read(sequences, **options):
        mask = sequences.prompt_mask.clone()
        mask[:, -1] = False
        return networks(replace(sequences, prompt_mask=mask), **options)

    return _instead_of(networks, read)


def _instead_of(networks, read):
    read.packs, read.critic, read.parameters = networks.packs, networks.critic, networks.parameters
    return read


def _drop(layer, inputs, output):
    return torch.nn.functional.dropout(output, 0.1) if torch.is_grad_enabled() else output


@pytest.fixture
def run(tiny_llama_dir, tmp_path):
    def made(fault, precision="bf16-mixed", **policy):
        module = ppo_module(
            tiny_llama_dir,
            policy=policy,
            sampling={"max_new_tokens": 24},
            guards=GuardConfig(self_check="error", advice="off"),
        )
        data = data_module(buffer={"num_prompts": 16, "num_minibatches": 4})
        recorder = Recorder()
        options = {"callbacks": [recorder, Fault(fault)], "precision": precision, "max_epochs": 2}
        trainer(tmp_path, **options).fit(module, data)
        return recorder.stats

    return made


def test_rounding_passes(run):
    """Padded, the passes differ in shape: a minibatch may lack the longest prompt."""
    errors = [stats.first_ratio_error for stats in run(None, padding_free=False)]
    assert max(errors) > 1e-3
    assert max(errors) < 0.05


def test_without_padding_the_passes_differ_in_nothing(run):
    assert max(stats.first_ratio_error for stats in run(None)) < 1e-3


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("kind", ["temperature", "mask", "dropout"])
def test_t10_t11_t17_a_fault_is_found(run, kind, precision):
    with pytest.raises(UpdateError, match="The ratio is not 1 before the first update"):
        run(kind, precision)
