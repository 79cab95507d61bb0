"""Callbacks that change weights keep two ranks alike."""

from ppo_lightning.callbacks import ActorEMA, PullBack, RefreshReference
from ppo_lightning.configs import LoraConfig
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import data_module, fit, parameters, ppo_module


def train(model_dir, folder, variant):
    """Fit with all of them; return the weights of actor, average and reference, and the KLs."""
    lora = LoraConfig(rank=4) if variant == "lora" else None
    module = ppo_module(model_dir, policy={"lora": lora})
    ema, refresh = ActorEMA(), RefreshReference(every_n_iterations=2)
    callbacks = [ema, refresh]
    if lora is None:
        callbacks.append(PullBack(every_n_iterations=3, weight=0.5))
    recorder = fit(
        folder,
        module,
        data_module(val_prompts=["no"]),
        callbacks=callbacks,
        strategy="ddp",
        devices=2,
        max_epochs=4,
        enable_checkpointing=False,
    )
    found = {
        "all": parameters(module),
        "average": ema.state_dict()["weights"],
        "reference": refresh.state_dict()["weights"],
    }
    numbers = {k: {n: v.detach().numpy() for n, v in part.items()} for k, part in found.items()}
    return numbers, [stats.kl_ref for stats in recorder.stats]


def check(model_dir, folder, variant):
    (one, kls), (other, others) = run_on_ranks(train, 2, model_dir, folder, variant)
    assert kls == others
    assert abs(kls[2]) < 1e-5 < abs(kls[3])
    for part, values in one.items():
        assert values
        for name, value in values.items():
            assert (value == other[part][name]).all(), (part, name)


def test_two_ranks_stay_alike(tiny_llama_dir, tmp_path):
    check(tiny_llama_dir, tmp_path, "full")


def test_two_ranks_stay_alike_with_adapters(tiny_llama_dir, tmp_path):
    check(tiny_llama_dir, tmp_path, "lora")
