import pytest
import torch

from ppo_lightning.functional import combine_keys, hash_uniform, inverse_cdf_sample

MASK = (1 << 64) - 1
INF = float("inf")


def mixed(z: int) -> int:
    """The finaliser of SplitMix64 in integers of any size."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def plain_uniform(key: int, counter: int) -> float:
    return (mixed((key + (counter + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53


def plain_key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = mixed(((key + 0x9E3779B97F4A7C15) & MASK) ^ (part & MASK))
    return key - (1 << 64) if key >> 63 else key


KEYS = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF, -987654321987654321]


def test_uniforms_are_the_published_splitmix64_stream():
    # First outputs of SplitMix64 for the seed 0.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    ours = hash_uniform(torch.zeros(3, dtype=torch.long), torch.arange(3))
    assert ours.tolist() == [(bits >> 11) / 2**53 for bits in published]


@pytest.mark.parametrize("counter", [0, 1, 511, 2**40, 2**62])
def test_uniforms_equal_integer_arithmetic(counter: int):
    expected = [plain_uniform(key, counter) for key in KEYS]
    keys = torch.tensor(KEYS)
    assert hash_uniform(keys, counter).tolist() == expected
    assert hash_uniform(keys, torch.full_like(keys, counter)).tolist() == expected


def test_all_positions_at_once_equal_one_by_one():
    keys = torch.tensor(KEYS)
    table = hash_uniform(keys[:, None], torch.arange(5))
    assert torch.equal(table, torch.stack([hash_uniform(keys, t) for t in range(5)], dim=1))


def test_keys_equal_integer_arithmetic_whichever_parts_are_tensors():
    indices = torch.tensor(KEYS)
    assert combine_keys(17, 3) == plain_key(17, 3)
    assert combine_keys(17, 3, indices).tolist() == [plain_key(17, 3, k) for k in KEYS]
    assert combine_keys(indices, 3).tolist() == [plain_key(k, 3) for k in KEYS]
    both = combine_keys(17, indices, indices)
    assert both.tolist() == [plain_key(17, k, k) for k in KEYS]
    assert combine_keys(2**64 + 5, -7) == plain_key(5, -7)


def test_order_and_number_of_parts_matter():
    keys = {combine_keys(*parts) for parts in ((), (1,), (1, 2), (2, 1), (0, 1, 2), (1, 2, 0))}
    assert len(keys) == 6


def test_tensors_that_are_not_int64_are_refused():
    short = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"`parts` must be int64, got torch\.int32"):
        combine_keys(1, short)
    with pytest.raises(ValueError, match="`keys` must be int64"):
        hash_uniform(short, 0)
    with pytest.raises(ValueError, match="`counters` must be int64"):
        hash_uniform(short.long(), short)


def test_arguments_are_left_alone():
    keys, before = torch.tensor(KEYS), torch.tensor(KEYS)
    combine_keys(1, keys)
    hash_uniform(keys, 0)
    hash_uniform(keys, keys)
    assert torch.equal(keys, before)


def chi_square(counts: torch.Tensor, chances: torch.Tensor) -> float:
    expected = counts.sum() * chances
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("along", ["positions", "responses"])
def test_uniforms_fill_the_unit_interval_evenly(along: str):
    num, bins = 100_000, 100
    if along == "positions":
        keys = torch.full((num,), combine_keys(0, 0, 0))
        numbers = hash_uniform(keys, torch.arange(num))
    else:
        numbers = hash_uniform(combine_keys(0, 0, torch.arange(num)), 0)
    assert 0 <= numbers.min() < numbers.max() < 1
    counts = torch.bincount((numbers * bins).long(), minlength=bins)
    # 99 degrees of freedom: 1 in 1000 is above 149, 1 in 1000 below 60 (too even to be random).
    assert 60 < chi_square(counts, torch.full((bins,), 1 / bins)) < 149


def test_neighbouring_responses_and_positions_are_uncorrelated():
    table = hash_uniform(combine_keys(5, 1, torch.arange(300))[:, None], torch.arange(300)) - 0.5
    variance = 1 / 12
    for shifted in (table[1:] * table[:-1], table[:, 1:] * table[:, :-1]):
        # About 90,000 products with a spread of 1/12: four standard errors.
        assert abs(shifted.mean().item()) < 4 * variance / 300


def test_sampled_frequencies_are_the_probabilities():
    chances = torch.tensor([0.1, 0.0, 0.2, 0.3, 0.4])
    uniforms = hash_uniform(combine_keys(1, torch.arange(50_000)), 0)
    ids = inverse_cdf_sample(chances.log().expand(len(uniforms), -1), uniforms)
    counts = torch.bincount(ids, minlength=5)
    keep = chances > 0
    assert counts[~keep].sum() == 0
    # 3 degrees of freedom: 1 in 1000 is above 16.3.
    assert chi_square(counts[keep], chances[keep]) < 16.3


def test_sample_is_the_first_token_whose_mass_exceeds_u():
    logits = torch.tensor([0.25, 0.25, 0.5]).log().expand(6, -1)
    uniforms = torch.tensor([0.0, 0.2, 0.3, 0.49, 0.51, 0.99], dtype=torch.float64)
    assert inverse_cdf_sample(logits, uniforms).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("scale", [1.0, 3.0, 1e-3])
def test_tokens_without_probability_are_never_drawn_at_the_ends(scale: float):
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(2000, 9, generator=generator)
    logits[:, [0, 4, 7, 8]] = -INF
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for end, expected in zip(ends, (1, 6), strict=True):
        assert (inverse_cdf_sample(logits, end.expand(2000)) == expected).all()


def test_one_possible_token_is_always_drawn():
    logits = torch.full((3, 4), -INF)
    logits[:, 2] = 7.0
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf_sample(logits, uniforms).tolist() == [2, 2, 2]


def test_logits_that_are_nan_give_an_id_in_range():
    logits = torch.full((2, 4), float("nan"))
    ids = inverse_cdf_sample(logits, torch.tensor([0.0, 0.9], dtype=torch.float64))
    assert ((ids >= 0) & (ids < 4)).all()


def test_low_precision_logits_are_sampled_in_float32():
    logits = torch.tensor([0.0, 1.5, 3.0, -0.7], dtype=torch.bfloat16).expand(100_000, -1)
    uniforms = torch.arange(100_000, dtype=torch.float64) / 100_000
    ids = inverse_cdf_sample(logits, uniforms)
    assert torch.equal(ids, inverse_cdf_sample(logits.float(), uniforms))


def test_rare_tokens_can_be_drawn():
    # A mass of 1e-9 on top of 1 would vanish in float32.
    logits = torch.tensor([[1.0, 1e-9]]).log()
    assert inverse_cdf_sample(logits, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 1


@pytest.mark.parametrize("size", [256, 257, 1000, 5000])
def test_large_vocabularies_are_searched_as_small_ones_are(size: int):
    generator = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(400, size, generator=generator)
    logits[:, ::3] = -INF
    uniforms = torch.rand(400, generator=generator, dtype=torch.float64)
    mass = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(mass, uniforms[:, None], right=True)[:, 0]
    assert torch.equal(inverse_cdf_sample(logits, uniforms), expected)


@pytest.mark.parametrize("end", [0.0, 1 - 2**-53])
def test_no_draw_falls_into_the_gap_between_two_blocks(end: float):
    logits = torch.full((4, 1000), -INF)
    for row, place in enumerate((0, 255, 256, 999)):
        logits[row, place] = 0.0
    ids = inverse_cdf_sample(logits, torch.full((4,), end, dtype=torch.float64))
    assert ids.tolist() == [0, 255, 256, 999]
