"""Two gloo processes under DeepSpeed's ZeRO: the result of a single process.

What is computed is in float32: responses must be the same, parameters to 1e-6.
"""

import os
from functools import cache

import pytest
import torch
import yaml
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from ppo_lightning.callbacks import ActorEMA, ExportModel, ValueWarmup
from ppo_lightning.cli.main import main
from ppo_lightning.configs import GroupConfig, OptimizerConfig
from ppo_lightning.errors import ConfigError
from ppo_lightning.modules import ZeROStrategy
from tests.distributed.test_sharded import ALL, uneven
from tests.helpers.cli import tiny_config
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import (
    PoisonedAt,
    data_module,
    fit,
    logged,
    ppo_module,
    sampled_ids,
)

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (extra `deepspeed`)")

# Momentum would move a network that is not to be trained, were it to step with gradients of 0.
MOMENTUM = OptimizerConfig(name="SGD", options={"momentum": 0.9})
CASES = {
    **ALL,
    "in-turn": {"ppo": {"update_order": "in_turn"}, "optimizer": MOMENTUM},
    "warm-up": {"ppo": {"extra_critic_epochs": 1}, "optimizer": MOMENTUM},
    "kl-stop": {"ppo": {"target_kl": 1e-5}, "optimizer": MOMENTUM},
}


def strategy(stage, ranks):
    # Tiny weights would be kept whole on every rank otherwise.
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return ZeROStrategy(stage=stage, zero=zero) if ranks > 1 else "auto"


def train(model_dir, folder, variant, stage, ranks, **overrides):
    """Fit, and return parameters, sampled ids by response number, and statistics."""
    settings = {k: dict(v) if isinstance(v, dict) else v for k, v in CASES[variant].items()}
    module = ppo_module(
        model_dir,
        **{
            "actor": GroupConfig(lr=1e-2, max_grad_norm=1.0),
            "critic": GroupConfig(lr=1e-2, max_grad_norm=0.5),
            "optimizer": OptimizerConfig(name="SGD"),
            **settings,
            **overrides,
        },
    )
    recorder = fit(
        folder,
        module,
        data_module(
            seed=4,  # in float32 a draw may fall on the edge between two tokens; here none does
            buffer={"num_prompts": 7, "num_minibatches": 3},
            val_prompts=["no", "you", "yes yes"],
        ),
        strategy=strategy(stage, ranks),
        devices=ranks,
        enable_checkpointing=False,
        callbacks=[ValueWarmup(num_iterations=1)] if variant == "warm-up" else [],
    )
    ids = sampled_ids(recorder)
    stats = logged(recorder)
    return {n: p.detach().numpy() for n, p in module.named_parameters()}, ids, stats


@cache
def alone(model_dir, folder, variant):
    """What a single process comes to, once for all stages."""
    return run_on_ranks(train, 1, model_dir, folder, variant, 2, 1)[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("variant", CASES)
def test_t47_t48_t49_zero_gives_the_result_of_one_process(
    tiny_gpt2_dir, tmp_path_factory, variant, stage
):
    """Seven responses in three minibatches on two ranks: the same responses and parameters."""
    folder = tmp_path_factory.getbasetemp()
    require_same(alone(tiny_gpt2_dir, folder, variant), tiny_gpt2_dir, folder, variant, stage)


@pytest.mark.parametrize("variant", ["separate", "lora-shared", "checkpointing"])
def test_t48_rotary_models_are_scattered_too(tiny_llama_dir, tmp_path, variant):
    require_same(alone(tiny_llama_dir, tmp_path, variant), tiny_llama_dir, tmp_path, variant, 3)


def require_same(one, *arguments):
    first, second = run_on_ranks(train, 2, *arguments, 2)
    assert [a | b for a, b in zip(first[1], second[1], strict=True)] == one[1]
    for found in (first, second):
        for name, value in one[0].items():
            assert (found[0][name] == first[0][name]).all(), name
            ours, wanted = torch.tensor(found[0][name]), torch.tensor(value)
            assert_close(ours, wanted, rtol=0, atol=1e-6, msg=name)
        for ours, theirs in zip(found[2], one[2], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)


def test_the_cases_turn_what_they_are_for(tiny_gpt2_dir, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    stats = alone(tiny_gpt2_dir, folder, "kl-stop")[2]
    assert any(s["update/kl_stopped"] for s in stats)
    assert any(s["update/steps_taken"] for s in stats)
    first = alone(tiny_gpt2_dir, folder, "separate")[2][
        0
    ]  # both norms are clipped, each by its own
    assert first["update/grad_norm_actor_max"] > 1.0
    assert first["update/grad_norm_critic"] > 0.5


def poisoned(model_dir, folder, stage):
    """Rank 1's loss is not finite at its second update."""
    module = ppo_module(model_dir)
    PoisonedAt(module, calls={2} if os.environ["RANK"] == "1" else set())
    recorder = fit(
        folder,
        module,
        data_module(),
        strategy=strategy(stage, 2),
        devices=2,
        enable_checkpointing=False,
    )
    finite = all(p.isfinite().all() for p in module.parameters())
    return [(s.steps_taken, s.steps_skipped_nonfinite) for s in recorder.stats], bool(finite)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_t42_ranks_skip_a_step_together(tiny_gpt2_dir, tmp_path, stage):
    found = run_on_ranks(poisoned, 2, tiny_gpt2_dir, tmp_path, stage)
    assert found == [([(3, 1), (4, 0), (4, 0)], True)] * 2


def half(model_dir, folder, stage, ranks):
    """Compute in bfloat16."""
    module = ppo_module(model_dir)
    recorder = fit(
        folder,
        module,
        data_module(),
        strategy=strategy(stage, ranks),
        devices=ranks,
        enable_checkpointing=False,
        precision="bf16-mixed",
    )
    kinds = {p.dtype for p in module.parameters()}
    return [s.policy_loss for s in recorder.stats], str(kinds)


@pytest.mark.parametrize("stage", [2, 3])
def test_products_in_bfloat16_on_weights_in_float32(tiny_gpt2_dir, tmp_path, stage):
    (one,) = run_on_ranks(half, 1, tiny_gpt2_dir, tmp_path, stage, 1)
    for losses, kinds in run_on_ranks(half, 2, tiny_gpt2_dir, tmp_path, stage, 2):
        assert kinds == "{torch.float32}"
        # The first buffer is the same; later ones may part, draws near an edge being many.
        assert losses[0] == pytest.approx(one[0][0], abs=2e-2)


def decoded(model_dir, folder):
    from tests.distributed import test_sharded

    test_sharded.strategy = lambda ranks: strategy(3, ranks)
    return uneven(model_dir, folder, 2)


def test_t46_ranks_may_decode_for_different_numbers_of_steps(tiny_gpt2_dir, tmp_path):
    first, second = run_on_ranks(decoded, 2, tiny_gpt2_dir, tmp_path)
    assert first == (1, [4.0, 4.0, 4.0])
    assert second == (8, [4.0, 4.0, 4.0])


def by_command(model_dir, folder, word):
    """Train, go on and export by the command line, as torchrun would start it."""
    written = folder / "run.yaml"
    written.write_text(yaml.safe_dump(tiny_config(model_dir, folder / "runs")), encoding="utf-8")
    run = ["fit", "--config", str(written), "--trainer.strategy", word, "--trainer.devices", "2"]
    return [main(run), main([*run, "--trainer.max_epochs", "3", "--ckpt_path", "last"])]


@pytest.mark.parametrize("word", ["deepspeed_stage_1", "deepspeed_stage_3"])
def test_the_words_on_the_command_line(tiny_gpt2_dir, tmp_path, word):
    assert run_on_ranks(by_command, 2, tiny_gpt2_dir, tmp_path, word) == [[0, 0], [0, 0]]
    (last,) = (tmp_path / "runs").rglob("version_1/checkpoints/last.ckpt")
    assert main(["export", str(last), str(tmp_path / "model")]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def export(model_dir, folder, variant, ranks):
    """Train, and write the model in both of the ways that there are."""
    module = ppo_module(model_dir, **ALL[variant])
    fit(
        folder,
        module,
        data_module(val_prompts=["no"]),
        strategy=strategy(3, ranks),
        devices=ranks,
        max_epochs=1,
        callbacks=[ExportModel(str(folder / "best"), monitor="val/score_mean", mode="max")],
    )
    if os.environ["RANK"] == "0":
        module.export(folder / "called")
    return True


@pytest.mark.parametrize("variant", ["separate", "lora"])
def test_models_are_written_from_scattered_weights(tiny_gpt2_dir, tmp_path, variant):
    run_on_ranks(export, 1, tiny_gpt2_dir, tmp_path / "one", variant, 1)
    run_on_ranks(export, 2, tiny_gpt2_dir, tmp_path / "two", variant, 2)
    for name in ("best", "called"):
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(tmp_path / ranks / name)
            for ranks in ("two", "one")
        )
        for key, weight in theirs.state_dict().items():
            assert_close(ours.state_dict()[key], weight, rtol=0, atol=2e-4, msg=f"{name}: {key}")


def refused(model_dir, folder):
    """Start runs that cannot be; what each is refused with."""
    cases = [
        (2, {"policy": {"dtype": "float64"}}, {}),
        (2, {"optimizer": OptimizerConfig(offload=True)}, {}),
        (3, {}, {"callbacks": [ActorEMA(decay=0.9)]}),
    ]
    messages = []
    for stage, settings, options in cases:
        with pytest.raises(ConfigError) as error:
            fit(
                folder,
                ppo_module(model_dir, **settings),
                data_module(),
                strategy=strategy(stage, 2),
                devices=1,
                **options,
            )
        messages.append(str(error.value))
    return messages


def test_what_zero_does_not_go_with_is_refused_by_name(tiny_gpt2_dir, tmp_path):
    (messages,) = run_on_ranks(refused, 1, tiny_gpt2_dir, tmp_path)
    named = ["`policy.dtype`", "`optimizer.offload`", "ActorEMA"]
    for message, name in zip(messages, named, strict=True):
        assert name in message
        assert "DeepSpeed" in message or "deepspeed" in message
