"""Products of float32 and bfloat16 matrices on the CPU: torch's, and on AMD's processors with
AVX-512 our own: faster than torch's in float32, in bfloat16 about as fast. On AMX torch's products
of a transposed bfloat16 matrix take up to twice as long, so it is copied first
(`python -m benchmarks.run product`).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vlmkernels._native import _C, DTYPES, pointer

#: Rows, columns and depth from which ours is taken: packing costs less than it saves.
SMALLEST = 64
#: Multiply-adds from which ours is taken: of fewer, bfloat16's were slower than torch's.
WORK = {torch.float32: 1 << 25, torch.bfloat16: 1 << 28}

#: Multiply-adds from which a transposed matrix is copied on AMX: of fewer torch's were faster.
COPIED_WORK = 1 << 30
#: Of the copy: it stays in the last cache.
_COPY_BYTES = 16 << 20


def mm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """a b, plus bias, or plus what out holds if `add`. Not differentiable: for the inside of an op.

    Ours (csrc/cpu/product: Goto and van de Geijn, doi 10.1145/1356052.1356053) of SMALLEST
    rows, columns and depth and WORK multiply-adds at least, that the kernel can read; under a
    dispatch mode, which may count, torch's.

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
    if _is_slow(a, b):
        return _by_copies(a, b, bias, out, add)
    return _torch_mm(a, b, bias, out, add)


def _torch_mm(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None, add: bool) -> Tensor:
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
    is avx512_bf16; out's rows are dense, and float32 if `add`."""
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


def _by_copies(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None, add: bool) -> Tensor:
    """torch's product of dense copies of a's rows, some at a time."""
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    size = max(1, _COPY_BYTES // (2 * a.shape[1]))
    for rows, to in zip(a.split(size), out.split(size), strict=True):
        _torch_mm(transposed(rows.t()), b, bias, to, add)
    return out


def transposed(x: Tensor) -> Tensor:
    """x^T, dense, of a plain 16-bit x [M, N] on the CPU whose columns lie side by side."""
    y = x.new_empty(x.shape[1], x.shape[0])
    _C.transpose_16(x.data_ptr(), y.data_ptr(), *x.shape, x.stride(0))
    return y


@functools.cache
def fast_types(isa: str) -> tuple[torch.dtype, ...]:
    """The dtypes whose products are ours."""
    if not _C.is_amd() or isa not in ("avx512", "avx512_bf16"):
        return ()
    return (torch.float32, torch.bfloat16) if isa == "avx512_bf16" else (torch.float32,)


def slow_transposes(isa: str) -> bool:
    """Whether torch's bfloat16 products of a transposed matrix are slower than those of a copy."""
    return isa == "amx_bf16"


def _is_slow(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == torch.bfloat16
        and slow_transposes(_C.isa())
        and _are_matrices(a, b)
        and a.stride(0) == 1 < a.stride(1)
        and a.shape[0] * a.shape[1] * b.shape[1] >= COPIED_WORK
    )


def _fits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype in fast_types(_C.isa())
        and _are_matrices(a, b)
        and min(*a.shape, b.shape[1]) >= SMALLEST
        and a.shape[0] * a.shape[1] * b.shape[1] >= WORK[a.dtype]
        and 1 in a.stride()
        and 1 in b.stride()
        and torch.get_float32_matmul_precision() == "highest"
    )


def _are_matrices(a: Tensor, b: Tensor) -> bool:
    """Of one dtype, that fit, in memory as they say, and nobody watches."""
    return (
        a.dim() == b.dim() == 2
        and a.shape[1] == b.shape[0]
        and _is_plain(a, a.dtype)
        and _is_plain(b, a.dtype)
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
