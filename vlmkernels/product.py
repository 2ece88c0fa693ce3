"""Products of float32 matrices on the CPU. torch has MKL make them, whose fastest kernels are for
Intel's processors: on AMD's with AVX-512 `mm` takes our own kernel.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vlmkernels._native import _C, pointer

#: Rows, columns and depth from which ours is the faster one: packing costs less than it saves.
SMALLEST = 192


def mm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """a b, plus bias, or plus what out holds if `add`. Not differentiable: for the inside of an op.

    Ours (csrc/cpu/product: Goto and van de Geijn, doi 10.1145/1356052.1356053) for matrices from
    SMALLEST on that the kernel can read; under a dispatch mode, which may count, torch's.

    Args:
        a: [M, K].
        b: [K, N], a's dtype.
        bias: [N], without `add`.
        out: [M, N]: where the result goes.

    Returns:
        [M, N], `out` if given. The number of threads changes no bit of ours.

    Raises:
        RuntimeError: torch's, where shapes, dtypes or devices do not fit.
    """
    if _fits(a, b) and (out is None or _takes(out, a, b)) and (bias is None or _adds(bias, b)):
        return product(a, b, bias=bias, out=out, add=add)
    if add and out is not None:
        return out.addmm_(a, b)
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
    """Our kernel, of float32 matrices on the CPU with one stride of 1; out's rows are dense."""
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
    )
    return out


@functools.cache
def _is_faster(isa: str) -> bool:
    return isa in ("avx512", "avx512_bf16") and _C.is_amd()


def _fits(a: Tensor, b: Tensor) -> bool:
    return (
        _is_faster(_C.isa())
        and a.dim() == b.dim() == 2
        and a.shape[1] == b.shape[0]
        and min(*a.shape, b.shape[1]) >= SMALLEST
        and _is_plain(a)
        and _is_plain(b)
        and 1 in a.stride()
        and 1 in b.stride()
        and torch.get_float32_matmul_precision() == "highest"
        and not torch._C._len_torch_dispatch_stack()
        and not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))
    )


def _is_plain(x: Tensor) -> bool:
    kind = type(x) in (Tensor, torch.nn.Parameter) and x.dtype == torch.float32
    return kind and x.is_cpu and not x.is_neg()


def _takes(out: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether our kernel may write it: of the right shape, no element twice, nothing of a and b."""
    storage = out.untyped_storage().data_ptr()
    return (
        _is_plain(out)
        and out.shape == (a.shape[0], b.shape[1])
        and out.stride(1) == 1
        and out.stride(0) >= out.shape[1]
        and all(x.untyped_storage().data_ptr() != storage for x in (a, b))
        and not (torch.is_grad_enabled() and out.requires_grad)
    )


def _adds(bias: Tensor, b: Tensor) -> bool:
    return _is_plain(bias) and bias.shape == (b.shape[1],) and bias.is_contiguous()
