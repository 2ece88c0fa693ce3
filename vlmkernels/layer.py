"""RMSNorm and SwiGLU of a transformer layer on the CPU: one native call each way.

Plain torch makes them of 3 to 9 calls with a tensor each, whose page faults and fixed costs are
more than the arithmetic. On CUDA torch and Megatron have kernels of their own.

Arithmetic is float32 for all dtypes, rounded once; bitwise repeatable with any number of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import _C, DTYPES, check_tensors, describe, once, pointer


def _check(op: str, x: Tensor, others: dict[str, tuple[Tensor | None, int]]) -> None:
    """x: float32, bfloat16 or float16 on the CPU; the others [n] beside it."""
    check_tensors(x=x, **{name: other for name, (other, _) in others.items() if other is not None})
    if x.dtype not in DTYPES or x.device.type != "cpu" or x.dim() == 0:
        raise ValueError(
            f"x is {describe(x)}; {op} needs float32, bfloat16 or float16 [.., width] on the CPU"
        )
    for name, (other, width) in others.items():
        if other is None:
            continue
        if other.shape != (width,) or other.dtype != x.dtype or other.device != x.device:
            raise ValueError(
                f"{name} is {describe(other)}; {op} of x, {describe(x)}, needs {[width]} of its "
                "dtype and device"
            )


def _partial_sums(rows: int, width: int) -> Tensor:
    return torch.empty((rows + _C.SUM_ROWS - 1) // _C.SUM_ROWS, width, dtype=torch.float32)


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """dx, and where the weight learns its gradient."""
    rows, width = len(rstd), x.shape[-1]
    dy, dx = dy.contiguous(), torch.empty_like(x)
    dweight = sums = None
    if learns:
        dweight, sums = torch.empty_like(weight), _partial_sums(rows, width)
    _C.rms_norm_backward(
        dy.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        rstd.data_ptr(),
        dx.data_ptr(),
        pointer(dweight),
        pointer(sums),
        rows,
        width,
        DTYPES[x.dtype],
    )
    return dx, dweight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        _check("rms_norm", x, {"weight": (weight, width)})
        x, weight = x.contiguous(), weight.contiguous()
        rows = x.numel() // max(width, 1)
        y, rstd = torch.empty_like(x), torch.empty(rows, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        pointers = (x.data_ptr(), weight.data_ptr(), y.data_ptr(), rstd.data_ptr())
        _C.rms_norm(*pointers, rows, width, eps, DTYPES[x.dtype])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *once(rms_norm_backward, dy, *ctx.saved_tensors, ctx.needs_input_grad[1]), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    Args:
        x: [.., width], float32, bfloat16 or float16 on the CPU; a strided one is copied.
        weight: [width], x's dtype.

    Returns:
        [.., width], contiguous, x's dtype. Differentiable once in x and weight; keeps x and a
        float32 a row for it.

    Raises:
        ValueError: a dtype, device or shape does not fit.
    """
    return _RMSNorm.apply(x, weight, eps)


def swiglu_backward(dy: Tensor, x: Tensor, bias_learns: bool) -> tuple[Tensor, Tensor | None]:
    """dx, and where the bias learns its gradient."""
    both = x.shape[-1]
    rows = x.numel() // max(both, 1)
    dy, dx = dy.contiguous(), torch.empty_like(x)
    dbias = sums = None
    if bias_learns:
        dbias, sums = x.new_empty(both), _partial_sums(rows, both)
    pointers = (dy.data_ptr(), x.data_ptr(), dx.data_ptr(), pointer(dbias), pointer(sums))
    _C.swiglu_backward(*pointers, rows, both // 2, DTYPES[x.dtype])
    return dx, dbias


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        both = x.shape[-1]
        _check("swiglu_", x, {"bias": (bias, both)})
        if both % 2 or not x.is_contiguous():
            raise ValueError(
                f"x has shape {list(x.shape)} and strides {x.stride()}; swiglu_ needs a contiguous "
                "tensor whose last dimension is even"
            )
        rows = x.numel() // max(both, 1)
        y = x.new_empty(*x.shape[:-1], both // 2)
        if bias is not None:
            bias = bias.contiguous()
            torch.autograd.graph.increment_version(x)
        ctx.save_for_backward(x)
        pointers = (x.data_ptr(), pointer(bias), y.data_ptr())
        _C.swiglu(*pointers, rows, both // 2, DTYPES[x.dtype])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return once(swiglu_backward, dy, *ctx.saved_tensors, ctx.needs_input_grad[1])


def swiglu_(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up of x + bias = [gate | up] (arXiv 2002.05202). x itself becomes x + bias.

    Args:
        x: [.., 2 F], float32, bfloat16 or float16 on the CPU, contiguous: a linear's output, which
            nobody else reads.
        bias: [2 F], x's dtype.

    Returns:
        [.., F], contiguous, x's dtype. Differentiable once in x and bias; keeps x for it.

    Raises:
        ValueError: a dtype, device, shape or stride does not fit.
    """
    return _SwiGLU.apply(x, bias)
