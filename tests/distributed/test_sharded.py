"""Two gloo processes with weights in shards (FSDP2): the result of a single process."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from ppo_lightning.callbacks import ActorEMA, ExportModel
from ppo_lightning.cli.main import main
from ppo_lightning.configs import GroupConfig, LoraConfig, OptimizerConfig
from ppo_lightning.distributed import is_shard, rank, whole
from ppo_lightning.errors import ConfigError, ModelError
from ppo_lightning.models.tensor_parallel import split_layers
from ppo_lightning.modules import FSDP2Strategy, last_checkpoint
from ppo_lightning.modules.sharded_strategy import check_shardable
from ppo_lightning.rewards import RewardTerm, SequenceClassifierReward
from ppo_lightning.rollout import AsyncEngine, NativeEngine
from tests.distributed.test_two_ranks import VARIANTS
from tests.helpers.cases import chosen, crossed
from tests.helpers.cli import tiny_config
from tests.helpers.processes import run_on_ranks
from tests.helpers.runs import (
    Recorder,
    data_module,
    fit,
    logged,
    ppo_module,
    sampled_ids,
    trainer,
)
from tests.helpers.tiny_models import build_gpt2, build_llama

ALL = {
    **VARIANTS,
    "checkpointing": {"policy": {"gradient_checkpointing": True}},
    "lora-shared": {**VARIANTS["lora"], **VARIANTS["shared"]},
    "padded": {"policy": {"padding_free": False}},
}
# Each variant once, several in a run: what one of them breaks makes the numbers differ.
TOGETHER = {
    "lora, checkpointing": {
        "policy": {"lora": LoraConfig(rank=4), "gradient_checkpointing": True},
    },
    "shared, sequence, padded": {
        **VARIANTS["shared"],
        **VARIANTS["sequence"],
        "policy": {"padding_free": False},
    },
    "lora-shared, cut": {**ALL["lora-shared"], **VARIANTS["cut"]},
}


def strategy(ranks, peers=1):
    return FSDP2Strategy(tensor_parallel_size=peers) if ranks > 1 else "auto"


def train(model_dir, folder, variant, ranks, peers=1, *, epochs=2, **overrides):
    """Fit, and return parameters, sampled ids by response number, and statistics."""
    settings = {k: dict(v) for k, v in (ALL | TOGETHER)[variant].items()}
    settings["policy"] = {"dtype": "float64", **settings.get("policy", {})}
    module = ppo_module(
        model_dir,
        **{
            "actor": GroupConfig(lr=1e-2),
            "optimizer": OptimizerConfig(name="SGD"),
            **settings,
            **overrides,
        },
    )
    recorder = fit(
        folder,
        module,
        data_module(
            buffer={"num_prompts": 7, "num_minibatches": 3}, val_prompts=["no", "you", "yes yes"]
        ),
        strategy=strategy(ranks, peers),
        devices=ranks,
        max_epochs=epochs,  # the second samples with what the first has trained
        enable_checkpointing=False,
    )
    ids = sampled_ids(recorder)
    stats = logged(recorder)
    return {n: whole(p.detach()).numpy() for n, p in module.named_parameters()}, ids, stats


QUICK = [
    ("gpt2", "separate"),
    ("gpt2", "lora, checkpointing"),
    ("llama", "shared, sequence, padded"),
    ("llama", "lora-shared, cut"),
]


# Slow: the parts of the above on their own, and the other family of models.
@pytest.mark.parametrize(("family", "variant"), chosen(QUICK, ("gpt2", "llama"), ALL))
def test_t47_t48_t49_shards_give_the_result_of_one_process(request, tmp_path, family, variant):
    """Seven responses in three minibatches on two ranks: the same responses and parameters."""
    model_dir = request.getfixturevalue(f"tiny_{family}_dir")
    (alone,) = run_on_ranks(train, 1, model_dir, tmp_path, variant, 1)
    first, second = run_on_ranks(train, 2, model_dir, tmp_path, variant, 2)
    assert [a | b for a, b in zip(first[1], second[1], strict=True)] == alone[1]
    require_same(alone, first, second)


def require_same(alone, *ranks):
    """Parameters and statistics of all ranks are those of a single process."""
    for found in ranks:
        for name, value in alone[0].items():
            assert (found[0][name] == ranks[0][0][name]).all(), name
            # Llama computes its norms in float32.
            ours, wanted = torch.tensor(found[0][name]), torch.tensor(value)
            assert_close(ours, wanted, rtol=0, atol=1e-8, msg=name)
        for ours, one in zip(found[2], alone[2], strict=True):
            assert ours == pytest.approx(one, rel=1e-6, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    "variant",
    [
        "separate",
        "lora-shared, cut",
        # Parts of the one above.
        pytest.param("lora-shared", marks=pytest.mark.slow),
        pytest.param("shared", marks=pytest.mark.slow),
        pytest.param("lora", marks=pytest.mark.slow),
        pytest.param("cut", marks=pytest.mark.slow),
    ],
)
def test_t48_tensor_parallel_gives_the_result_of_one_process(even_llama_dir, tmp_path, variant):
    """Both ranks hold a model between them, and see the same responses."""
    (alone,) = run_on_ranks(train, 1, even_llama_dir, tmp_path, variant, 1)
    first, second = run_on_ranks(train, 2, even_llama_dir, tmp_path, variant, 2, 2)
    assert first[1] == second[1] == alone[1]
    require_same(alone, first, second)


@pytest.mark.parametrize(
    "variant",
    # Adapters in shards, and cut between peers, are above: both at once take four processes long.
    ["separate", pytest.param("lora", marks=pytest.mark.slow)],
)
def test_t48_shards_in_two_dimensions_give_the_result_of_one_process(
    even_llama_dir, tmp_path, variant
):
    """Two replicas of two ranks each."""
    (alone,) = run_on_ranks(train, 1, even_llama_dir, tmp_path, variant, 1)
    found = run_on_ranks(train, 4, even_llama_dir, tmp_path, variant, 4, 2)
    for one, peer in (found[:2], found[2:]):
        assert one[1] == peer[1]
    assert [a | b for a, b in zip(found[0][1], found[2][1], strict=True)] == alone[1]
    require_same(alone, *found)


@pytest.mark.slow
def test_adam_steps_shards_of_both_kinds(even_llama_dir, tmp_path):
    """Of one step: later ones turn rounding into steps of the size of the rate."""
    adam = {"optimizer": OptimizerConfig(), "actor": GroupConfig(lr=1e-3)}
    once = {"ppo": {"num_update_epochs": 1, "target_kl": None}, **adam}
    steps = partial(train, epochs=1, **once)
    (alone,) = run_on_ranks(steps, 1, even_llama_dir, tmp_path, "separate", 1)
    for found in run_on_ranks(steps, 4, even_llama_dir, tmp_path, "separate", 4, 2):
        for name, value in alone[0].items():
            assert abs(found[0][name] - value).max() < 1e-5, name


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        (build_gpt2, {}, "needs a plan.*has none"),
        (build_llama, {}, r"\(2\) must divide `num_key_value_heads`.*\(1\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(tmp_path, family, settings, why):
    model = AutoModelForCausalLM.from_pretrained(family(tmp_path / "model", **settings))
    with pytest.raises(ModelError, match=f"`tensor_parallel_size`.*{why}"):
        split_layers(model, [], SimpleNamespace(size=lambda: 2))


def export(model_dir, folder, variant, ranks):
    """Train with a running average, and write the model in both of the ways that there are."""
    module = ppo_module(model_dir, **ALL[variant])
    fit(
        folder,
        module,
        data_module(val_prompts=["no"]),
        strategy=strategy(ranks),
        devices=ranks,
        max_epochs=1,
        callbacks=[
            ActorEMA(decay=0.5),
            ExportModel(str(folder / "best"), monitor="val/score_mean", mode="max"),
        ],
    )
    module.export(folder / "called")
    return {n: whole(p.detach()).numpy() for n, p in module.networks.actor.named_parameters()}


@pytest.mark.parametrize(
    ("tiny_model_dir", "variant"),
    crossed(("gpt2", "separate"), ("llama", "lora")),
    indirect=["tiny_model_dir"],
)
def test_models_are_written_from_shards(tiny_model_dir, tmp_path, variant):
    run_on_ranks(export, 1, tiny_model_dir, tmp_path / "one", variant, 1)
    run_on_ranks(export, 2, tiny_model_dir, tmp_path / "two", variant, 2)
    for name in ("best", "called"):
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(tmp_path / ranks / name)
            for ranks in ("two", "one")
        )
        assert type(ours) is type(theirs)
        assert ours.config.architectures == theirs.config.architectures
        for key, weight in theirs.state_dict().items():
            assert_close(ours.state_dict()[key], weight, rtol=0, atol=2e-4, msg=f"{name}: {key}")


def by_command(model_dir, folder):
    """Train, go on and export by the command line, as torchrun would start it."""
    written = folder / "run.yaml"
    written.write_text(yaml.safe_dump(tiny_config(model_dir, folder / "runs")), encoding="utf-8")
    shards = ["--trainer.strategy", "fsdp", "--trainer.devices", "2"]
    run = ["fit", "--config", str(written), *shards]
    first = main([*run, "--trainer.max_epochs", "1"])
    return [first, main([*run, "--ckpt_path", "last"])]


def test_the_word_fsdp_on_the_command_line(tiny_gpt2_dir, tmp_path):
    assert run_on_ranks(by_command, 2, tiny_gpt2_dir, tmp_path) == [[0, 0], [0, 0]]
    (last,) = (tmp_path / "runs").rglob("version_1/checkpoints/last.ckpt")
    assert main(["export", str(last), str(tmp_path / "model")]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"policy": {"quantization": "int8"}}, "policy.quantization"),
        ({"policy": {"compile": True}}, "policy.compile"),
        ({"optimizer": OptimizerConfig(offload=True)}, "optimizer.offload"),
        ({"engine": NativeEngine(dtype="bfloat16")}, "engine.init_args.dtype"),
    ],
)
def test_what_shards_do_not_go_with_is_refused_by_name(tiny_gpt2_dir, settings, named):
    lora = {"lora": LoraConfig(rank=2)} if "policy" in settings else {}
    policy = settings.pop("policy", {}) | lora
    module = ppo_module(tiny_gpt2_dir, policy=policy, **settings)
    with pytest.raises(ConfigError, match=f"`{named}` cannot be used with weights in shards"):
        check_shardable(module.policy, module.optimizer_config, module.engine)


def uneven(model_dir, folder, ranks):
    """One rank's responses may have one token, the other's eight; it has fewer prompts as well."""
    module = ppo_module(model_dir, sampling={"max_new_tokens": 8})
    engine = module.engine

    def generate(model, prompts, *, sampling, **settings):
        short = replace(sampling, max_new_tokens=8 if rank() else 1)
        return NativeEngine.generate(engine, model, prompts, sampling=short, **settings)

    engine.generate = generate
    recorder = fit(
        folder,
        module,
        data_module(buffer={"num_prompts": 5, "num_minibatches": 2}),
        strategy=strategy(ranks),
        devices=ranks,
        enable_checkpointing=False,
    )
    longest = max(max(map(len, c.completions.response_ids)) for c in recorder.collected)
    return longest, [s.steps_taken for s in recorder.stats]


def test_t46_ranks_may_decode_for_different_numbers_of_steps(tiny_gpt2_dir, tmp_path):
    first, second = run_on_ranks(uneven, 2, tiny_gpt2_dir, tmp_path, 2)
    assert first == (1, [4.0, 4.0, 4.0])
    assert second == (8, [4.0, 4.0, 4.0])


def judged(model_dir, reward_dir, folder, kind, shard):
    """Train for a learned reward, and be judged by another on an uneven number of prompts."""
    rewards = [SequenceClassifierReward(str(reward_dir), shard=shard) for _ in range(2)]
    module = ppo_module(
        model_dir, rewards=[RewardTerm(name="score", component=rewards[0])], gold=rewards[1]
    )
    held_out = ["no", "you", "yes yes"]
    run = trainer(
        folder,
        strategy={"one": "auto", "ddp": "ddp", "fsdp": FSDP2Strategy()}[kind],
        devices=1 if kind == "one" else 2,
        max_epochs=2,
        callbacks=[recorder := Recorder()],
    )
    cut = Cut(rewards)
    run.callbacks.append(cut)
    run.fit(module, data_module(val_prompts=held_out, val_batch_size=1))
    own = [(s.raw_score_mean, s.to_log()["val/greedy/gold"]) for s in recorder.stats]
    return own, cut.found, last_checkpoint(run) is not None


class Cut(Callback):
    """Notes which models lie in shards when the update begins."""

    def __init__(self, rewards):
        self.rewards = rewards

    def on_stage_start(self, trainer, module, name):
        if name == "update":
            networks = [n for reward in self.rewards for n in reward.sharded_networks()]
            self.found = [all(map(is_shard, n.base_model.parameters())) for n in networks]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_learned_reward_in_shards_says_what_a_whole_one_does(
    tiny_gpt2_dir, tiny_reward_dir, tmp_path, kind
):
    settings = (tiny_gpt2_dir, tiny_reward_dir, tmp_path)
    ((alone, _, _),) = run_on_ranks(judged, 1, *settings, "one", False)
    for scores, cut, written in run_on_ranks(judged, 2, *settings, kind, True):
        assert cut == [True, True]
        assert written
        assert scores == [pytest.approx(pair, rel=1e-4) for pair in alone]


def test_a_process_that_samples_ahead_needs_whole_layers(tiny_gpt2_dir):
    module = ppo_module(tiny_gpt2_dir, engine=AsyncEngine())
    check_shardable(module.policy, module.optimizer_config, module.engine)
    with pytest.raises(ConfigError, match="AsyncEngine with `tensor_parallel_size` \\(2\\)"):
        check_shardable(module.policy, module.optimizer_config, module.engine, peers=2)
