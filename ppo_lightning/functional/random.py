"""Random numbers that are a pure function of where they are used.

There is no generator state: a number depends on a key (seed, iteration, response index) and a
counter (token position) only. So a response is the same whatever batch, rank or resumed run samples
it. The arithmetic is that of 64-bit integers with wrap-around and is exact on every device.
"""

from __future__ import annotations

from typing import cast, overload

import torch
from torch import Tensor, nn

from ppo_lightning.functional.masking import last_index

_BLOCK = 256  # tokens whose chances are added up before they are looked at one by one
_MASK_64 = (1 << 64) - 1


def _signed(x: int) -> int:
    """Read the low 64 bits as two's complement, which is what int64 tensors hold."""
    x &= _MASK_64
    return x - (1 << 64) if x >> 63 else x


# SplitMix64: the increment of its counter, and the multipliers of its finaliser.
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_NUM_ROUNDS = 8  # of the Feistel network: four make it hard to tell from a random one
_SIGNED_GAMMA = _signed(_GAMMA)
_SIGNED_MULTIPLIER_1 = _signed(_MULTIPLIER_1)
_SIGNED_MULTIPLIER_2 = _signed(_MULTIPLIER_2)


def _mix_int(z: int) -> int:
    z = (z ^ (z >> 30)) * _MULTIPLIER_1 & _MASK_64
    z = (z ^ (z >> 27)) * _MULTIPLIER_2 & _MASK_64
    return z ^ (z >> 31)


def _xor_shifted(z: Tensor, bits: int) -> Tensor:
    # `>>` on int64 drags the sign along; the mask makes it the shift of an unsigned number.
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(z)


def _mix(z: Tensor) -> Tensor:
    z = _xor_shifted(z, 30).mul_(_SIGNED_MULTIPLIER_1)
    z = _xor_shifted(z, 27).mul_(_SIGNED_MULTIPLIER_2)
    return _xor_shifted(z, 31)


# The overlap is that of calls without a tensor, which the first signature has all of.
@overload
def combine_keys(*parts: int) -> int: ...  # type: ignore[overload-overlap]
@overload
def combine_keys(*parts: int | Tensor) -> Tensor: ...
def combine_keys(*parts: int | Tensor) -> int | Tensor:
    """Fold numbers into one well-mixed 64-bit key; their order matters.

    With all parts but one held fixed, different values of that one give different keys.

    Args:
        parts: Integers of any size (the low 64 bits count) and int64 tensors that broadcast, for
            instance ``combine_keys(seed, iteration, response_indices)``. Put scalars first: they
            are folded without a tensor operation.

    Returns:
        An int64 tensor, or an ``int`` in the range of int64 if no part is a tensor.

    Raises:
        ValueError: A tensor is not int64.
    """
    key: int | Tensor = 0
    for part in parts:
        if isinstance(part, Tensor):
            _require_int64("parts", part)
        if isinstance(key, int) and isinstance(part, int):
            key = _mix_int(((key + _GAMMA) ^ part) & _MASK_64)
            continue
        left = _signed(key + _GAMMA) if isinstance(key, int) else key + _SIGNED_GAMMA
        right = _signed(part) if isinstance(part, int) else part
        key = _mix(cast(Tensor, left ^ right))
    return _signed(key) if isinstance(key, int) else key


def hash_uniform(keys: Tensor, counters: Tensor | int) -> Tensor:
    """Give the uniform number that belongs to each key and counter.

    The numbers of one key, over its counters 0, 1, 2, ..., are the SplitMix64 stream seeded with
    it. All positions of a rollout can be had at once: ``hash_uniform(keys[:, None], positions)``.

    Args:
        keys: From ``combine_keys``. ``[B]`` int64, or any shape that broadcasts.
        counters: Token positions. An int, or int64 that broadcasts.

    Returns:
        float64 in [0, 1), multiples of 2⁻⁵³, in the broadcast shape.

    Raises:
        ValueError: ``keys`` or ``counters`` is a tensor but not int64.

    Source:
        Steele, Lea & Flood 2014, "Fast Splittable Pseudorandom Number Generators", fig. 17.
    """
    _require_int64("keys", keys)
    if isinstance(counters, int):
        bits = _mix(keys + _signed((counters + 1) * _GAMMA))
    else:
        _require_int64("counters", counters)
        bits = _mix(keys + (counters + 1) * _SIGNED_GAMMA)
    top = (bits >> 11).bitwise_and_((1 << 53) - 1)
    return top.double().mul_(2.0**-53)


def permuted(indices: Tensor, size: int, *, key: int) -> Tensor:
    """Return where a pseudo-random permutation of 0, ..., size - 1 sends some of these numbers.

    Any stretch of the permutation can be had without the rest: nothing of the length ``size`` is
    ever made. A Feistel network permutes the numbers of an even count of bits, at most 4 · size of
    them; one that leaves the range goes through it again until it is back, which it must.

    Args:
        indices: In [0, size). ``[N]`` int64.
        size: How many numbers are permuted, at least 1 and at most 2⁶².
        key: Chooses the permutation, as from ``combine_keys``.

    Returns:
        ``[N]`` int64 in [0, size).

    Raises:
        ValueError: ``indices`` is not int64 or leaves the range, or ``size`` is not in its own.

    Source:
        Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains", method 2 (cycle walking).
    """
    _require_int64("indices", indices)
    if not 1 <= size <= 1 << 62:
        raise ValueError(f"`size` must lie in [1, 2**62], got {size}.")
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise ValueError(f"`indices` must lie in [0, {size}).")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    found = _feistel(indices, half, key)
    while bool((outside := found >= size).any()):
        found = torch.where(outside, _feistel(found, half, key), found)
    return found


def _feistel(numbers: Tensor, half: int, key: int) -> Tensor:
    """Permute the numbers of ``2 · half`` bits."""
    low = (1 << half) - 1
    left, right = numbers >> half, numbers & low
    for number in range(_NUM_ROUNDS):
        left, right = right, left ^ (combine_keys(key, number, right) & low)
    return (left << half) | right


@torch.no_grad()
def inverse_cdf_sample(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row from softmax(logits): the first whose cumulative mass exceeds u.

    Args:
        logits: Already divided by the temperature; ``-inf`` bars a token. ``[B, V]`` float.
        uniforms: From ``hash_uniform``, in [0, 1). ``[B]`` float64.

    Returns:
        ``[B]`` int64, never a token of probability 0. Logits that hold a nan give some id in range
        and no error: their log-probabilities are nan, and the guard on those reports it.
    """
    blocks = _in_blocks(logits.softmax(-1, dtype=torch.float32))
    masses = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    # A float64 u below 1 leaves u * total below the total, so that the first mass above it belongs
    # to a block that adds some. Scaling by the total also absorbs the rounding of the softmax.
    target = uniforms.unsqueeze(-1) * masses[:, -1:]
    block = torch.searchsorted(masses, target, right=True).clamp_(max=masses.shape[-1] - 1)
    chances = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, blocks.shape[-1])).squeeze(1)
    before = nn.functional.pad(masses, (1, 0)).gather(1, block)
    place = torch.searchsorted(
        chances.cumsum(-1, dtype=torch.float64), (target - before).clamp_min_(0), right=True
    )
    # Two sums of one block may be rounded otherwise: the last token that adds anything ends it.
    last = last_index(chances > 0).clamp_min_(0).unsqueeze(-1)
    ids = block * blocks.shape[-1] + place.minimum(last)
    return ids.squeeze(-1).clamp_(max=logits.shape[-1] - 1)


def _in_blocks(chances: Tensor) -> Tensor:
    """Cut a vocabulary: the cumulative mass is then needed of one block only. ``[B, N, W]``."""
    rows, size = chances.shape
    width = min(size, _BLOCK)
    missing = -size % width
    padded = nn.functional.pad(chances, (0, missing)) if missing else chances
    return padded.view(rows, -1, width)


def _require_int64(name: str, x: Tensor) -> None:
    if x.dtype != torch.int64:
        raise ValueError(f"`{name}` must be int64, got {x.dtype}: convert with `.long()`.")
