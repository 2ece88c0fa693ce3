"""Products of float32 and bfloat16 matrices on the CPU: torch's, and our own where they are faster
(`python -m benchmarks.run product`): on AMD's processors with AVX-512 in float32, in bfloat16 about
as fast; on AMX in float32, from three bfloat16 parts of each number, and of a transposed bfloat16
matrix, for which torch's take up to twice as long.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from vlmkernels._native import _C, DTYPES, pointer

#: Rows, columns and depth from which ours is taken: packing costs less than it saves.
SMALLEST = 64
#: Multiply-adds from which ours is taken, on AVX-512 and on AMX: of fewer torch's were faster.
WORK = {torch.float32: 1 << 25, torch.bfloat16: 1 << 28}
TILE_WORK = 1 << 26


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
    parts: Henry, Tang and Heinecke, doi 10.1109/ARITH.2019.00019) of SMALLEST rows, columns and
    depth and WORK multiply-adds at least, that the kernel can read; under a dispatch mode, which
    may count, torch's. float32 on AMX is as accurate as torch's, but for numbers below 2^-109, and
    NaN where an infinite element takes part.

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
    if _fits(a, b) and _takes(out, a, b, add) and (bias is None or _adds(bias, b)):
        return product(a, b, bias=bias, out=out, add=add)
    if out is not None and add:
        return out.addmm_(a, b) if out.dtype == a.dtype else out.add_(torch.mm(a, b))
    if bias is not None:
        return torch.addmm(bias, a, b, out=out)
    return torch.mm(a, b, out=out)


def product(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """Our kernel, of matrices on the CPU with one stride of 1, float32, or bfloat16 where _C.isa()
    is avx512_bf16 or has AMX; out's rows are dense, and float32 if `add`."""
    rows, depth = a.shape
    columns = b.shape[1]
    if out is None:
        out = a.new_empty(rows, columns)
    elif not out.is_inference():
        torch.autograd.graph.increment_version(out)
    _C.matrix_product(
        a.data_ptr(),
        b.data_ptr(),
        pointer(bias),
        out.data_ptr(),
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
def least_work(isa: str, dtype: torch.dtype, transposed: bool) -> float:
    """Multiply-adds from which products are ours, a being a dense matrix's transpose or not."""
    if isa == "amx_bf16":
        return TILE_WORK if dtype == torch.float32 or transposed else math.inf
    if not _C.is_amd() or isa != "avx512_bf16" and (isa, dtype) != ("avx512", torch.float32):
        return math.inf
    return WORK[dtype]


def _fits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype in WORK
        and a.dim() == b.dim() == 2
        and a.shape[1] == b.shape[0]
        and min(*a.shape, b.shape[1]) >= SMALLEST
        and 1 in a.stride()
        and 1 in b.stride()
        and a.shape[0] * a.shape[1] * b.shape[1] >= least_work(_C.isa(), a.dtype, a.stride(0) == 1)
        and _is_plain(a, a.dtype)
        and _is_plain(b, a.dtype)
        and torch.get_float32_matmul_precision() == "highest"
        and not torch._C._len_torch_dispatch_stack()
        and not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))
    )


def _is_plain(x: Tensor, dtype: torch.dtype) -> bool:
    kind = type(x) in (Tensor, torch.nn.Parameter) and x.dtype == dtype
    return kind and x.is_cpu and not x.is_neg()


def _takes(out: Tensor | None, a: Tensor, b: Tensor, add: bool) -> bool:
    """Whether our kernel may write it: of the right shape, no element twice, nothing of a and b."""
    if out is None:
        return True
    return (
        _is_plain(out, torch.float32 if add else a.dtype)
        and out.shape == (a.shape[0], b.shape[1])
        and out.stride(1) == 1
        and out.stride(0) >= out.shape[1]
        and not any(_overlap(x, out) for x in (a, b))
        and not (torch.is_grad_enabled() and out.requires_grad)
    )


def _overlap(x: Tensor, out: Tensor) -> bool:
    """Whether the memory between the first and the last element of both has a byte in common."""
    return x.data_ptr() < _end(out) and out.data_ptr() < _end(x)


def _end(x: Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.itemsize


def _adds(bias: Tensor, b: Tensor) -> bool:
    return _is_plain(bias, b.dtype) and bias.shape == (b.shape[1],) and bias.is_contiguous()
