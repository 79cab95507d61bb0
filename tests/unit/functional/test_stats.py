import math

import pytest
import torch

from ppo_lightning.functional import (
    approx_kl,
    bootstrap_interval,
    distinct_ngrams,
    distinct_openings,
    explained_variance,
    opening_share,
    repeated_ngram_fraction,
)
from tests.helpers.virtual_ranks import on_ranks

NAN = float("nan")
ALL = torch.ones(1, 4, dtype=torch.bool)


def test_explained_variance_by_hand():
    returns, values = torch.tensor([[1.0, 3.0, 5.0, 7.0]]), torch.tensor([[1.0, 1.0, 5.0, 5.0]])
    # Var(G) = 5, residuals (0, 2, 0, 2) have variance 1.
    assert explained_variance(values, returns, ALL).item() == pytest.approx(0.8)
    assert explained_variance(values + 100, returns, ALL).item() == pytest.approx(0.8)


def test_explained_variance_over_ranks_is_that_of_all_tokens():
    returns, values = torch.tensor([[1.0, 3.0, 5.0, 7.0]]), torch.tensor([[1.0, 1.0, 5.0, NAN]])
    mask = torch.tensor([[1, 1, 1, 0]]).bool()
    parts = [slice(0, 1), slice(1, 4)]

    def of_rank(reduce: object, k: int) -> float:
        cut = (slice(None), parts[k])
        ours = (values[cut], returns[cut], mask[cut])
        return explained_variance(*ours, reduce=reduce).item()  # type: ignore[arg-type]

    whole = explained_variance(values, returns, mask).item()
    assert on_ranks(of_rank, 2) == pytest.approx([whole, whole])


@pytest.mark.parametrize("constant", [0.1, 1 / 3, 1e6 / 7])
def test_t29_explained_variance_of_constant_returns_is_undefined(constant: float):
    returns = torch.full((1, 3), constant, dtype=torch.float64)
    values = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    assert math.isnan(explained_variance(values, returns, ALL[:, :3]).item())


def test_approx_kl_is_a_mean_over_tokens_of_all_ranks():
    old = torch.zeros(1, 3)
    new = torch.tensor([[-0.5, -0.1, NAN]])
    mask = torch.tensor([[1, 1, 0]]).bool()
    assert approx_kl(new, old, mask, estimator="k1").item() == pytest.approx(0.3)
    assert approx_kl(new, old, mask & False).item() == 0.0

    def of_rank(reduce: object, k: int) -> float:
        cut = (slice(None), slice(k, None if k else 1))
        settings = {"estimator": "k1", "reduce": reduce}
        return approx_kl(new[cut], old[cut], mask[cut], **settings).item()  # type: ignore[arg-type]

    assert on_ranks(of_rank, 2) == pytest.approx([0.3, 0.3])


def test_approx_kl_estimates_from_old_to_new():
    # x = log new - log old = 0.5: k3 = e^0.5 - 1 - 0.5, the other way round it would be 0.10653.
    kl = approx_kl(torch.full((1, 1), 0.5), torch.zeros(1, 1), ALL[:, :1])
    assert kl.item() == pytest.approx(0.148721, abs=1e-6)


def test_repeated_ngrams():
    assert repeated_ngram_fraction([1, 2, 3, 4]) == 0.0
    # Bigrams 12, 21, 12, 21: two of four have been there before.
    assert repeated_ngram_fraction([1, 2, 1, 2, 1]) == 0.5
    assert repeated_ngram_fraction([7] * 5, n=3) == pytest.approx(2 / 3)
    assert repeated_ngram_fraction([1]) == 0.0
    assert repeated_ngram_fraction([]) == 0.0


def test_distinct_ngrams_over_responses():
    assert distinct_ngrams([[1, 2, 3], [1, 2, 4]], 2) == 0.75
    assert distinct_ngrams([[1, 2], [3, 4]], 2) == 1.0
    assert distinct_ngrams([[1], []], 2) == 1.0
    # n-grams do not reach over the end of a response.
    assert distinct_ngrams([[1, 2], [1, 2]], 2) == 0.5


def test_openings():
    responses = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [9, 2, 3, 4], [1, 2], []]
    assert opening_share(responses) == 0.5
    assert distinct_openings(responses) == 0.75
    assert opening_share(responses, n=1) == 0.75
    assert opening_share([]) == distinct_openings([[]]) == 0.0


def test_bootstrap_interval_of_two_numbers_is_exact():
    # A resample holds 0 twice, 1 twice (a quarter of them each), or both.
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], confidence=0.4) == (0.5, 0.5)
    assert bootstrap_interval([0.25] * 9) == (0.25, 0.25)
    assert bootstrap_interval([3.0]) == (3.0, 3.0)


def test_bootstrap_interval_is_that_of_the_normal_law_for_many_numbers():
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(400, generator=generator, dtype=torch.float64)
    error = values.std(correction=0).item() / 20
    low, high = bootstrap_interval(values.tolist())
    # 10,000 resamples place an end to about 0.03 standard errors.
    assert low == pytest.approx(values.mean().item() - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(values.mean().item() + 1.96 * error, abs=0.1 * error)


def test_bootstrap_interval_depends_on_its_seed_alone():
    values = [0.1, 0.5, 0.9, 0.2, 0.7]
    torch.manual_seed(1)
    first = bootstrap_interval(values, num_resamples=50)
    torch.manual_seed(2)
    assert bootstrap_interval(values, num_resamples=50) == first
    assert bootstrap_interval(values, num_resamples=50, seed=1) != first


def test_bootstrap_interval_refuses_nothing_and_impossible_confidence():
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="`confidence`"):
        bootstrap_interval([1.0], confidence=95)
