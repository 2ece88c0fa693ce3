"""Comparisons that derive their tolerance and name what differs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from vlmkernels import _native
from vlmkernels.product import AMD_WORK, TILE_WORK, WIDENED_WORK

#: Instruction sets with kernels of their own in every op; attention, products and layers have more.
ISAS = [name for name in _native.available_isas() if name in ("generic", "avx2", "avx512")]

#: Multiply-adds from which products of matrices are ours on every processor where they are at all.
LARGE = max(TILE_WORK[torch.float32], *AMD_WORK.values(), WIDENED_WORK)


@contextmanager
def isa(name: str) -> Iterator[None]:
    """Runs the block with this instruction set's kernels; "": with those chosen for the machine."""
    _native.set_isa(name)
    try:
        yield
    finally:
        _native.set_isa("")


def tiles_multiply_fp16(name: str) -> bool:
    if not name.startswith("amx"):
        return False
    with isa(name):
        return _native._C.tiles_multiply_fp16()


#: What computes attention in its own way: instruction set, dtype. "": the machine's, with its kind
#: of bf16 arithmetic.
ATTENTION_GRID = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}")
    for name in (*_native.available_isas(), "")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if name in ISAS
    or dtype == torch.bfloat16
    or (dtype == torch.float32 and name.startswith("amx"))
    or (dtype == torch.float16 and tiles_multiply_fp16(name))
]
#: For what holds whatever the arithmetic: the machine's, and AMX in `make test-all`.
MACHINE_GRID = [
    pytest.param("", torch.float32, id="float32"),
    pytest.param("", torch.bfloat16, id="bfloat16"),
    *(
        pytest.param(*x.values, id=x.id, marks=pytest.mark.slow)
        for x in ATTENTION_GRID
        if x.values[0] == "amx_emulated"
    ),
]
#: Results past the caches have code of their own in fp32 and in 16-bit types.
PAST_CACHES_GRID = [
    pytest.param(ISAS[-1], torch.float32, id=f"{ISAS[-1]}-float32"),
    *(x for x in ATTENTION_GRID if x.values[1] != torch.float32 or x.values[0] not in ISAS),
]


def assert_accurate(
    name: str, ours: Tensor, plain: Tensor, exact: Tensor, noise: Tensor | None = None
) -> None:
    """Our error against a float64 reference is at most twice that of plain torch at our dtype.

    Errors are root mean squares. On top comes one rounding to the dtype (half a unit in the last
    place, at most eps / 2 relative), because plain torch is exact on some tiny inputs. Over a
    handful of elements plain torch's luck is no bound either: where `noise`, the standard deviation
    of each element [.., D] under rounding of random sign, is given, the error may instead be what
    such noise exceeds once in 160,000 times.
    """
    assert ours.shape == exact.shape and ours.dtype == plain.dtype
    assert exact.isfinite().all()
    allowed = 2 * (plain.double() - exact).norm()
    if noise is not None:
        allowed = allowed.maximum(largest_noise(noise))
    allowed = allowed + torch.finfo(ours.dtype).eps / 2 * exact.norm()
    error = (ours.double() - exact).norm()
    # Written so that a NaN fails.
    assert error <= allowed, (
        f"{name}: error {error:.3e}, allowed {allowed:.3e}; the worst element: "
        + first_worst(ours, exact)
    )


def sum_noise(squares: Tensor, terms: int) -> Tensor:
    """`noise` of float32 sums, one term added to the other, of the sums of their terms' squares: a
    rounding each of the partial sums, which hold half the terms on average."""
    return squares.double().sqrt() * 2**-24 * max(1.0, terms / 2) ** 0.5


def product_noise(a: Tensor, b: Tensor) -> Tensor:
    """`noise` of a b, of dtype float32 or summed in it."""
    return sum_noise(a.double().square() @ b.double().square(), a.shape[1])


def largest_noise(noise: Tensor) -> Tensor:
    """What the norm of Gaussian noise of these standard deviations [.., D] exceeds with probability
    exp(-12) at most (Laurent and Massart 2000, lemma 1). The D elements of a row stand or fall
    together: they share the row's probabilities."""
    variance = noise.square().sum(-1).flatten()
    if variance.numel() == 0:
        return torch.zeros((), dtype=noise.dtype)
    tail = 2 * (12 * variance.square().sum()).sqrt() + 24 * variance.max()
    return (variance.sum() + tail).sqrt()


def first_worst(ours: Tensor, exact: Tensor) -> str:
    if ours.numel() == 0:
        return "none"
    difference = (ours.double() - exact).abs().nan_to_num(torch.inf)
    index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), exact.shape))
    return f"{index}: {ours[index].item()!r} for {exact[index].item()!r}"


def assert_bitwise(name: str, ours: Tensor, expected: Tensor) -> None:
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    different = ours.view(bits) != expected.view(bits)
    different |= ours.isnan() | expected.isnan()
    if different.any():
        index = tuple(int(i) for i in different.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(different.sum())} of {ours.numel()} elements differ; first at {index}: "
            f"{ours[index].item()!r} for {expected[index].item()!r}"
        )


@contextmanager
def poisoned() -> Iterator[None]:
    """Scratch memory and the tensors of torch.empty start as NaN."""
    _native._C.poison_scratch(True)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        _native._C.poison_scratch(False)
