"""The element-wise parts of a layer on the CPU, in few passes over memory and few new tensors.

On CUDA torch and megatron-core have fused kernels for them (RMSNorm, bias_swiglu, bias-dropout-add)
and the layers use those. On a CPU the same fusions are compiled at first use (20 s) or do not
exist, and plain autograd makes a new tensor of every step, whose page faults cost more than the
arithmetic. Each function here keeps for backward only what its formula needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from torch import Tensor

from vlmkernels.layer import rms_norm, swiglu_

aten = torch.ops.aten


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm; on the CPU vlmkernels', in one call each way."""

    def forward(self, x: Tensor) -> Tensor:
        known = x.dtype in (torch.float32, torch.bfloat16) and self.weight.dtype == x.dtype
        if x.device.type != "cpu" or not known:
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps)


class _QuickGelu(torch.autograd.Function):
    """x * sigmoid(1.702 x) of x + bias; adds the bias to its input, which nobody else reads.

    1.702 quick_gelu(x) = silu(1.702 x), whose backward torch has as one kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        _keep(ctx, x, bias)
        return F.silu(x * 1.702, inplace=True).div_(1.702)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dx = x * 1.702
        aten.silu_backward.grad_input(grad, dx, grad_input=dx)
        return dx, _bias_gradient(ctx, dx)


class _GeluTanh(torch.autograd.Function):
    """gelu(x + bias) by a tanh; adds the bias to its input, which nobody else reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        _keep(ctx, x, bias)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dx = aten.gelu_backward(grad, x, approximate="tanh")
        return dx, _bias_gradient(ctx, dx)


def _keep(ctx: Any, x: Tensor, bias: Tensor | None) -> None:
    """Adds the bias to x, and keeps the sum for backward."""
    if bias is not None:
        x.detach().add_(bias)
    ctx.save_for_backward(x)
    ctx.has_bias = bias is not None


def _bias_gradient(ctx: Any, grad: Tensor) -> Tensor | None:
    return grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias else None


def swiglu(x: Tensor, bias: Tensor | None) -> Tensor:
    """silu(gate) * up [.., F] of x + bias = [gate | up], x [.., 2 F]. x itself gets the bias; on
    CUDA Megatron's fused kernel, and x stays."""
    return swiglu_(x, bias) if x.device.type == "cpu" else bias_swiglu_impl(x, bias)


def quick_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """quick_gelu(x + bias), same shape. x itself gets the bias."""
    return _QuickGelu.apply(x, bias)


def gelu_tanh(x: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x + bias) by a tanh, same shape. x itself gets the bias."""
    return _GeluTanh.apply(x, bias)


class _AddInPlace(torch.autograd.Function):
    """x + bias + residual, written over x: a linear's output, of which nothing else is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        ctx.has_bias = bias is not None
        out = x.detach()
        if bias is not None:
            out.add_(bias)
        return out.add_(residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:  # type: ignore[override]
        return grad, _bias_gradient(ctx, grad), grad


def bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """megatron-core's get_bias_dropout_add; its unfused form without dropout works in place."""
    megatron = get_bias_dropout_add(training, fused)

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        x, bias = x_with_bias
        if fused or dropout or x.dtype != residual.dtype:
            return megatron(x_with_bias, residual, dropout)
        return _AddInPlace.apply(x, bias, residual)

    return add
