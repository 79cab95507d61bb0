"""Products of float32 matrices by the library that is quick on the processor at hand.

On processors of AMD with AVX-512, oneDNN multiplies faster than MKL, which torch calls for float32:
more than twice as fast where a vector is worked on at once (from Zen 5 on), by 5 to 40 % where it
is in two halves (Zen 4), and there not for small products nor for most gradients of weights. Both
come with torch. Results are the same up to the order of sums.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ppo_lightning.functional.masking import product_dtype

LEAST_PRODUCTS = 2**21
"""Of numbers, from which on oneDNN is asked: a call takes it ten microseconds longer."""

LEAST_IN_HALVES = 2**24
"""The same on a processor that works on vectors in halves."""

WHOLE_VECTORS = 26
"""First family of AMD's processors that works on 512 bits at once."""

ROUND = 16
"""Rows of a block of its kernels: other numbers of rows need kernels for the rest."""

BLOCK_BYTES = 4 * 2**20
"""Of a product that is added to another: oneDNN makes a tensor of it."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do what ``torch.nn.functional.linear`` does.

    By oneDNN it can be differentiated once.

    Args:
        x: ``[..., I]``.
        weight: ``[O, I]``; may be a transposed view.
        bias: ``[O]`` or None.

    Returns:
        ``[..., O]``.
    """
    if not _takes_onednn(x, weight, bias):
        return nn.functional.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _onednn(x, weight, bias)
    # Rows, since the operator's result is a view for more dimensions: that forbids changing it.
    rows: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
    return rows.view(*x.shape[:-1], len(weight))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices ``[N, K]`` and ``[K, M]`` of any strides. Not differentiable."""
    with torch.no_grad():
        return _onednn(left, right.t()) if _takes_onednn(left, right.t()) else left @ right


@torch.no_grad()
def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product in place, without another tensor of its size where the dtypes allow it.

    Not differentiable.

    Args:
        total: ``[N, M]``.
        left: ``[N, K]``.
        right: ``[K, M]``, in the dtype of ``left``.
    """
    if total.dtype == left.dtype and _takes_onednn(left, right.t()):
        rows = max(64, BLOCK_BYTES // (right.shape[1] * total.itemsize))
        for sums, part in zip(torch.split(total, rows), torch.split(left, rows), strict=True):
            sums += _onednn(part, right.t())
    elif total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def row_multiple(weight: Tensor) -> int:
    """Rows that products with a layer had better come in, as many or a multiple.

    oneDNN compiles a product for each shape that it meets, for 10 ms a layer in 16 bits and 0.3 ms
    a product in float32, and accelerators like round sizes.

    Args:
        weight: Of the layer.

    Returns:
        1 where any number is as good.
    """
    dtype = product_dtype(weight)
    is_compiled = dtype == torch.float32 and weight.device.type == "cpu" and _asks_onednn()
    return ROUND if dtype.itemsize <= 2 or is_compiled else 1


def rounded_up(count: int, multiple: int) -> int:
    """Round a number of rows up to a multiple; many rows to a coarser one, by a 32nd at most.

    So there are few numbers that rows of about one size come in.

    Args:
        count: Of the rows, 0 or more.
        multiple: From ``row_multiple``.
    """
    while multiple > 1 and count >= 64 * multiple:
        multiple *= 2
    return -(-count // multiple) * multiple


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_rows, of_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(rows if of_weight else None, weight if of_rows else None)
        ctx.is_transposed = not weight.is_contiguous()
        return _onednn(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows = of_weight = of_bias = None
        if weight is not None:
            of_rows = product(grad, weight)
        if rows is not None and ctx.is_transposed:  # the gradient is to lie as the weight does
            of_weight = product(rows.t(), grad).t()
        elif rows is not None and works_in_halves() and rows.shape[1] <= grad.shape[1]:
            of_weight = grad.t() @ rows  # MKL reads what lies transposed, oneDNN copies it
        elif rows is not None:
            of_weight = product(grad.t(), rows)
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0)
        return of_rows, of_weight, of_bias


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()  # oneDNN would take other strides, by its slowest kernel
    # What torch's compiler calls for a linear layer.
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


def _takes_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether a product is one that oneDNN computes, and worth asking it."""
    return (
        x.numel() * weight.shape[0] >= (LEAST_IN_HALVES if works_in_halves() else LEAST_PRODUCTS)
        and x.dim() > 1
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and all(_is_plain(part) for part in (x, weight, bias) if part is not None)
        and not torch.is_autocast_enabled("cpu")
        and _asks_onednn()
    )


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is nothing but numbers: sharded ones, say, have products of their own."""
    is_dense = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided
    return is_dense and x.dtype == torch.float32 and x.device.type == "cpu"


def _asks_onednn() -> bool:
    return onednn_is_quicker() and bool(torch.backends.mkldnn.enabled)


@cache
def onednn_is_quicker() -> bool:
    """Whether float32 products are quicker by oneDNN than by what torch calls for them."""
    backends: Any = torch.backends
    has_both = backends.mkldnn.is_available() and backends.mkl.is_available()
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    has_operator = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_both and wide and has_operator and "AuthenticAMD" in _processor()["vendor_id"]


@cache
def works_in_halves() -> bool:
    """Whether the processor is one of AMD's that works on 512 bits in two halves."""
    family = _processor()["cpu family"]
    return family.isdigit() and int(family) < WHOLE_VECTORS


def _processor() -> dict[str, str]:
    """What the system says of its processor: vendor and family, empty where it says nothing."""
    known = {"vendor_id": "", "cpu family": ""}
    described = Path("/proc/cpuinfo")
    if not described.exists():
        return known | {"vendor_id": platform.processor()}
    with described.open() as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in known:
                known[name.strip()] = value.strip()
            elif not name.strip():  # all processors are alike
                break
    return known
