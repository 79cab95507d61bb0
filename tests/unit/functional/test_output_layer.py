"""Output layer and log-softmax in one: the numbers of the two apart, a few rows at a time."""

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.functional import linear_logprobs, logprobs_and_entropy

ROWS, WIDTH, VOCAB = 37, 16, 50
MODULE = "ppo_lightning.functional.output_layer"


@pytest.fixture(params=["kept", "made again"], autouse=True)
def logits_for_backward(request, monkeypatch):
    """Every test, with few logits and with many."""
    if request.param == "made again":
        monkeypatch.setattr(f"{MODULE}.KEPT_BYTES", 0)
    return request.param


def layer(dtype=torch.float64, *, bias=True):
    generator = torch.Generator().manual_seed(3)
    shapes = [(ROWS, WIDTH), (VOCAB, WIDTH), *([(VOCAB,)] if bias else [])]
    made = [torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes]
    ids = torch.randint(VOCAB, (ROWS,), generator=generator)
    return [*(part.requires_grad_() for part in made), *([] if bias else [None])], ids


def weights(dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(2, ROWS, generator=generator, dtype=dtype)


def plain(parts, ids, **settings):
    hidden, weight, bias = parts
    return logprobs_and_entropy(torch.nn.functional.linear(hidden, weight, bias), ids, **settings)


def gradients(result, parts, *, entropy):
    of_logprobs, of_entropy = weights(result[0].dtype)
    loss = (result[0] * of_logprobs).sum()
    if entropy:
        loss = loss + (result[1] * of_entropy).sum()
    return torch.autograd.grad(loss, [part for part in parts if part is not None])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("entropy_grad", [True, False])
@pytest.mark.parametrize("chunk", [1, 8, None])
def test_numbers_and_gradients_are_those_of_the_logits(chunk, entropy_grad, bias):
    parts, ids = layer(bias=bias)
    settings = {"temperature": 0.7, "entropy_grad": entropy_grad}
    expected = plain(parts, ids, **settings)
    found = linear_logprobs(*parts, ids, entropy=True, chunk_rows=chunk, **settings)
    assert_close(found.logprobs, expected[0], rtol=0, atol=1e-12)
    assert_close(found.entropy, expected[1], rtol=0, atol=1e-12)
    assert found.entropy.requires_grad == entropy_grad
    for ours, theirs in zip(
        gradients(found, parts, entropy=entropy_grad),
        gradients(expected, parts, entropy=entropy_grad),
        strict=True,
    ):
        assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_gradients_equal_finite_differences():
    parts, ids = layer()
    small = [parts[0][:4].detach().requires_grad_(), *parts[1:]]

    def both(*given):
        return tuple(linear_logprobs(*given, ids[:4], temperature=1.3, entropy=True, chunk_rows=3))

    assert torch.autograd.gradcheck(both, tuple(small))


def test_a_barred_token_has_no_share_and_no_nan():
    parts, ids = layer(torch.float32)
    with torch.no_grad():
        parts[2][7] = -torch.inf
    ids = ids.where(ids != 7, 8)
    found = linear_logprobs(*parts, ids, temperature=1.0, entropy=True)
    grads = gradients(found, parts, entropy=True)
    assert all(part.isfinite().all() for part in (*found, *grads))
    assert not grads[1][7].any()
    expected = plain(parts, ids, temperature=1.0)
    assert_close(found.entropy, expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("given", "expected"), [(torch.bfloat16, torch.float32)])
def test_coarse_states_give_float32_numbers(given, expected):
    parts, ids = layer(given)
    found = linear_logprobs(*parts, ids, temperature=1.0, entropy=True)
    assert found.logprobs.dtype == found.entropy.dtype == expected
    logits = torch.nn.functional.linear(*parts)
    exact = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    assert_close(found.logprobs.double(), exact, rtol=1e-6, atol=1e-6)
    assert [part.dtype for part in gradients(found, parts, entropy=True)] == [given] * 3


def test_autocast_rules_the_product_and_nothing_else():
    parts, ids = layer(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_logprobs(*parts, ids, temperature=1.0, entropy=True)
        expected = plain(parts, ids, temperature=1.0)
    assert found.logprobs.dtype == torch.float32
    assert_close(found.logprobs, expected[0], rtol=1e-5, atol=1e-5)
    ours = gradients(found, parts, entropy=True)
    theirs = gradients(expected, parts, entropy=True)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.float32
        assert_close(one, other, rtol=0.05, atol=0.05 * float(other.abs().max()))


def test_autocast_leaves_float64_alone():
    parts, ids = layer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_logprobs(*parts, ids, temperature=1.0)
    assert_close(found.logprobs, plain(parts, ids, temperature=1.0)[0], rtol=0, atol=1e-12)


def test_frozen_parts_get_no_gradient():
    (hidden, weight, bias), ids = layer()
    found = linear_logprobs(
        hidden, weight.detach(), bias.detach(), ids, temperature=1.0, entropy=True
    )
    (grad,) = torch.autograd.grad(found.logprobs.sum(), [hidden])
    assert grad.any()


def test_no_rows_give_no_numbers_and_gradients_of_zero():
    parts, ids = layer()
    found = linear_logprobs(parts[0][:0], *parts[1:], ids[:0], temperature=1.0, entropy=True)
    assert found.logprobs.shape == found.entropy.shape == (0,)
    found.logprobs.sum().backward()
    assert not parts[1].grad.any()


def test_gradients_can_be_asked_for_twice():
    parts, ids = layer()
    found = linear_logprobs(*parts, ids, temperature=0.7, entropy=True, chunk_rows=8)
    once, again = (
        torch.autograd.grad(found.logprobs.sum() + found.entropy.sum(), parts, retain_graph=True)
        for _ in range(2)
    )
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


def test_the_logits_of_all_rows_never_exist_at_once(monkeypatch, logits_for_backward):
    seen: list[int] = []
    product = torch.nn.functional.linear

    def counted(hidden, *others):
        seen.append(len(hidden))
        return product(hidden, *others)

    monkeypatch.setattr(f"{MODULE}.linear", counted)
    parts, ids = layer()
    linear_logprobs(*parts, ids, temperature=1.0, chunk_rows=10).logprobs.sum().backward()
    assert seen == [10, 10, 10, 7] * (1 if logits_for_backward == "kept" else 2)


def test_a_number_of_rows_that_is_not_round_changes_nothing_in_16_bits():
    """They are filled up for the product, and cut again."""
    found = []
    for rows in (16, 13):
        states, weight, ids = (x.clone() for x in _states_and_layer(16))
        states.requires_grad_(True)
        weight.requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16):
            scores = linear_logprobs(states[:rows], weight, None, ids[:rows], temperature=0.8)
        scores.logprobs[:13].sum().backward()
        found.append((scores.logprobs[:13], states.grad[:13], weight.grad))
    for round_, odd in zip(*found, strict=True):
        assert torch.equal(round_, odd)


def _states_and_layer(rows):
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(rows, 8, generator=generator)
    weight = torch.randn(20, 8, generator=generator)
    return states, weight, torch.randint(20, (rows,), generator=generator)
