import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_lightning.functional import full_kl, kl_estimate, kl_loss_per_token, penalty_loss_per_token

ZERO = torch.zeros(1, 1, dtype=torch.float64)


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("abs", 0.5)])
def test_t27_values_of_the_estimators(estimator: str, value: float):
    assert kl_estimate(ZERO + 0.5, ZERO, estimator=estimator).item() == value


def test_t27_value_of_k3_has_the_ratio_the_right_way_up():
    assert kl_estimate(ZERO + 0.5, ZERO, estimator="k3").item() == pytest.approx(0.10653, abs=5e-6)


def test_t27_single_k1_may_be_negative_and_full_never_is():
    assert kl_estimate(ZERO - 0.5, ZERO, estimator="k1").item() == -0.5
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, 5, generator=generator)
    nearly = logits + 1e-4 * torch.randn(1000, 5, generator=generator)
    assert (full_kl(logits, nearly, temperature=1.0) >= 0).all()
    assert not full_kl(logits, logits, temperature=1.0).any()


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="one of k1, k2, k3, abs, got 'full'"):
        kl_estimate(ZERO, ZERO, estimator="full")  # type: ignore[arg-type]


def test_full_kl_with_barred_tokens():
    inf = float("inf")
    logits = torch.tensor([[0.0, 0.0, -inf]], requires_grad=True)
    kl = full_kl(logits, torch.tensor([[1.0, 0.0, -inf]]), temperature=1.0)
    kl.sum().backward()
    # p = (1/2, 1/2), q = (e, 1) / (1 + e): KL = ln((1 + e) / 2) - 1/2.
    assert kl.item() == pytest.approx(0.1201145, abs=1e-6)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


LOGITS = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64)
REF = torch.tensor([-0.4, 0.9, 0.1], dtype=torch.float64).log_softmax(-1)
OLD = torch.tensor([0.6, -0.2, -0.3], dtype=torch.float64).log_softmax(-1)


def expected_gradient(loss_of: object, sampler: Tensor | None) -> Tensor:
    """Gradient of the mean loss when each token of the vocabulary comes with its probability."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    chances = (logprobs if sampler is None else sampler).detach().exp()
    (chances * loss_of(logprobs)).sum().backward()  # type: ignore[operator]
    assert logits.grad is not None
    return logits.grad


def exact_gradient() -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    full_kl(logits, REF, temperature=1.0).backward()
    assert logits.grad is not None
    return logits.grad


def test_t27_full_kl_has_the_gradient_of_finite_differences():
    numeric = torch.zeros(3, dtype=torch.float64)
    for k in range(3):
        for sign in (1, -1):
            p = (LOGITS + sign * 1e-5 * torch.eye(3, dtype=torch.float64)[k]).softmax(-1)
            numeric[k] += sign * (p * (p.log() - REF)).sum() / 2e-5
    assert_close(exact_gradient(), numeric, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("on_policy", [True, False])
def test_t27_gradient_of_the_kl_loss_is_that_of_the_exact_kl(on_policy: bool):
    def loss_of(logprobs: Tensor) -> Tensor:
        old = logprobs.detach() if on_policy else OLD
        return kl_loss_per_token(logprobs, REF, old)

    gradient = expected_gradient(loss_of, None if on_policy else OLD)
    assert_close(gradient, exact_gradient(), rtol=1e-12, atol=1e-14)


def test_t27_gradients_of_k1_and_k3_are_not_those_of_the_kl():
    def loss_with(estimator: str) -> object:
        return lambda logprobs: kl_estimate(logprobs, REF, estimator=estimator)

    assert_close(expected_gradient(loss_with("k1"), None), torch.zeros(3, dtype=torch.float64))
    assert not torch.allclose(expected_gradient(loss_with("k3"), None), exact_gradient(), atol=0.05)


@pytest.mark.parametrize(
    ("estimator", "reason"),
    [("k1", "0 in expectation"), ("k3", "other direction"), ("abs", "no KL")],
)
def test_t27_estimators_with_wrong_gradients_are_refused_as_a_loss(estimator: str, reason: str):
    with pytest.raises(ValueError, match=f"'{estimator}' cannot be a KL loss.*{reason}"):
        kl_loss_per_token(ZERO, ZERO, ZERO, estimator=estimator)  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_gradient_of_the_penalty_is_that_of_kl_from_old_to_new(estimator: str):
    one, zero = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.float64)

    def loss_of(logprobs: Tensor) -> Tensor:
        settings = {"penalty_coef": 1.0, "estimator": estimator}
        return penalty_loss_per_token(logprobs[None], OLD[None], zero, one, **settings).loss[0]

    logits = LOGITS.clone().requires_grad_()
    full_kl(OLD, logits, temperature=1.0).backward()
    assert_close(expected_gradient(loss_of, OLD), logits.grad, rtol=1e-12, atol=1e-14)


def test_kl_loss_weight_is_bounded_and_held_constant():
    # log π - log π_old = 100 on a token that the old policy held impossible.
    logprobs = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    loss = kl_loss_per_token(logprobs, ZERO - 2, ZERO - 100)
    loss.sum().backward()
    weight = torch.tensor(10.0, dtype=torch.float64).exp()
    assert_close(loss.item(), 2 * weight.item())
    assert_close(logprobs.grad, 2 * weight.reshape(1, 1))
