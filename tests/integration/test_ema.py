"""The running average of the actor's weights."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close

from ppo_lightning.callbacks import ActorEMA, CheckpointRollback, ExportModel
from ppo_lightning.checkpointing import export_actor, load_actor, read_models
from ppo_lightning.configs import LoraConfig
from ppo_lightning.diagnostics import DetectorConfig
from ppo_lightning.errors import CheckpointError
from ppo_lightning.models import load_causal_lm
from tests.helpers.cases import crossed
from tests.helpers.cli import run_cli
from tests.helpers.faults import SpoiledWeights
from tests.helpers.runs import data_module, fit, parameters, ppo_module, trainer
from tests.helpers.tiny_models import build_gpt2

VARIANTS = {"full": {}, "lora": {"policy": {"lora": LoraConfig(rank=4)}}}


class Watcher(pl.Callback):
    """Copies of the actor's trained weights at the end of updates, and inside validations."""

    def __init__(self):
        self.updated, self.validated, self.steps, self.after = [], [], [], []

    def on_fit_start(self, trainer, pl_module):
        self.start = weights(pl_module)

    def on_update_end(self, trainer, module, stats):
        self.updated.append(weights(module))
        self.steps.append(stats.steps_taken)

    def on_answers(self, trainer, module, answers):
        self.validated.append(weights(module))

    def on_iteration_end(self, trainer, module, stats):
        self.after.append(weights(module))


def weights(module):
    actor = module.networks.actor
    return {n: p.detach().clone() for n, p in actor.named_parameters() if p.requires_grad}


def keep_all():
    return ModelCheckpoint(filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)


def run(folder, model_dir, variant="full", *, ema=None, **options):
    module = ppo_module(model_dir, **VARIANTS[variant])
    ema, watcher = ema or ActorEMA(decay=0.8), Watcher()
    recorder = fit(
        folder,
        module,
        data_module(val_prompts=["the cat", "no"]),
        callbacks=[ema, watcher, keep_all()],
        **options,
    )
    return module, ema.state_dict()["weights"], watcher, recorder


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.equal(other[name]), name


def apart(one, other):
    return any(not value.equal(other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("tiny_model_dir", "variant"),
    crossed(("gpt2", "full"), ("llama", "lora")),
    indirect=["tiny_model_dir"],
)
def test_the_average_is_that_of_the_iterates_and_answers_in_validation(
    tiny_model_dir, tmp_path, variant
):
    _, average, seen, _ = run(tmp_path, tiny_model_dir, variant)
    assert seen.steps == [4, 4, 4]
    expected = {name: value.double() for name, value in seen.start.items()}
    for now, used in zip(seen.updated, seen.validated, strict=True):
        for name in expected:  # four steps of 0.8, written out
            expected[name] = 0.4096 * expected[name] + 0.5904 * now[name].double()
            assert_close(used[name].double(), expected[name], rtol=1e-5, atol=1e-6)
        assert apart(used, now)
    for name, value in average.items():
        assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
    for before, after in zip(seen.updated, seen.after, strict=True):
        assert_equal(before, after)  # the actor has its own weights again, to the last bit


def test_training_is_the_one_without_it(tiny_llama_dir, tmp_path):
    module, *_ = run(tmp_path / "with", tiny_llama_dir)
    without = ppo_module(tiny_llama_dir)
    fit(tmp_path / "without", without, data_module(val_prompts=["the cat", "no"]))
    assert_equal(parameters(module), parameters(without))


def test_validation_with_the_last_weights_by_option(tiny_llama_dir, tmp_path):
    _, average, seen, _ = run(tmp_path, tiny_llama_dir, ema=ActorEMA(validate=False))
    for now, used in zip(seen.updated, seen.validated, strict=True):
        assert_equal(now, used)
    assert apart(average, seen.updated[-1])


def test_an_update_without_a_step_leaves_the_average(tiny_llama_dir, tmp_path):
    ema, module = ActorEMA(decay=0.5), ppo_module(tiny_llama_dir, ppo={"target_kl": 1e-9})
    fit(tmp_path, module, data_module(), callbacks=[ema], max_epochs=1)
    before = dict(ema.state_dict()["weights"])
    ema.on_update_end(module.trainer, module, type("S", (), {"actor_steps": 0.0}))
    assert_equal(before, ema.state_dict()["weights"])


def test_passes_of_the_critic_alone_do_not_count(tiny_llama_dir, tmp_path):
    """Four steps of the actor and four of the critic: 0.8 to the fourth."""
    ema, seen = ActorEMA(decay=0.8), Watcher()
    module = ppo_module(tiny_llama_dir, ppo={"update_order": "in_turn"})
    fit(tmp_path, module, data_module(), callbacks=[ema, seen], max_epochs=1)
    assert seen.steps == [8]
    for name, value in ema.state_dict()["weights"].items():
        expected = 0.4096 * seen.start[name].double() + 0.5904 * seen.updated[0][name].double()
        assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_bitwise(tiny_llama_dir, tmp_path, variant):
    _, average, seen, recorded = run(tmp_path / "whole", tiny_llama_dir, variant)
    file = tmp_path / "whole/checkpoints/epoch=0.ckpt"
    _, again, then, resumed = run(tmp_path / "again", tiny_llama_dir, variant, ckpt=file)
    assert_equal(average, again)
    assert_equal(seen.after[-1], then.after[-1])
    whole = [s.val_sampled for s in recorded.stats[1:]]
    assert [s.val_sampled for s in resumed.stats] == whole
    assert all(value.dtype == torch.float32 for value in again.values())


class Broken(pl.Callback):
    def on_answers(self, trainer, module, answers):
        raise RuntimeError("no answers today")


def test_the_actor_has_its_weights_back_when_validation_fails(tiny_llama_dir, tmp_path):
    module, seen = ppo_module(tiny_llama_dir), Watcher()
    with pytest.raises(RuntimeError, match="no answers today"):
        fit(
            tmp_path,
            module,
            data_module(val_prompts=["no"]),
            callbacks=[ActorEMA(), seen, Broken()],
        )
    assert apart(seen.validated[0], seen.updated[0])
    assert_equal(weights(module), seen.updated[0])


def test_test_and_validate_of_a_checkpoint_answer_with_the_average(tiny_llama_dir, tmp_path):
    _, average, seen, _ = run(tmp_path, tiny_llama_dir)
    file, data = tmp_path / "checkpoints/epoch=2.ckpt", data_module(val_prompts=["no"])
    for command in ("test", "validate"):
        module, watcher = ppo_module(tiny_llama_dir), Watcher()
        tester = trainer(tmp_path, callbacks=[ActorEMA(), watcher])
        getattr(tester, command)(module, data, ckpt_path=file, verbose=False)
        assert_equal(watcher.validated[0], average)
        assert_equal(weights(module), seen.after[-1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_export_writes_the_average(monkeypatch, tmp_path, tiny_gpt2_dir, variant):
    """GPT-2's embeddings are tied: both ends are the average's."""
    module, average, _, _ = run(tmp_path / "run", tiny_gpt2_dir, variant)
    file = tmp_path / "run/checkpoints/epoch=2.ckpt"
    models = read_models(file)
    actor = load_actor(models, ema=True)
    named = {n: p for n, p in actor.named_parameters() if p.requires_grad}
    assert_equal({n: p.detach() for n, p in named.items()}, average)
    assert run_cli(monkeypatch, "export", file, tmp_path / "average", "--ema") == 0
    export_actor(models, tmp_path / "last")
    ids = torch.tensor([[5, 9, 11, 30]])
    with torch.no_grad():
        found = {
            name: load_causal_lm(module.policy.__class__(path=str(tmp_path / name)))(ids).logits
            for name in ("average", "last")
        }
        assert_close(found["average"], actor(ids).logits, rtol=1e-4, atol=1e-4)
        assert_close(found["last"], module.networks.actor(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found["average"], found["last"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("validate", [True, False])
def test_export_says_whose_weights_were_validated(
    monkeypatch, tmp_path, tiny_llama_dir, capsys, validate
):
    run(tmp_path, tiny_llama_dir, ema=ActorEMA(validate=validate), max_epochs=1)
    file = tmp_path / "checkpoints/epoch=0.ckpt"
    assert run_cli(monkeypatch, "export", file, tmp_path / "last") == 0
    assert ("`--ema` writes it" in capsys.readouterr().out) is validate
    assert run_cli(monkeypatch, "export", file, tmp_path / "average", "--ema") == 0
    assert "`--ema`" not in capsys.readouterr().out


def test_export_says_what_is_missing(monkeypatch, tmp_path, tiny_llama_dir, capsys):
    module = ppo_module(tiny_llama_dir)
    fit(tmp_path, module, data_module(), max_epochs=1)
    file = tmp_path / "checkpoints/last.ckpt"
    assert run_cli(monkeypatch, "export", file, tmp_path / "average", "--ema") == 2
    assert "ActorEMA" in capsys.readouterr().err
    assert not (tmp_path / "average").exists()
    assert run_cli(monkeypatch, "export", file, tmp_path / "x", "--ema", "--critic") == 2
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_an_average_of_another_shape_is_refused(tmp_path, tiny_llama_dir):
    run(tmp_path / "a", tiny_llama_dir, max_epochs=1)
    file = tmp_path / "a/checkpoints/epoch=0.ckpt"
    checkpoint = torch.load(file, weights_only=True)
    checkpoint["callbacks"]["ActorEMA"]["weights"].popitem()
    torch.save(checkpoint, tmp_path / "cut.ckpt")
    with pytest.raises(CheckpointError, match="does not fit the actor"):
        run(tmp_path / "b", tiny_llama_dir, ckpt=tmp_path / "cut.ckpt")
    with pytest.raises(CheckpointError, match="does not fit its actor"):
        load_actor(read_models(tmp_path / "cut.ckpt"), ema=True)


def test_a_rollback_takes_the_average_back_as_well(tiny_llama_dir, tmp_path):
    """Spoiled in iteration 2, seen in 3: back to what was there after 1."""
    averages = []

    class Keep(pl.Callback):
        def on_iteration_end(self, trainer, module, stats):
            averages.append(ema.state_dict()["weights"])

    ema = ActorEMA(decay=0.8)
    rollback = CheckpointRollback(thresholds=DetectorConfig(entropy_floor=None))
    data = data_module(buffer={"num_prompts": 24, "num_minibatches": 2})
    callbacks = [SpoiledWeights(2), ema, rollback, Keep()]
    fit(tmp_path, ppo_module(tiny_llama_dir), data, callbacks=callbacks, max_epochs=5)
    assert rollback.num_rollbacks == 1
    assert_equal(averages[3], averages[1])
    assert apart(averages[2], averages[1])
    assert apart(averages[4], averages[3])


def test_a_new_run_with_the_same_object_begins_anew(tmp_path, tiny_llama_dir):
    ema = ActorEMA()
    run(tmp_path / "a", tiny_llama_dir, ema=ema, max_epochs=1)
    other = build_gpt2(tmp_path / "other")
    _, average, seen, _ = run(tmp_path / "b", other, ema=ema, max_epochs=1)
    assert average.keys() == seen.start.keys()


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0, float("nan")])
def test_nonsense_is_refused(decay):
    with pytest.raises(ValueError, match="`decay`"):
        ActorEMA(decay=decay)


def test_an_export_in_the_midst_of_a_validation_leaves_the_actor_its_own_weights(
    tiny_gpt2_dir, tmp_path
):
    """Whichever of the two callbacks comes first."""
    found = []
    for number in (0, 1):
        callbacks = [
            ActorEMA(decay=0.9),
            ExportModel(str(tmp_path / f"best{number}"), monitor="val/sampled/score", mode="max"),
        ]
        module = ppo_module(tiny_gpt2_dir)
        data = data_module(val_prompts=["no"])
        fit(tmp_path / str(number), module, data, callbacks=callbacks[:: 1 - 2 * number])
        found.append(parameters(module))
    assert all(weight.equal(found[1][name]) for name, weight in found[0].items())
