"""What is predicted is what the run's own code allocates, with nothing loaded."""

import shutil
from dataclasses import replace

import pytest

from ppo_lightning.configs import (
    BufferConfig,
    CriticConfig,
    LoraConfig,
    PolicyConfig,
    PPOConfig,
    ReferenceConfig,
    SamplingConfig,
)
from ppo_lightning.errors import ModelError
from ppo_lightning.estimate import Estimator, RewardModel, Run, estimate
from ppo_lightning.estimate.networks import Networks
from ppo_lightning.estimate.passes import sample, score, update
from ppo_lightning.estimate.tally import Blank, ByteTally
from ppo_lightning.functional import products
from ppo_lightning.models import ReferencePolicy, build_actor_critic, embedding_rows
from ppo_lightning.modules.optim import build_optimizer

BESIDE = ("libraries", "heap", "buffer")
VARIANTS = {
    "full": {},
    "shared": {"critic_model": CriticConfig(kind="shared")},
    "lora": {"lora": LoraConfig(rank=4)},
    "frozen trunk": {"lora": LoraConfig(rank=4, layers=1)},
    "checkpointing": {"gradient_checkpointing": True},
    "gates": {"gradient_checkpointing": "gates"},
    "padded": {"padding_free": False},
    "microbatches": {"ppo": PPOConfig(microbatch_tokens=30)},
    "in turn": {"ppo": PPOConfig(update_order="in_turn")},
    "bf16": {"precision": "bf16-mixed"},
    "grouped": {"buffer": BufferConfig(num_prompts=2, responses_per_prompt=4, num_minibatches=1)},
}


def run_of(folder, *, lora=None, gradient_checkpointing=False, padding_free=True, **settings):
    policy = PolicyConfig(
        path=str(folder),
        lora=lora,
        gradient_checkpointing=gradient_checkpointing,
        padding_free=padding_free,
    )
    given = {
        "sampling": SamplingConfig(max_new_tokens=8),
        "buffer": BufferConfig(num_prompts=8, num_minibatches=2),
    }
    return Run(policy=policy, prompt_tokens=5, **given | settings)


REMEMBERING = Estimator()
"""What two runs have in common is counted once in all tests that do not ask for it themselves."""


def parts_of(run, stage, predict=REMEMBERING):
    return next(found.parts for found in predict(run).stages if found.name == stage)


def loaded(run):
    """The networks with their weights, loaded as a run does."""
    trained = build_actor_critic(run.policy, run.critic_model).train()
    return Networks(
        trained=trained,
        reference=ReferencePolicy.build(run.reference, run.policy, trained.actor),
        scorers=(),
        optimizer=build_optimizer(
            list(trained.actor_parameters()),
            list(trained.critic_parameters()),
            config=run.optimizer,
            actor_lr=1e-6,
            critic_lr=1e-6,
        ),
        vocabulary=embedding_rows(trained.causal_lm),
    )


def counted(run, networks):
    """Bytes of all tensors at the peak of each stage that is run with weights."""
    tally, peaks = ByteTally(), {}
    networks.claim(tally)
    for name, stage in {"rollout": sample, "scoring": score, "update": update}.items():
        tally.restart()
        with tally:
            stage(run, networks, tally)
        peaks[name] = tally.peak
    return peaks


@pytest.mark.parametrize("variant", VARIANTS)
def test_as_much_is_predicted_as_loaded_networks_take(tiny_llama_dir, variant):
    _check_prediction(run_of(tiny_llama_dir, **VARIANTS[variant]))


def test_as_much_is_predicted_of_tied_weights(tiny_gpt2_dir):
    _check_prediction(run_of(tiny_gpt2_dir))


def _check_prediction(run):
    measured = counted(run, loaded(run))
    predicted = {
        stage.name: sum(n for name, n in stage.parts.items() if name not in BESIDE)
        for stage in REMEMBERING(run).stages
        if stage.name in measured
    }
    assert predicted == pytest.approx(measured, rel=0.02)


def test_a_folder_without_weights_is_enough(tiny_llama_dir, tmp_path):
    folder = shutil.copytree(tiny_llama_dir, tmp_path / "bare")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert estimate(run_of(folder)) == REMEMBERING(run_of(tiny_llama_dir))


def test_weights_and_states_by_hand(tiny_llama_dir, tiny_reward_dir):
    run = run_of(tiny_llama_dir, rewards=(RewardModel(name="rm", path=str(tiny_reward_dir)),))
    networks = loaded(run)
    size = {
        name: 4 * sum(p.numel() for p in part.parameters())
        for name, part in vars_of(networks).items()
    }
    parts = parts_of(run, "load")
    states = 2 * (size["actor"] + size["critic"])
    steps = 4 * len(list(networks.trained.parameters()))
    assert parts["optimiser states"] == states + steps
    # Buffers are counted too: a rotary embedding's frequencies.
    for name in ("actor", "critic"):
        assert size[name] <= parts[name] <= size[name] + 256
    assert parts["reference"] == parts["actor"]
    assert parts["reward models"] > 0


def vars_of(networks):
    return {"actor": networks.trained.actor, "critic": networks.trained.critic}


def test_with_adapters_the_reference_is_the_actor_and_states_are_few(tiny_llama_dir):
    full, adapted = (parts_of(run_of(tiny_llama_dir, lora=x), "load") for x in (None, LoraConfig()))
    assert "reference" not in adapted
    assert adapted["optimiser states"] < full["optimiser states"]
    other = run_of(tiny_llama_dir, lora=LoraConfig(), reference=ReferenceConfig(dtype="bfloat16"))
    assert parts_of(other, "load")["reference"] == pytest.approx(full["reference"] / 2, rel=0.01)


def test_keys_and_values_by_hand(tiny_llama_dir):
    run = run_of(tiny_llama_dir)
    config = build_actor_critic(run.policy, CriticConfig(kind="shared")).causal_lm.config
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    tokens = 8 * (5 + 8)
    expected = 2 * config.num_hidden_layers * tokens * width * 4
    assert parts_of(run, "rollout")["KV cache"] == expected
    fewer = replace(run, sampling=SamplingConfig(max_new_tokens=8, batch_size=2))
    assert parts_of(fewer, "rollout")["KV cache"] == expected / 4


def test_states_of_frozen_blocks_by_hand(tiny_llama_dir, monkeypatch):
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: False)  # which fills rows up
    lora, predict = LoraConfig(rank=4, layers=1), Estimator()  # others may have filled them up
    stages = predict(run_of(tiny_llama_dir, lora=lora)).stages
    found = {stage.name: stage.parts.get("frozen trunk") for stage in stages}
    expected = (8 * (5 + 8) + 1) * 32 * 4  # and a row of 0
    assert (found["rollout"], found["scoring"], found["update"]) == (None, expected, expected)
    grouped = run_of(tiny_llama_dir, lora=lora, buffer=VARIANTS["grouped"]["buffer"])
    assert parts_of(grouped, "update", predict)["frozen trunk"] == (2 * 5 + 8 * 8 + 1) * 32 * 4


def test_states_that_nobody_wants_take_nothing(tiny_llama_dir):
    run = run_of(tiny_llama_dir, lora=LoraConfig(rank=4, layers=1))
    run = replace(run, policy=replace(run.policy, cache_frozen_trunk=False))
    assert not Networks.build(run, Blank()).trained.has_frozen_trunk


def test_gradients_meet_activations_from_the_second_microbatch_on(tiny_llama_dir):
    long = {"sampling": SamplingConfig(max_new_tokens=60)}  # activations outweigh all else
    one, two = (
        parts_of(run_of(tiny_llama_dir, ppo=PPOConfig(microbatch_tokens=n), **long), "update")
        for n in (None, 65)
    )
    weights = one["actor"] + one["critic"]
    assert two["activations"] < one["activations"] / 3
    assert one.get("gradients", 0) < 0.5 * weights < 0.9 * weights < two["gradients"]


def test_a_gpu_is_counted_without_one(tiny_llama_dir):
    run = run_of(tiny_llama_dir, device="cuda")
    found = REMEMBERING(run)
    assert "heap" not in found.peak.parts
    assert found.peak.name == "update"
    on_cpu = parts_of(run_of(tiny_llama_dir), "load")
    assert found.stages[0].parts == {n: v for n, v in on_cpu.items() if n in found.stages[0].parts}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"precision": "transformer-engine"}, "`precision` must be one of 32-true"),
        ({"prompt_tokens": 0}, "`prompt_tokens` must be at least 1, got 0"),
    ],
)
def test_a_run_that_cannot_be_estimated_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Run(**{"policy": PolicyConfig(path="x"), "prompt_tokens": 4, **settings})


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        estimate(run_of(tmp_path / "nowhere"))
