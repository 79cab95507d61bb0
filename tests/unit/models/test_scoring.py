"""Log-probabilities of the one function that rollout, reference and update share."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_lightning.configs import CriticConfig, PolicyConfig, ReferenceConfig
from ppo_lightning.models import (
    ReferencePolicy,
    build_actor_critic,
    load_causal_lm,
    policy_logprobs,
)
from tests.helpers.sequences import sequences_of
from tests.helpers.tiny_models import build_gpt2, build_llama

PROMPTS = [[5, 9, 11], [12, 7, 30, 8, 21, 14, 6, 25, 10]]
RESPONSES = [[20, 13, 17, 2], [9, 22]]
BATCH = sequences_of(PROMPTS, RESPONSES)


def by_hand(model, prompt, response, temperature: float) -> Tensor:
    """One row at a time, without padding, masks or position ids, in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double()
    table = (logits / temperature).softmax(-1).log()
    places = range(len(prompt) - 1, len(prompt) + len(response) - 1)
    return torch.stack([table[p, token] for p, token in zip(places, response, strict=True)])


def test_t09_left_padded_logprobs_equal_rows_scored_alone(family_dir: Path):
    model = load_causal_lm(PolicyConfig(path=str(family_dir)))
    logprobs = policy_logprobs(model, BATCH, temperature=0.7).logprobs
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        expected = by_hand(model, prompt, response, 0.7)
        assert_close(logprobs[row, : len(response)].double(), expected, rtol=0, atol=1e-5)
    assert (logprobs[1, 2:] == 0).all()


def test_t09_values_and_reference_too(family_dir: Path):
    policy = PolicyConfig(path=str(family_dir))
    networks = build_actor_critic(policy, CriticConfig(head_init="normal"))
    reference = ReferencePolicy.build(ReferenceConfig(), policy, networks.actor)
    with torch.no_grad():
        together = networks(BATCH, temperature=1.0)
    theirs = reference.logprobs(BATCH, temperature=1.0)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        alone = sequences_of([prompt], [response])
        with torch.no_grad():
            own = networks(alone, temperature=1.0)
        n = len(response)
        assert_close(together.values[row, :n], own.values[0], rtol=0, atol=1e-5)
        assert_close(together.final_values[row], own.final_values[0], rtol=0, atol=1e-5)
        ref = reference.logprobs(alone, temperature=1.0).logprobs[0]
        assert_close(theirs.logprobs[row, :n], ref, rtol=0, atol=1e-5)


def test_t17_a_token_changes_its_own_logprob_and_those_after_it(family_dir: Path):
    model = load_causal_lm(PolicyConfig(path=str(family_dir)))
    prompt, response = [5, 9], [20, 13, 2]
    for extra in (0, 2):  # without and with padding on both sides
        base = policy_logprobs(
            model, sequences_of([prompt], [response], extra=extra), temperature=1.0
        )
        for changed in range(3):
            other = [*response]
            other[changed] = 31
            batch = sequences_of([prompt], [other], extra=extra)
            moved = policy_logprobs(model, batch, temperature=1.0)
            same = (moved.logprobs - base.logprobs)[0, :3].abs() < 1e-6
            assert same.tolist() == [t < changed for t in range(3)]


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_t17_value_i_is_of_the_state_before_token_i(family_dir: Path, kind: str):
    networks = build_actor_critic(
        PolicyConfig(path=str(family_dir)), CriticConfig(kind=kind, head_init="normal")
    )
    prompt, response = [5, 9], [20, 13, 2]
    with torch.no_grad():
        base = networks(sequences_of([prompt], [response]), temperature=1.0)
        for changed in range(3):
            other = [*response]
            other[changed] = 31
            moved = networks(sequences_of([prompt], [other]), temperature=1.0)
            same = (moved.values - base.values)[0].abs() < 1e-6
            assert same.tolist() == [t <= changed for t in range(3)]
            assert (moved.final_values - base.final_values).abs() > 1e-4
        # The state after the response is the one before the token that would come next.
        longer = networks(sequences_of([prompt], [[*response, 7]]), temperature=1.0)
    assert_close(base.final_values, longer.values[:, 3], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["separate", "shared"])
@pytest.mark.parametrize("junk", [100, -100, 10**6])
def test_t35_contents_of_padding_change_nothing(tiny_model_dir: Path, kind: str, junk: int):
    networks = build_actor_critic(
        PolicyConfig(path=str(tiny_model_dir)), CriticConfig(kind=kind, head_init="normal")
    )
    clean = sequences_of(PROMPTS, RESPONSES, extra=1)
    dirty = sequences_of(PROMPTS, RESPONSES, extra=1, padding=junk)
    gradients = []
    outputs = []
    for batch in (clean, dirty):
        networks.zero_grad()
        output = networks(batch, temperature=1.0)
        (output.logprobs.sum() + output.values.square().sum() + output.entropy.sum()).backward()
        gradients.append([p.grad for p in networks.parameters() if p.grad is not None])
        outputs.append(output)
    assert gradients[0]
    for name in ("logprobs", "values", "entropy", "final_values"):
        assert torch.equal(getattr(outputs[0], name), getattr(outputs[1], name))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_t35_outputs_under_padding_are_zero_and_send_no_gradient(tiny_model_dir: Path):
    networks = build_actor_critic(
        PolicyConfig(path=str(tiny_model_dir)), CriticConfig(kind="shared", head_init="normal")
    )
    output = networks(BATCH, temperature=1.0)
    padding = ~BATCH.response_mask
    assert padding.any()
    for column in (output.logprobs, output.values, output.entropy):
        assert (column[padding] == 0).all()
        assert (column[~padding] != 0).all()
        networks.zero_grad()
        column[padding].sum().backward(retain_graph=True)
        assert all(p.grad is None or not p.grad.any() for p in networks.parameters())


def test_holes_are_read_but_not_scored(family_dir: Path):
    model = load_causal_lm(PolicyConfig(path=str(family_dir)))
    whole = sequences_of([[5, 9, 11]], [[20, 13, 17, 2]])
    holed = replace(whole, response_mask=torch.tensor([[True, False, False, True]]))
    full = policy_logprobs(model, whole, temperature=1.0, entropy=True)
    part = policy_logprobs(model, holed, temperature=1.0, entropy=True)
    for a, b in ((full.logprobs, part.logprobs), (full.entropy, part.entropy)):
        assert_close(b, a.masked_fill(~holed.response_mask, 0), rtol=0, atol=1e-5)


def test_a_row_without_any_token_gives_zeros(tiny_model_dir: Path):
    networks = build_actor_critic(
        PolicyConfig(path=str(tiny_model_dir)), CriticConfig(head_init="normal")
    )
    output = networks(sequences_of([[5, 9], [7]], [[], [4, 2]]), temperature=1.0)
    for part in (output.logprobs, output.values, output.entropy, output.final_values):
        assert not part[0].any()
        assert part[1].all()


@pytest.mark.parametrize("build", [build_gpt2, build_llama])
def test_t44_bfloat16_model_of_50k_ids_gives_float32_logprobs(build, tmp_path: Path):
    size = {"n_embd": 16, "n_layer": 1} if build is build_gpt2 else {"num_hidden_layers": 1}
    folder = build(tmp_path / "model", vocab_size=50_000, **size)
    model = load_causal_lm(PolicyConfig(path=str(folder), dtype="bfloat16"))
    assert model.dtype == torch.bfloat16
    output = policy_logprobs(model, BATCH, temperature=0.9, entropy=True, logits=True)
    again = policy_logprobs(model, BATCH, temperature=0.9)
    assert output.logprobs.dtype == output.entropy.dtype == output.logits.dtype == torch.float32
    assert (output.logprobs <= 0).all()
    assert_close(output.logprobs, again.logprobs, rtol=1e-6, atol=0)
    # Of the model's own logits only the normalisation is ours: exact to float32, not to bfloat16.
    table = (output.logits.double() / 0.9).log_softmax(-1)
    expected = table.gather(-1, BATCH.response_ids[..., None])[..., 0]
    mask = BATCH.response_mask
    assert_close(output.logprobs[mask].double(), expected[mask], rtol=1e-6, atol=0)


def test_float64_models_stay_float64(family_dir: Path):
    networks = build_actor_critic(
        PolicyConfig(path=str(family_dir), dtype="float64"), CriticConfig(head_init="normal")
    )
    output = networks(BATCH, temperature=0.8, logits=True)
    assert {t.dtype for t in output} == {torch.float64}


def test_logits_come_before_the_temperature_and_at_the_response_only(tiny_model_dir: Path):
    model = load_causal_lm(PolicyConfig(path=str(tiny_model_dir)))
    seen: list[tuple[int, ...]] = []
    model.lm_head.register_forward_hook(lambda _, __, out: seen.append(tuple(out.shape)))
    hot = policy_logprobs(model, BATCH, temperature=2.0, logits=True)
    cold = policy_logprobs(model, BATCH, temperature=0.5, logits=True)
    assert torch.equal(hot.logits, cold.logits)
    assert not torch.equal(hot.logprobs, cold.logprobs)
    assert {shape[1] for shape in seen} == {6}  # valid tokens, never [B, P + R, V]


def test_families_without_logits_to_keep_are_sliced(tiny_llama_dir: Path):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir), padding_free=False))
    expected = policy_logprobs(model, BATCH, temperature=1.0)

    class Older(type(model)):
        def forward(self, input_ids, attention_mask, position_ids):
            return super().forward(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids
            )

    model.__class__ = Older
    assert torch.equal(policy_logprobs(model, BATCH, temperature=1.0).logprobs, expected.logprobs)
