"""The element-wise parts of a layer, in few passes over memory and few new tensors.

Plain autograd makes a new tensor of every step. Its page faults cost more than the arithmetic on a
CPU, its passes over memory count on a GPU. Megatron's fusions are torch.compile'd at first use, 13
to 19 s. Each function here keeps for backward only what its formula needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from torch import Tensor

from vlmkernels.layer import add_rms_norm_, has_norm, has_swiglu, rms_norm, swiglu_

aten = torch.ops.aten

#: A bias, which autograd may not see, and the main_grad to which its gradient is then added.
Bias = tuple[Tensor | None, Tensor | None]


def past_autograd(x: Tensor, parameter: Tensor | None) -> Tensor | None:
    """The main_grad to which a parameter's gradient is added while x's is made, past autograd and
    Megatron's hook behind it, a node and a call for each parameter in each pass. None where the
    hook has work to do (parallel/ddp.py), and where no gradient of x is made."""
    if parameter is None or not (x.requires_grad and parameter.requires_grad):
        return None
    return parameter.main_grad if _where(parameter) == "main_grad" else None  # type: ignore[attr-defined]


def _where(parameter: Tensor | None) -> Literal["dense", "main_grad"]:
    return "main_grad" if getattr(parameter, "skips_autograd", False) else "dense"


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm by vlmkernels' kernels where they take it, in one call each way."""

    def forward(self, x: Tensor, added: tuple[Tensor | None, Tensor | None] | None = None) -> Any:
        """norm(x). added, where `fuses`: a residual and a bias, or None and None; then their sum
        with x, written over x, and its norm."""
        where = _where(self.weight)
        if added is not None:
            residual, bias = added
            return add_rms_norm_(
                *(x, residual, self.weight, self.eps),
                bias=bias,
                weight_grad=where,
                bias_grad=_where(bias),
            )
        if not self._knows(x):
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps, weight_grad=where)

    def _knows(self, x: Tensor) -> bool:
        known = x.dtype in (torch.float32, torch.bfloat16) and self.weight.dtype == x.dtype
        return known and has_norm(x)

    @staticmethod
    def fuses(norm: torch.nn.Module, x: Tensor) -> bool:
        return isinstance(norm, RMSNorm) and norm._knows(x) and x.is_contiguous()


@dataclass(frozen=True)
class Sum:
    """A part of a layer's output and what is still to be added: a norm that follows adds it in its
    own pass."""

    add: Callable[..., Tensor]  # of `bias_dropout_add`
    x_with_bias: tuple[Tensor, Tensor | None]
    residual: Tensor
    dropout: float

    def added(self) -> Tensor:
        return self.add(self.x_with_bias, self.residual, self.dropout)


def with_norm(norm: torch.nn.Module, x: Tensor | Sum) -> tuple[Tensor, Tensor]:
    """x, added up, and norm(x)."""
    if isinstance(x, Sum):
        out, bias = x.x_with_bias
        if not x.dropout and out.dtype == x.residual.dtype and RMSNorm.fuses(norm, out):
            return norm(out, (x.residual, bias))
        x = x.added()
    return norm(x, (None, None)) if RMSNorm.fuses(norm, x) else (x, norm(x))


class _QuickGelu(torch.autograd.Function):
    """x * sigmoid(1.702 x) of x + bias; adds the bias to its input, which nobody else reads.

    1.702 quick_gelu(x) = silu(1.702 x), whose backward torch has as one kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor | None, bias: Bias) -> Tensor:
        _keep(ctx, x, bias)
        return F.silu(x * 1.702, inplace=True).div_(1.702)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dx = x * 1.702
        aten.silu_backward.grad_input(grad, dx, grad_input=dx)
        return dx, _bias_gradient(ctx, dx), None


class _GeluTanh(torch.autograd.Function):
    """gelu(x + bias) by a tanh; adds the bias to its input, which nobody else reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor | None, bias: Bias) -> Tensor:
        _keep(ctx, x, bias)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dx = aten.gelu_backward(grad, x, approximate="tanh")
        return dx, _bias_gradient(ctx, dx), None


def _keep(ctx: Any, x: Tensor, bias: Bias) -> None:
    """Adds the bias to x, and keeps the sum for backward."""
    added, ctx.main_grad = bias
    if added is not None:
        x.detach().add_(added)
    ctx.save_for_backward(x)


def bias_gradient(grad: Tensor, seen: bool, main_grad: Tensor | None) -> Tensor | None:
    """grad [.., out] summed over its rows where autograd has `seen` the bias; else that is added to
    main_grad, if there is one."""
    if main_grad is None and not seen:
        return None
    total = grad.reshape(-1, grad.shape[-1]).sum(0)
    if main_grad is None:
        return total
    main_grad.add_(total)
    return None


def _bias_gradient(ctx: Any, grad: Tensor) -> Tensor | None:
    return bias_gradient(grad, ctx.needs_input_grad[1], ctx.main_grad)


def _with_bias(op: Any, x: Tensor, bias: Tensor | None, *others: Tensor) -> Tensor:
    main_grad = past_autograd(x, bias)
    return op.apply(x, bias if main_grad is None else None, (bias, main_grad), *others)


def swiglu(x: Tensor, bias: Tensor | None, padding: int = 0) -> Tensor:
    """silu(gate) * up [.., F] of x + bias = [gate | up], x [.., 2 F], which nobody reads again.
    `padding`: as many columns of zeros may stand behind."""
    if has_swiglu(x):
        return swiglu_(x, bias, bias_grad=_where(bias), padding=padding)
    return bias_swiglu_impl(x, bias)


def quick_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """quick_gelu(x + bias), same shape. x itself gets the bias."""
    return _with_bias(_QuickGelu, x, bias)


def gelu_tanh(x: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x + bias) by a tanh, same shape. x itself gets the bias."""
    return _with_bias(_GeluTanh, x, bias)


class _AddInPlace(torch.autograd.Function):
    """x + bias + residual, written over x: a linear's output, of which nothing else is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor | None, bias: Bias, residual: Tensor) -> Tensor:
        added, ctx.main_grad = bias
        out = x.detach()
        if added is not None:
            out.add_(added)
        return out.add_(residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, _bias_gradient(ctx, grad), None, grad


def bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """megatron-core's get_bias_dropout_add; its unfused form without dropout works in place."""
    megatron = get_bias_dropout_add(training, fused)

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        x, bias = x_with_bias
        if fused or dropout or x.dtype != residual.dtype:
            return megatron(x_with_bias, residual, dropout)
        return _with_bias(_AddInPlace, x, bias, residual)

    return add
