"""The actor is brought back towards the reference."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close

from ppo_lightning.callbacks import PullBack, RefreshReference
from ppo_lightning.configs import LoraConfig, ReferenceConfig
from ppo_lightning.errors import ConfigError, ModelError
from ppo_lightning.models import merged_copy
from tests.helpers.runs import data_module, fit, parameters, ppo_module
from tests.helpers.tiny_models import build_llama

VARIANTS = {"full": {}, "lora": {"policy": {"lora": LoraConfig(rank=4)}}}


def plain(module):
    """The actor's weights with its adapter merged: the space in which the average is taken."""
    actor = module.networks.actor
    model = actor if module.policy.lora is None else merged_copy(actor)
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


class Watcher(pl.Callback):
    """Weights at the end of iterations and when the rollout has begun; Adam's state there."""

    def __init__(self):
        self.ended, self.begun, self.moments = [], [], []

    def on_stage_start(self, trainer, module, name):
        if name == "rollout":
            self.begun.append(plain(module))
            [optimizer] = trainer.optimizers
            self.moments.append(
                {
                    group["name"]: max(
                        float(value.abs().max())
                        for parameter in group["params"]
                        for value in optimizer.state[parameter].values()
                    )
                    for group in optimizer.param_groups
                }
            )

    def on_iteration_end(self, trainer, module, stats):
        self.ended.append(plain(module))


def run(folder, model_dir, variant="full", *, every=2, weight=0.25, ckpt=None, **options):
    module, watcher = ppo_module(model_dir, **VARIANTS[variant]), Watcher()
    callbacks = [
        PullBack(every_n_iterations=every, weight=weight, **options),
        watcher,
        ModelCheckpoint(filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
    ]
    recorder = fit(folder, module, data_module(), callbacks=callbacks, max_epochs=4, ckpt=ckpt)
    return module, watcher, recorder


def assert_same(one, other, **tolerance):
    for name, value in one.items():
        assert_close(value, other[name], msg=lambda text, n=name: f"{n}: {text}", **tolerance)


EXACT = {"rtol": 0, "atol": 0}


@pytest.mark.parametrize(
    ("tiny_model_dir", "variant", "weight"),
    [
        ("gpt2", "full", 0.25),
        ("llama", "lora", 0.25),
        ("gpt2", "lora", 1.0),
        ("llama", "full", 1.0),
        # Each of the above with the other family.
        pytest.param("llama", "full", 0.25, marks=pytest.mark.slow),
        pytest.param("gpt2", "lora", 0.25, marks=pytest.mark.slow),
        pytest.param("llama", "lora", 1.0, marks=pytest.mark.slow),
        pytest.param("gpt2", "full", 1.0, marks=pytest.mark.slow),
    ],
    indirect=["tiny_model_dir"],
)
def test_the_actor_goes_its_share_of_the_way_back(tiny_model_dir, tmp_path, variant, weight):
    module, seen, recorder = run(tmp_path, tiny_model_dir, variant, weight=weight)
    (entry,) = module.controls.journal
    assert (entry["iteration"], entry["source"], entry["dial"]) == (2, "PullBack", "actor")
    assert f"{weight:g}" in entry["reason"]
    start = seen.begun[0]
    assert_same(seen.begun[1], seen.ended[0], **EXACT)  # not due
    assert_same(seen.begun[3], seen.ended[2], **EXACT)
    before = seen.ended[1]
    expected = {n: (1 - weight) * value + weight * start[n] for n, value in before.items()}
    assert_same(seen.begun[2], expected, rtol=1e-5, atol=1e-6)
    assert any(not value.equal(start[name]) for name, value in before.items())
    assert recorder.stats[3].kl_ref != 0
    if weight == 1.0:
        assert_same(seen.begun[2], start, **EXACT)
        assert recorder.stats[2].kl_ref == 0
        assert recorder.stats[2].steps_taken == 4  # and it learns again from there


@pytest.mark.parametrize("clear", [False, True])
def test_the_optimisers_memory_of_the_actor_is_cleared_by_option(tiny_llama_dir, tmp_path, clear):
    _, seen, _ = run(tmp_path, tiny_llama_dir, clear_moments=clear)
    assert seen.moments[1]["actor"] > 0
    assert (seen.moments[2]["actor"] == 0) is clear
    assert seen.moments[2]["critic"] > 0


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_bitwise(tiny_llama_dir, tmp_path, variant):
    whole, _, _ = run(tmp_path / "whole", tiny_llama_dir, variant, clear_moments=True)
    file = tmp_path / "whole/checkpoints/epoch=1.ckpt"  # the pull-back is due when it goes on
    again, _, _ = run(tmp_path / "again", tiny_llama_dir, variant, ckpt=file, clear_moments=True)
    assert_same(parameters(whole), parameters(again), **EXACT)


def test_weights_that_are_not_finite_are_reset_too(tiny_llama_dir):
    module = ppo_module(tiny_llama_dir)
    module.configure_model()
    actor = module.networks.actor
    start = plain(module)
    with torch.no_grad():
        next(actor.parameters()).fill_(torch.nan)
    module.reference.pull(actor, 1.0)
    assert_same(plain(module), start, **EXACT)


def test_what_cannot_be_averaged_is_refused_at_the_start(tiny_llama_dir, tmp_path):
    other = build_llama(tmp_path / "wider", hidden_size=64)
    reference = {"reference": ReferenceConfig(path=str(other))}
    pull = PullBack(every_n_iterations=1, weight=0.5)
    with pytest.raises(ModelError, match="another kind of model"):
        fit(
            tmp_path / "a",
            ppo_module(tiny_llama_dir, **reference),
            data_module(),
            callbacks=[pull],
        )
    lora = {"policy": {"lora": LoraConfig(rank=4)}}
    reference = {"reference": ReferenceConfig(path=str(tiny_llama_dir))}
    with pytest.raises(
        ModelError, match="leave out `path`, `dtype`, `quantization` and `device` of `reference`"
    ):
        fit(
            tmp_path / "b",
            ppo_module(tiny_llama_dir, **lora, **reference),
            data_module(),
            callbacks=[pull],
        )
    both = [pull, RefreshReference(every_n_iterations=2)]
    with pytest.raises(ConfigError, match="Keep one"):
        fit(tmp_path / "c", ppo_module(tiny_llama_dir, **lora), data_module(), callbacks=both)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"every_n_iterations": 0, "weight": 0.5}, "every_n_iterations"),
        ({"every_n_iterations": 1, "weight": 0.0}, "`weight`"),
        ({"every_n_iterations": 1, "weight": 1.1}, "`weight`"),
    ],
)
def test_nonsense_is_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        PullBack(**settings)
