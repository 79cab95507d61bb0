"""The reference follows the actor."""

from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.callbacks import PullBack, RefreshReference
from ppo_lightning.configs import LoraConfig, PolicyConfig, ReferenceConfig
from ppo_lightning.errors import CheckpointError, ModelError
from tests.helpers.cases import crossed
from tests.helpers.runs import data_module, fit, parameters, ppo_module, trainer
from tests.helpers.sequences import sequences_of
from tests.helpers.tiny_models import build_llama

VARIANTS = {"full": {}, "lora": {"policy": {"lora": LoraConfig(rank=4)}}}
BATCH = sequences_of([[5, 9, 11], [12, 7, 30, 8]], [[20, 13, 17, 2], [9, 22]])


class Watcher(pl.Callback):
    """What reference and actor say of a few sequences, at the end of each iteration."""

    def __init__(self):
        self.reference, self.actor = [], []

    def on_iteration_end(self, trainer, module, stats):
        self.reference.append(module.reference.logprobs(BATCH, temperature=1.0).logprobs)
        with torch.no_grad():
            self.actor.append(module.networks(BATCH, temperature=1.0).logprobs)


def run(folder, model_dir, variant="full", *, ckpt=None, epochs=4, callback=None, **overrides):
    module, watcher = ppo_module(model_dir, **VARIANTS[variant], **overrides), Watcher()
    callbacks = [
        callback or RefreshReference(every_n_iterations=2),
        watcher,
        ModelCheckpoint(filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
    ]
    data = data_module(val_prompts=["the cat", "no"])
    recorder = fit(folder, module, data, callbacks=callbacks, max_epochs=epochs, ckpt=ckpt)
    return module, watcher, recorder


@pytest.fixture(scope="module")
def finished(tiny_llama_dir, tmp_path_factory):
    """By variant: a run of four iterations that each test only looks at, and its folder."""

    @cache
    def made(variant):
        folder = tmp_path_factory.mktemp(variant)
        return *run(folder, tiny_llama_dir, variant), folder / "checkpoints"

    return made


@pytest.mark.parametrize(
    ("tiny_model_dir", "variant"),
    crossed(("gpt2", "full"), ("llama", "lora")),
    indirect=["tiny_model_dir"],
)
def test_the_reference_becomes_the_actor_and_stays(tiny_model_dir, tmp_path, variant):
    module, seen, recorder = run(tmp_path, tiny_model_dir, variant)
    (entry,) = module.controls.journal
    assert (entry["iteration"], entry["source"]) == (2, "RefreshReference")
    assert entry["dial"] == "reference"
    before, after = seen.reference[1], seen.reference[2]
    assert torch.equal(seen.reference[0], before)
    assert torch.equal(after, seen.actor[1])  # as it was when iteration 1 had ended
    assert torch.equal(seen.reference[3], after)
    assert not torch.equal(before, after)
    assert recorder.stats[1].kl_ref != 0
    assert recorder.stats[2].kl_ref == pytest.approx(0, abs=1e-5)
    assert recorder.stats[3].kl_ref != 0
    assert not torch.equal(seen.actor[3], after)
    with module.reference.causal_lm() as model:
        assert not any(p.requires_grad for p in model.parameters())
        assert not model.training
    actor = module.networks.actor
    assert any(p.requires_grad for p in actor.parameters())
    if variant == "lora":  # two adapters on one base
        base = {p.data_ptr() for p in actor.parameters() if not p.requires_grad}
        own = [p for p in module.reference._model.parameters() if p.data_ptr() not in base]
        trained = [p for p in actor.parameters() if p.requires_grad]
        assert sum(p.numel() for p in own) == sum(p.numel() for p in trained)


def comparable(stats):
    return {k: v for k, v in stats.to_log().items() if k[:5] != "time/" and k != "run/memory_gib"}


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_bitwise(tiny_llama_dir, tmp_path, finished, variant):
    """Before the refresh that is due, after it, and an iteration later; held-out answers too."""
    whole, seen, recorded, folder = finished(variant)
    for after in (1, 2, 3):
        file = folder / f"epoch={after - 1}.ckpt"
        again, then, resumed = run(tmp_path / f"{after}", tiny_llama_dir, variant, ckpt=file)
        assert torch.equal(seen.reference[-1], then.reference[-1])
        for now, one in zip(resumed.stats, recorded.stats[after:], strict=True):
            assert comparable(now) == comparable(one)
        for name, value in parameters(whole).items():
            assert value.equal(dict(again.named_parameters())[name]), name


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_checkpoints_hold_what_is_the_references_own(finished):
    for variant in VARIANTS:
        module, _, _, folder = finished(variant)
        trained = {n for n, p in module.networks.actor.named_parameters() if p.requires_grad}
        for epoch, expected in ((1, set()), (2, trained)):
            file = torch.load(folder / f"epoch={epoch}.ckpt", weights_only=True)
            assert set(file["callbacks"]["RefreshReference"]["weights"]) == expected


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_going_on_without_the_callback_is_refused(tiny_llama_dir, tmp_path, finished, variant):
    """The reference would be another one, and nobody would be told."""
    file = finished(variant)[-1] / "epoch=2.ckpt"
    module = ppo_module(tiny_llama_dir, **VARIANTS[variant])
    # Lightning warns of the state that no callback asks for, ours raises.
    with (
        pytest.warns(UserWarning, match="RefreshReference"),
        pytest.raises(CheckpointError, match=r"or `RefreshReference` in `trainer\.callbacks` if"),
    ):
        fit(tmp_path, module, data_module(), ckpt=file)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_test_of_a_checkpoint_measures_against_the_refreshed_reference(
    tiny_llama_dir, tmp_path, finished
):
    _, seen, _, folder = finished("lora")
    module = ppo_module(tiny_llama_dir, **VARIANTS["lora"])
    tester = trainer(tmp_path, callbacks=[RefreshReference(every_n_iterations=2)])
    data = data_module(val_prompts=["no"])
    tester.test(module, data, ckpt_path=folder / "epoch=2.ckpt", verbose=False)
    found = module.reference.logprobs(BATCH, temperature=1.0).logprobs
    assert torch.equal(found, seen.reference[-1])


@pytest.mark.parametrize(("min_gain", "refreshed"), [(None, True), (50.0, False)])
def test_only_after_a_gain(tiny_llama_dir, tmp_path, min_gain, refreshed):
    callback = RefreshReference(every_n_iterations=2, min_gain=min_gain)
    _, seen, _ = run(tmp_path, tiny_llama_dir, callback=callback, epochs=3)
    assert (not torch.equal(seen.reference[0], seen.reference[2])) is refreshed


def stats_of(iteration, score):
    return type("Stats", (), {"iteration": iteration, "raw_score_mean": score})


def test_the_gain_counts_from_the_last_refresh():
    callback = RefreshReference(every_n_iterations=1, min_gain=1.0)
    due = []
    for iteration, score in enumerate([2.0, 3.0, 3.5, None, 4.0, 4.1]):
        callback.on_iteration_end(None, None, stats_of(iteration, score))
        due.append(callback._due)
        callback._due = False
    assert due == [False, True, False, False, True, False]


def test_full_actors_may_have_both(tiny_llama_dir, tmp_path):
    """A pull-back goes to the reference of the day."""
    module = ppo_module(tiny_llama_dir)
    watcher = Watcher()
    callbacks = [
        RefreshReference(every_n_iterations=2),
        PullBack(every_n_iterations=3, weight=1.0),
        watcher,
    ]
    stats = fit(tmp_path, module, data_module(), callbacks=callbacks, max_epochs=4).stats
    assert stats[3].kl_ref == 0
    assert torch.equal(watcher.reference[3], watcher.actor[1])


def test_a_reference_of_another_kind_is_refused_at_the_start(tiny_llama_dir, tmp_path):
    other = build_llama(tmp_path / "wider", hidden_size=64)
    with pytest.raises(ModelError, match="another kind of model"):
        run(tmp_path, tiny_llama_dir, reference=ReferenceConfig(path=str(other)))


def test_an_adapter_refreshes_a_reference_of_its_own_too(tiny_llama_dir):
    """Whatever was the reference, it becomes the actor."""
    module = ppo_module(
        tiny_llama_dir,
        policy={"lora": LoraConfig(rank=4)},
        reference=ReferenceConfig(path=str(tiny_llama_dir)),
    )
    module.configure_model()
    with torch.no_grad():
        for p in module.networks.actor_parameters():
            p.add_(0.1)
    module.reference.refresh(module.networks.actor)
    ours = module.networks(BATCH, temperature=1.0).logprobs
    assert torch.equal(module.reference.logprobs(BATCH, temperature=1.0).logprobs, ours)
    assert module.policy == PolicyConfig(path=str(tiny_llama_dir), lora=LoraConfig(rank=4))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"every_n_iterations": 0}, "every_n_iterations"),
        ({"every_n_iterations": 1, "min_gain": -1.0}, "min_gain"),
    ],
)
def test_nonsense_is_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        RefreshReference(**settings)
