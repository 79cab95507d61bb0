"""Compiled blocks: the same numbers, no code for each batch, and plain code where it must be."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close

from ppo_lightning.configs import (
    BackboneConfig,
    CriticConfig,
    LoraConfig,
    PolicyConfig,
    ReferenceConfig,
    SamplingConfig,
)
from ppo_lightning.errors import ConfigError
from ppo_lightning.functional import products
from ppo_lightning.models import (
    ReferencePolicy,
    build_actor_critic,
    build_scorer,
    compile_blocks,
    compiling,
    uncompiled,
)
from ppo_lightning.models.skeleton import without_weights
from ppo_lightning.rollout import NativeEngine, StopRules
from ppo_lightning.types import Sequences
from tests.helpers.scripted import prompt_batch

# Dynamo asks every tensor for `.grad`, and silences that in a way that turning warnings into errors
# comes before.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Code of another test would not be made again, and not be counted.

    Nor are rows filled up: a number of tokens that is a width of the model gets code of its own.
    """
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: False)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch):
    """Trace graphs and run them as they are: what is tested comes before any compiler."""
    monkeypatch.setattr(compiling, "BACKEND", "eager")


@pytest.fixture
def differentiated(monkeypatch):
    """As ``traced``, with graphs of the gradients: what a C++ compiler adds is not tested here."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")


def num_graphs():
    return counters["stats"]["unique_graphs"]


def sequences(number):
    """Three rows of other lengths each time."""
    generator = torch.Generator().manual_seed(number)
    prompt, response = 5 + number % 3, 6 + number % 4
    lengths = torch.randint(1, prompt + 1, (3,), generator=generator)
    ends = torch.randint(1, response + 1, (3,), generator=generator)
    return Sequences(
        prompt_ids=torch.randint(5, 30, (3, prompt), generator=generator),
        prompt_mask=torch.arange(prompt) >= prompt - lengths[:, None],
        response_ids=torch.randint(5, 30, (3, response), generator=generator),
        response_mask=torch.arange(response) < ends[:, None],
    )


def networks(folder, *, compiled, **settings):
    """Actor and critic; adapters that act, where there are any."""
    checkpointing = settings.pop("gradient_checkpointing", False)
    both = {"compile": compiled, "gradient_checkpointing": checkpointing}
    critic = CriticConfig(head_init="normal", **both)
    if settings.pop("critic", "separate") == "shared":
        critic = CriticConfig(head_init="normal", kind="shared")
    policy = PolicyConfig(path=str(folder), **both, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = build_actor_critic(policy, critic)
        for name, weight in made.actor.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight)
    return made


def trained(model, given):
    """Outputs with and without gradient, and the gradients."""
    model.zero_grad()
    output = model(given, temperature=0.7)
    (output.logprobs.sum() + output.entropy.sum() + output.values.square().sum()).backward()
    with torch.no_grad():
        plain = model(given, temperature=0.7)
    found = [output.logprobs, output.entropy, output.values, plain.logprobs, plain.values]
    return found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_like_plain(folder, batches, **settings):
    compiled, plain = (networks(folder, compiled=on, **settings) for on in (True, False))
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    counts = []
    for number in range(batches):
        (found, gradients), (expected, known) = (
            trained(model, sequences(number)) for model in (compiled, plain)
        )
        counts.append(num_graphs())
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, rtol=0, atol=1e-4)
        assert gradients.keys() == known.keys()
        for name, gradient in gradients.items():
            assert_close(gradient, known[name], rtol=1e-4, atol=1e-3, msg=name)
    return counts


ADAPTED = {"gradient_checkpointing": True, "lora": LoraConfig(rank=2)}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("gpt2", {}, id="gpt2-plain"),
        pytest.param("llama", ADAPTED | {"critic": "shared"}, id="llama-checkpointed-adapters"),
        # Above are each family, each setting, and each critic, once.
        pytest.param("llama", {}, id="llama-plain", marks=pytest.mark.slow),
        pytest.param("gpt2", ADAPTED, id="gpt2-checkpointed-adapters", marks=pytest.mark.slow),
    ],
)
def test_numbers_are_those_of_the_plain_code_and_graphs_are_made_once(
    request, differentiated, family, settings
):
    counts = assert_like_plain(request.getfixturevalue(f"tiny_{family}_dir"), 4, **settings)
    assert counts[0] > 0
    assert len(set(counts)) == 1
    assert not counters["recompile_limit"]


def test_rows_without_a_packing_and_autocast(tiny_llama_dir, traced):
    model = networks(tiny_llama_dir, compiled=True, padding_free=False)
    plain = networks(tiny_llama_dir, compiled=False, padding_free=False)
    counts = []
    for number in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = (m(sequences(number), temperature=1.0) for m in (model, plain))
        counts.append(num_graphs())
        assert_close(found.logprobs, expected.logprobs, rtol=0, atol=0.3)
    assert 0 < counts[0] == counts[-1]


def test_decoding_runs_the_plain_code(tiny_llama_dir, traced):
    model = networks(tiny_llama_dir, compiled=True).actor
    NativeEngine().generate(
        model,
        prompt_batch([[5, 6, 7], [8]]),
        sampling=SamplingConfig(max_new_tokens=4),
        stops=StopRules(end_ids=(), pad_id=0),
        policy_version=0,
    )
    assert num_graphs() == 0
    block = model.get_submodule("model.layers.0.mlp")
    with uncompiled(model):
        block(torch.zeros(2, 32))
    assert num_graphs() == 0
    block(torch.zeros(2, 32))
    assert num_graphs() == 1


def test_a_copy_has_weights_of_its_own(tiny_llama_dir, traced):
    model = networks(tiny_llama_dir, compiled=True).actor
    given = sequences(0)
    ids = given.prompt_ids
    before = model(input_ids=ids).logits
    frozen = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    assert_close(frozen(input_ids=ids).logits, before, rtol=0, atol=1e-4)


def test_a_refreshed_reference_of_adapters_is_compiled_as_the_actor(tiny_llama_dir, traced):
    policy = PolicyConfig(path=str(tiny_llama_dir), lora=LoraConfig(rank=2), compile=True)
    actor = build_actor_critic(policy, CriticConfig(kind="shared")).actor
    reference = ReferencePolicy.build(ReferenceConfig(), policy, actor)
    reference.refresh(actor)
    reference.logprobs(sequences(0), temperature=1.0)
    assert num_graphs() > 0


def test_a_reward_model_is_compiled(tiny_llama_dir, traced):
    model = build_scorer(BackboneConfig(path=str(tiny_llama_dir), compile=True))
    model.config.pad_token_id = 0
    model(input_ids=torch.tensor([[5, 6, 7]]))
    assert num_graphs() > 0


def test_a_model_without_weights_is_left_alone(tiny_llama_dir, monkeypatch):
    monkeypatch.setattr(compiling, "_try_compiler", lambda: pytest.fail("nothing to compile"))
    with without_weights():
        networks(tiny_llama_dir, compiled=True)


def test_without_a_compiler_the_setting_is_named_at_once(tiny_llama_dir, monkeypatch):
    def fails():
        raise RuntimeError("no g++\nmore")

    monkeypatch.setattr(compiling, "_try_compiler", fails)
    with pytest.raises(ConfigError, match=r"`policy\.compile: true` needs a C\+\+ .*\(no g\+\+\)"):
        networks(tiny_llama_dir, compiled=True)
    critic = CriticConfig(compile=True)
    with pytest.raises(ConfigError, match=r"`critic_model\.compile: true` needs"):
        build_actor_critic(PolicyConfig(path=str(tiny_llama_dir)), critic)


def test_blocks_that_are_no_list_are_an_error(traced):
    model = torch.nn.Linear(2, 2)
    model.config = PolicyConfig(path="x")
    object.__setattr__(model.config, "num_hidden_layers", 2)
    with pytest.raises(ValueError, match=r"`policy\.compile`: this model's blocks are not one"):
        compile_blocks(model, setting="policy.compile")


@pytest.mark.slow
def test_a_missing_compiler_is_found_before_the_run():
    code = (
        "from ppo_lightning.models import compiling\n"
        "try:\n    compiling._require_compiler('policy.compile')\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    environment = os.environ | {"CXX": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("ConfigError `policy.compile: true` needs a C++ compiler")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inductor's own
def test_compiled_code_says_what_the_plain_code_says(tiny_llama_dir):
    counts = assert_like_plain(tiny_llama_dir, 3, **ADAPTED)
    assert 0 < counts[0] == counts[-1]


def test_nothing_is_compiled_while_models_are_loaded(tiny_llama_dir, traced):
    """Frozen blocks are tried on the CPU, wherever the run is."""
    networks(tiny_llama_dir, compiled=True, critic="shared", lora=LoraConfig(rank=2, layers=1))
    assert not counters["frames"]
