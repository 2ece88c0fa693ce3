"""Products of matrices: torch's, and of float32 and bfloat16 on the CPU our own where they are
faster (`python -m benchmarks.run product`):

- bfloat16 where the processor has AVX2 or AVX-512 but neither AMX nor AMD's dot products: in
  float32, which such processors multiply faster than what torch does instead;
- on AMD's processors float32, and bfloat16 by dot products where they have them, about as fast;
- on AMX: float32, from three bfloat16 parts of each number; bfloat16 of a transposed matrix, of few
  multiply-adds, where oneDNN's take up to three times as long, and a layer's x W^T of large
  results, which ours writes past the caches.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor

from vlmkernels._native import _C, DTYPES, describe, learning, pointer, take_threads

#: Of matrices whose products can be ours.
TYPES = (torch.float32, torch.bfloat16)
#: Rows, columns and depth from which ours is taken: packing costs less than it saves.
SMALLEST = 64
#: The same of bfloat16 multiplied in float32. With AVX2 alone oneDNN has no products of it, and
#: torch's take up to 176 times as long as ours; with AVX-512 1.2 to 5 times.
WIDENED_SMALLEST = {"avx2": 4, "avx512": 8, "avx512_bf16": 8}
#: Multiply-adds from which ours is taken on AMD's processors: of fewer torch's were faster.
AMD_WORK = {
    ("avx2", torch.float32): 1 << 25,
    ("avx512", torch.float32): 1 << 25,
    ("avx512_bf16", torch.float32): 1 << 20,
    ("avx512_bf16", torch.bfloat16): 1 << 20,
}
#: The same of bfloat16 multiplied in float32.
WIDENED_WORK = 1 << 15
#: On AMX float32 from there on; bfloat16 up to there, and of a transposed matrix always.
TILE_WORK = {torch.float32: 1 << 26, torch.bfloat16: 1 << 28}
#: On AMX in bfloat16 also from so many elements of a result on, in whole cache lines, where b is a
#: dense matrix's transpose, up to this depth.
STREAMED, STREAMED_DEPTH = 1 << 21, 2048


def mm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """a b, plus bias, or plus what out holds if `add`. Not differentiable: for the inside of an op.

    Ours (csrc/cpu/product: Goto and van de Geijn, doi 10.1145/1356052.1356053; on AMX float32 by
    parts: Henry, Tang and Heinecke, doi 10.1109/ARITH.2019.00019) from smallest() rows, columns
    and depth on, of as many multiply-adds as our_work() has or of a large result, where the kernel
    can read them; under a dispatch mode, which may count, torch's. float32 on AMX is as accurate as
    torch's, but for numbers below 2^-109, and NaN where an infinite element takes part.

    Args:
        a: [M, K].
        b: [K, N], a's dtype.
        bias: [N], without `add`.
        out: [M, N]: where the result goes; a's dtype, or float32 with `add`.

    Returns:
        [M, N], `out` if given. The number of threads changes no bit of ours.

    Raises:
        RuntimeError: torch's, where shapes, dtypes or devices do not fit.
        ValueError: `add` without `out`, or with a bias.
    """
    if add and (out is None or bias is not None):
        raise ValueError("add needs out, and no bias: what is added is what out holds")
    if _fits(a, b) and _takes(out, a, b, add) and (bias is None or _adds(bias, b, out)):
        return product(a, b, bias=bias, out=out, add=add)
    if out is not None and add:
        if out.dtype == a.dtype:
            return out.addmm_(a, b)
        if out.is_cuda and a.numel() and accumulates(a.dtype, out.device):
            return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        return out.add_(torch.mm(a, b))
    if bias is not None:
        return torch.addmm(bias, a, b, out=out)
    return torch.mm(a, b, out=out)


@functools.cache
def accumulates(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch's products on a GPU take `dtype` operands and add to a float32 matrix in
    place (torch >= 2.9), found out by a small product of exact numbers."""
    a = torch.full((16, 32), 2.0, dtype=dtype, device=device)
    total = torch.ones(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, a, a.t(), out_dtype=torch.float32, out=total)
        whole = torch.mm(a, a.t(), out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 129.0).all()) and bool((whole == 128.0).all())


def product(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """Our kernel, of matrices on the CPU with one stride of 1, float32 or bfloat16, of one element
    at least; out's rows are dense, and float32 if `add`.

    Raises:
        ValueError: a and b do not fit.
    """
    (rows, depth), (inner, columns) = a.shape, b.shape
    if inner != depth or not rows * depth * columns or not a.dtype == b.dtype in TYPES:
        raise ValueError(
            f"a is {describe(a)} and b {describe(b)}; they must be float32 or bfloat16 [M, K] and "
            "[K, N], M, K and N at least 1"
        )
    if out is None:
        out = a.new_empty(rows, columns)
    elif not out.is_inference():
        torch.autograd.graph.increment_version(out)
    take_threads()
    _C.matrix_product(
        pointer(a),
        pointer(b),
        pointer(bias),
        pointer(out),
        rows,
        columns,
        depth,
        *a.stride(),
        *b.stride(),
        out.stride(0),
        add,
        DTYPES[a.dtype],
        DTYPES[out.dtype],
    )
    return out


@functools.cache
def our_work(isa: str, dtype: torch.dtype, transposed: bool) -> range:
    """Multiply-adds of products that are ours, a being a dense matrix's transpose or not."""
    if isa == "amx_bf16":
        if dtype == torch.float32:
            return range(TILE_WORK[dtype], sys.maxsize)
        return range(sys.maxsize if transposed else TILE_WORK[dtype])
    if _widens(isa, dtype):
        return range(WIDENED_WORK, sys.maxsize)
    least = AMD_WORK.get((isa, dtype)) if _C.is_amd() else None
    return range(0) if least is None else range(least, sys.maxsize)


def _widens(isa: str, dtype: torch.dtype) -> bool:
    """Whether products are of bfloat16 that becomes float32."""
    by_dots = _C.is_amd() and (isa, dtype) in AMD_WORK
    return dtype == torch.bfloat16 and isa in WIDENED_SMALLEST and not by_dots


def large_result_is_ours(isa: str, dtype: torch.dtype, rows: int, columns: int, depth: int) -> bool:
    """Whether a product with a dense matrix's transpose is ours for the size of its result."""
    return (
        (isa, dtype) == ("amx_bf16", torch.bfloat16)
        and rows * columns >= STREAMED
        and columns % 32 == 0
        and depth <= STREAMED_DEPTH
    )


def smallest(isa: str, dtype: torch.dtype) -> int:
    """Rows, columns and depth from which products are ours."""
    return WIDENED_SMALLEST[isa] if _widens(isa, dtype) else SMALLEST


def _fits(a: Tensor, b: Tensor) -> bool:
    if not a.is_cpu or not a.dim() == b.dim() == 2 or a.dtype not in TYPES:
        return False
    (rows, depth), (inner, columns), strides = a.shape, b.shape, a.stride()
    isa = _C.isa()
    return (
        (
            rows * depth * columns in our_work(isa, a.dtype, strides[0] == 1)
            or (b.stride(0) == 1 and large_result_is_ours(isa, a.dtype, rows, columns, depth))
        )
        and depth == inner
        and min(rows, depth, columns) >= smallest(isa, a.dtype)
        and 1 in strides
        and 1 in b.stride()
        and _on_cpu(a, a.dtype)
        and _on_cpu(b, a.dtype)
        and torch.get_float32_matmul_precision() == "highest"
        and not torch._C._len_torch_dispatch_stack()
        and not (learning() and (a.requires_grad or b.requires_grad))
    )


def _on_cpu(x: Tensor, dtype: torch.dtype) -> bool:
    kind = type(x) in (Tensor, torch.nn.Parameter) and x.dtype == dtype
    return kind and x.is_cpu and not x.is_neg()


def _takes(out: Tensor | None, a: Tensor, b: Tensor, add: bool) -> bool:
    """Whether our kernel may write it: of the right shape, no element twice, nothing of a and b."""
    if out is None:
        return True
    return (
        _on_cpu(out, torch.float32 if add else a.dtype)
        and out.shape == (a.shape[0], b.shape[1])
        and out.stride(1) == 1
        and out.stride(0) >= out.shape[1]
        and not _overlap(a, out)
        and not _overlap(b, out)
        and not (learning() and out.requires_grad)
    )


def _overlap(x: Tensor, out: Tensor) -> bool:
    """Whether the memory between the first and the last element of two matrices has a byte in
    common."""
    return x.data_ptr() < _end(out) and out.data_ptr() < _end(x)


def _end(x: Tensor) -> int:
    (rows, columns), (row, column) = x.shape, x.stride()
    return x.data_ptr() + ((rows - 1) * row + (columns - 1) * column + 1) * x.itemsize


def _adds(bias: Tensor, b: Tensor, out: Tensor | None) -> bool:
    fits = _on_cpu(bias, b.dtype) and bias.shape == (b.shape[1],) and bias.is_contiguous()
    return fits and (out is None or not _overlap(bias[None], out))
