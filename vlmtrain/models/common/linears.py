"""megatron-core's linears on a tensor-parallel group of one, where nothing is exchanged.

Megatron's path is made for exchanges in every pass: identities in the graph on both sides of the
product, contexts for automatic casting, a bias that is added afterwards. These have the product,
the bias in it, and the same gradients: that of the weight is added to Megatron's main_grad
(float32, as parallel/ddp.py asks for).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from vlmkernels.product import mm


class _Product(torch.autograd.Function):
    """x w^T + bias of x [.., in], weight [out, in], bias [out] or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        y = x.new_empty(*x.shape[:-1], len(weight))
        mm(x.reshape(-1, x.shape[-1]), weight.t(), bias=bias, out=y.view(-1, len(weight)))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias = ctx.needs_input_grad
        shape, grad = grad.shape[:-1], grad.reshape(-1, grad.shape[-1])
        dx = mm(grad, weight).view(*shape, -1) if needs_dx else None
        dweight = None
        if needs_dweight:
            add = layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
            add(x.reshape(-1, x.shape[-1]), grad, weight.main_grad)
            weight.grad_added_to_main_grad = True
            # Megatron's hook, where it starts a reduction, wants a gradient and does not read it.
            if getattr(weight, "reduced_in_backward", True):
                dweight = torch.empty_like(weight)
        return dx, dweight, grad.sum(0) if needs_dbias else None


class _Whole:
    weight: Tensor
    bias: Tensor | None
    skip_bias_add: bool

    def forward(self, x: Tensor, *unused: Any) -> tuple[Tensor, Tensor | None]:
        """Output and the bias that the caller adds."""
        if self.skip_bias_add:
            return _Product.apply(x, self.weight, None), self.bias
        return _Product.apply(x, self.weight, self.bias), None


class WholeColumnParallelLinear(_Whole, ColumnParallelLinear):
    """A ColumnParallelLinear of a group of one."""


class WholeRowParallelLinear(_Whole, RowParallelLinear):
    """A RowParallelLinear of a group of one."""


def whole_linear(module: Any) -> None:
    """Make a linear one of these where its group has one rank."""
    for parallel, whole in (
        (ColumnParallelLinear, WholeColumnParallelLinear),
        (RowParallelLinear, WholeRowParallelLinear),
    ):
        if type(module) is parallel and module.tp_group.size() == 1:
            module.__class__ = whole
