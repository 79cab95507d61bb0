"""What a rank keeps where ranks share, and what is put together for a while."""

import json
from dataclasses import replace

import pytest

from ppo_lightning.configs import (
    BufferConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    PPOConfig,
    SamplingConfig,
)
from ppo_lightning.estimate import (
    Architecture,
    Estimator,
    RewardModel,
    Run,
    SketchEstimator,
    Strategy,
)
from ppo_lightning.estimate.changes import STEPS
from ppo_lightning.models import load_causal_lm
from tests.helpers.processes import run_on_ranks
from tests.unit.estimate.test_memory import run_of

FSDP = {"strategy": Strategy(kind="fsdp"), "ranks": 4, "device": "cuda"}
KEPT = ("actor", "critic", "reference", "optimiser states", "gradients")


@pytest.fixture(scope="module")
def predict():
    return Estimator()


def stages(predict, run):
    return {stage.name: dict(stage.parts) for stage in predict(run).stages}


def wide(folder, **settings):
    """Every rank has as many rows as one alone, whatever their number."""
    ranks, strategy = settings.get("ranks", 1), settings.get("strategy", Strategy())
    rows = 8 * ranks // strategy.tensor
    return run_of(folder, buffer=BufferConfig(num_prompts=rows, num_minibatches=2), **settings)


def test_each_strategy_cuts_what_it_says(predict, tiny_llama_dir):
    def of(kind, stage=0):
        strategy = Strategy(kind=kind, stage=stage)
        run = wide(tiny_llama_dir, strategy=strategy, ranks=4, device="cuda")
        return stages(predict, run)["update"]

    ddp, fsdp = of("ddp"), of("fsdp")
    trained = sum(size.trained for size in predict.sizes(wide(tiny_llama_dir)).trained)
    assert ddp["gradients"] == ddp["buckets"] == trained
    cut = {"fsdp": KEPT, 1: KEPT[3:4], 2: KEPT[3:], 3: KEPT}
    for name, parts in {"fsdp": fsdp, **{n: of("deepspeed", n) for n in (1, 2, 3)}}.items():
        for part in KEPT:
            share = 4 if part in cut[name] else 1
            assert parts[part] == pytest.approx(ddp[part] / share, abs=1), (name, part)
    assert of("deepspeed", 1)["master weights"] == trained / 4
    assert of("deepspeed", 1)["buckets"] == trained  # a tiny model fills no bucket
    assert "buckets" not in fsdp
    assert fsdp["activations"] <= ddp["activations"]


def test_what_is_put_together(predict, tiny_llama_dir):
    run = wide(tiny_llama_dir, **FSDP)
    sizes, found = predict.sizes(run), stages(predict, run)
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    block = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
    whole = 4 * sum(p.numel() for p in model.parameters())
    blocks = len(model.model.layers)
    assert (sizes.actor.weights, sizes.actor.block) == (whole, block)
    assert sizes.actor.rest == whole - blocks * block
    assert found["rollout"]["gathered"] == whole
    critic = sizes.critic.rest
    assert found["scoring"]["gathered"] == 2 * block + 2 * sizes.actor.rest + critic
    assert found["update"]["gathered"] == 2 * (2 * block + sizes.actor.rest + critic)
    assert "gathered" not in found["load"]


def test_an_embedding_that_is_the_output_layer_is_multiplied_with(predict, tiny_gpt2_dir):
    model = load_causal_lm(PolicyConfig(path=str(tiny_gpt2_dir)))
    positions = model.transformer.wpe.weight.numel()
    total = sum(p.numel() for p in model.parameters())
    assert predict.sizes(wide(tiny_gpt2_dir)).actor.parameters == total - positions


def test_one_rank_gathers_nothing(predict, tiny_llama_dir):
    found = stages(predict, wide(tiny_llama_dir, **FSDP | {"ranks": 1}))
    assert not any("gathered" in parts for parts in found.values())


def test_learned_rewards_stay_whole(predict, tiny_llama_dir, tiny_reward_dir):
    models = (RewardModel(name="rm", path=str(tiny_reward_dir)),)
    one = stages(predict, wide(tiny_llama_dir, rewards=models, device="cuda"))
    found = stages(predict, wide(tiny_llama_dir, rewards=models, **FSDP))
    assert found["reward"]["reward models"] == one["reward"]["reward models"]


def test_adapters_are_all_that_has_gradients(predict, tiny_llama_dir):
    run = wide(tiny_llama_dir, lora=LoraConfig(rank=2), **FSDP)
    sizes, found = predict.sizes(run), stages(predict, run)
    assert sizes.actor.trained < sizes.actor.weights / 2
    assert sizes.reference is None
    trained = sizes.actor.trained + sizes.critic.trained
    assert found["update"]["gradients"] == pytest.approx(trained / 4, abs=1)


def test_what_a_process_on_a_cpu_takes_is_left_out_of_shards(predict, tiny_llama_dir):
    cut = stages(predict, wide(tiny_llama_dir, **FSDP | {"device": "cpu"}))["update"]
    assert not {"libraries", "heap"} & cut.keys()
    both = {"strategy": Strategy(kind="ddp"), "ranks": 2}
    assert {"libraries", "heap"} <= stages(predict, wide(tiny_llama_dir, **both))["update"].keys()


def _shards_of(ranks, folder):
    """Bytes of a rank's own shards under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = load_causal_lm(PolicyConfig(path=folder))
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return sum(p.to_local().numel() * 4 for p in model.parameters())


def test_shards_are_as_large_as_those_of_fsdp2(predict, tiny_llama_dir):
    run = wide(tiny_llama_dir, **FSDP | {"ranks": 2})
    measured = run_on_ranks(_shards_of, 2, 2, str(tiny_llama_dir))
    # Rows are dealt whole, so the ranks differ where they do not divide; buffers are not cut.
    assert sum(measured) == predict.sizes(run).actor.weights
    actor = stages(predict, run)["load"]["actor"]
    assert actor == pytest.approx(max(measured), rel=0.02)


# ---------------------------------------------------------------------- sketches

SHAPE = Architecture(
    layers=6,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_width=8,
    intermediate=64,
    vocabulary=96,
    tied=False,
)


def sketched(**settings):
    return Run(
        policy=PolicyConfig(path="nowhere", gradient_checkpointing=True),
        prompt_tokens=24,
        sampling=SamplingConfig(max_new_tokens=12),
        ppo=PPOConfig(microbatch_tokens=256),
        buffer=BufferConfig(num_prompts=32, num_minibatches=2),
        optimizer=OptimizerConfig(name="SGD"),
        **FSDP | {"ranks": 2} | settings,
    )


def test_few_blocks_tell_the_memory_of_many(predict, tmp_path):
    run, sketch = sketched(), SketchEstimator(SHAPE)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE.settings()), encoding="utf-8")
    whole = replace(run, policy=replace(run.policy, path=str(tmp_path)))
    sizes = sketch.sizes(run)
    assert sizes == predict.sizes(whole)
    # What is multiplied with: the embedding is looked up, and the output layer is another.
    assert sizes.actor.parameters == SHAPE.parameters - 96 * 32
    assert sizes.actor.weights == 4 * SHAPE.parameters
    for one, other in zip(sketch(run).stages, predict(whole).stages, strict=True):
        assert one.total == pytest.approx(other.total, rel=0.02), one.name


def test_few_blocks_tell_it_too_where_the_last_leaves_tokens_out(predict, tmp_path):
    run = sketched(strategy=Strategy(kind="ddp"))  # blocks in shards compute all tokens
    (tmp_path / "config.json").write_text(json.dumps(SHAPE.settings()), encoding="utf-8")
    whole = predict(replace(run, policy=replace(run.policy, path=str(tmp_path)))).stages
    for one, other in zip(SketchEstimator(SHAPE)(run).stages, whole, strict=True):
        assert one.total == pytest.approx(other.total, rel=0.02), one.name


def test_tensor_parallel_cuts_blocks_and_the_cache():
    predict, run = SketchEstimator(SHAPE), sketched(strategy=Strategy(kind="fsdp", tensor=2))
    half = SHAPE.on_one_of(2)
    assert predict.sizes(run).actor.weights == 4 * half.parameters
    found = stages(predict, run)
    # One group of two ranks has all 32 responses of 36 tokens.
    assert found["rollout"]["KV cache"] == 4 * half.kv_width * 32 * 36
    assert found["load"]["actor"] == pytest.approx(4 * half.parameters, rel=0.01)


# ---------------------------------------------------------------------- changes


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        (Strategy(kind="ddp"), {"trainer.strategy": "fsdp"}),
        (Strategy(kind="deepspeed", stage=1), {"trainer.strategy": "fsdp"}),
        (Strategy(kind="fsdp"), {"tensor-parallel": "8"}),
        (Strategy(kind="fsdp", tensor=8), {}),
        (Strategy(kind="deepspeed", stage=3), {}),
    ],
)
def test_the_next_strategy_is_proposed(strategy, settings):
    run = Run(
        policy=PolicyConfig(path="x"),
        prompt_tokens=4,
        device="cuda",
        ranks=16,
        strategy=strategy,
        tensor_limit=8,
    )
    offered = [change for step in STEPS if (change := step(run))]
    told = {k: v for change in offered for k, v in change.settings.items()}
    assert {
        k: v for k, v in told.items() if k in ("trainer.strategy", "tensor-parallel")
    } == settings
    assert ("model.init_args.optimizer.offload" in told) == (strategy.kind == "ddp")
    alone = [step(replace(run, ranks=1, strategy=Strategy())) for step in STEPS]
    assert not any("trainer.strategy" in change.settings for change in alone if change)
