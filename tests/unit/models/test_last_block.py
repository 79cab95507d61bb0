"""The last block leaves out what nobody asks about, and it shows nowhere else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, MambaConfig, MambaForCausalLM

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig
from ppo_lightning.functional import products
from ppo_lightning.models import (
    build_actor_critic,
    load_causal_lm,
    load_reward_model,
    policy_logprobs,
    sequence_logits,
)
from ppo_lightning.models.adapters import block_names
from ppo_lightning.models.last_block import (
    keep_narrow_layers,
    learn_narrow_layers,
    narrow_layers_of,
    narrowed,
)
from ppo_lightning.models.layout import TokenLayout
from tests.helpers.gradients import distance, gradients_of
from tests.helpers.sequences import sequences_of

PROMPTS, RESPONSES = [[5, 9, 11], [12, 7, 30, 8, 21], [3]], [[20, 13, 17, 2], [9, 22], [4, 5, 6]]
BATCH = sequences_of(PROMPTS, RESPONSES)
SHARED = sequences_of([*PROMPTS, *PROMPTS[:2]], [*RESPONSES, [30, 9, 5], [7]], extra=1)
LLAMA = ("self_attn.q_proj", "self_attn.o_proj", "mlp")


def layers_of(folder, **settings):
    return narrow_layers_of(load_causal_lm(PolicyConfig(path=str(folder), **settings)))


def rows_seen(layer):
    """Numbers of rows that a layer is called with from now on."""
    found = []
    layer.register_forward_pre_hook(lambda _, args: found.append(args[0].flatten(0, -2).shape[0]))
    return found


def test_it_is_found_out_what_may_leave_tokens_out(
    tiny_llama_dir, tiny_gpt2_dir, tiny_phi_dir, tmp_path
):
    assert layers_of(tiny_llama_dir) == LLAMA
    assert layers_of(tiny_gpt2_dir) == ("attn.c_proj", "mlp")  # one layer makes queries and keys
    assert layers_of(tiny_phi_dir) == ("self_attn.q_proj", "self_attn.dense", "mlp")
    assert layers_of(tiny_llama_dir, fused_layers=False) == ()
    config = MambaConfig(vocab_size=70, hidden_size=32, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    assert not {"mixer", "mixer.in_proj", "mixer.x_proj"} & {*layers_of(tmp_path)}


def test_of_a_model_at_its_start_keys_are_all_computed(tmp_path):
    # Its weights are so small that missing keys would hardly move what it says.
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=70, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, initializer_range=1e-4,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    assert layers_of(tmp_path) == ("attention.dense", "mlp")


class Shifted(nn.Module):
    """A perceptron that looks at the token before, too."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x + x.roll(1, dims=1))


def test_a_layer_that_looks_at_its_neighbours_computes_all(tiny_llama_dir):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    block = model.model.layers[-1]
    block.mlp = Shifted(block.mlp)
    assert learn_narrow_layers(model) == ("mlp.plain",)  # and it reads what attention made of them


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
@pytest.mark.parametrize("kind", ["shared", "separate"])
@pytest.mark.parametrize("batch", [BATCH, SHARED], ids=["apart", "shared prompts"])
def test_numbers_and_gradients_are_those_of_all_tokens(family_dir, batch, kind, lora, mixed):
    found = []
    for switch in (True, False):
        torch.manual_seed(0)
        policy = PolicyConfig(path=str(family_dir), lora=lora)
        networks = build_actor_critic(policy, CriticConfig(kind=kind, head_init="normal"))
        trunks = [networks.causal_lm]
        if networks.critic is not None:
            trunks.append(networks.critic.backbone)
        for trunk in trunks:
            assert narrow_layers_of(trunk)
            keep_narrow_layers(trunk, narrow_layers_of(trunk) if switch else ())
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            found.append(gradients_of(networks, batch))
    (ours, our_grads), (theirs, their_grads) = found
    tolerance = 0.02 if mixed else 1e-5
    for name in ("logprobs", "values", "entropy", "final_values"):
        assert_close(getattr(ours, name), getattr(theirs, name), rtol=tolerance, atol=tolerance)
    assert our_grads.keys() == their_grads.keys()
    assert distance(our_grads, their_grads) <= (0.02 if mixed else 1e-6)


def test_a_row_that_nobody_asks_about_is_one_token():
    batch = sequences_of([[5, 9, 11]], [[20, 13]])
    silent = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
    assert TokenLayout.of(silent, packed=True).rows.tolist() == [0]


@pytest.mark.parametrize("padding_free", [True, False])
def test_only_tokens_that_are_asked_about_are_computed(tiny_llama_dir, padding_free, monkeypatch):
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: False)  # nothing is filled up
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir), padding_free=padding_free))
    first, last = (rows_seen(model.model.layers[n].mlp.gate_proj) for n in (0, -1))
    policy_logprobs(model, BATCH, temperature=1.0)
    asked = sum(map(len, RESPONSES))
    assert last == [asked]
    assert first[0] > asked
    last.clear()
    policy_logprobs(model, sequences_of([[5, 9]] * 2, [[3], [4]]), temperature=1.0)
    assert last == [1 if padding_free else 2]  # both are asked of the prompt's last token


def test_fillers_are_computed_up_to_a_round_number(tiny_llama_dir):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    last = rows_seen(model.model.layers[-1].mlp.gate_proj)
    batch = sequences_of([[5, 9, 11] * 10], [[20, 13, 17, 2]])
    with torch.autocast("cpu", torch.bfloat16):
        policy_logprobs(model, batch, temperature=1.0)
    assert last == [16]


def test_blocks_that_are_run_again_leave_out_what_they_left_out_before(family_dir, monkeypatch):
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: False)
    found, asked = [], sum(map(len, RESPONSES))
    for again in (True, False):
        model = load_causal_lm(PolicyConfig(path=str(family_dir), gradient_checkpointing=again))
        perceptron = model.get_submodule(f"{block_names(model)[-1]}.mlp")
        last = rows_seen(next(perceptron.children()))
        policy_logprobs(model, BATCH, temperature=1.0).logprobs.sum().backward()
        assert last == [asked] * (2 if again else 1)
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    assert all(gradient.equal(found[1][name]) for name, gradient in found[0].items())


def test_compiled_blocks_compute_all_tokens(tiny_llama_dir):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    layer = model.model.layers[-1].mlp
    for is_plain in (True, False):
        with narrowed(model, torch.tensor([0])):
            assert ("forward" in vars(layer)) is is_plain
        layer.compile(backend="eager")


def test_a_reward_model_computes_one_token_of_each_text(tiny_reward_dir: Path):
    model, _ = load_reward_model(str(tiny_reward_dir))
    assert narrow_layers_of(model)
    ids, mask = torch.arange(1, 13).view(2, 6), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    last = rows_seen(model.model.layers[-1].mlp.gate_proj)
    found = sequence_logits(model, ids, mask)
    keep_narrow_layers(model, ())
    assert_close(found, sequence_logits(model, ids, mask), rtol=1e-5, atol=1e-6)
    assert last == [2, 12]
