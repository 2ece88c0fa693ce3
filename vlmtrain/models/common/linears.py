"""megatron-core's linears on a tensor-parallel group of one, where nothing is exchanged.

Megatron's path is made for exchanges in every pass: identities in the graph on both sides of the
product, contexts for automatic casting, a bias that is added afterwards. These have the product,
the bias in it, and the same gradients: that of the weight is added to Megatron's main_grad
(float32, as parallel/ddp.py asks for).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from vlmkernels.product import mm
from vlmtrain.models import weight_gradients
from vlmtrain.models.common.elementwise import bias_gradient, past_autograd


def row_padding(matrix: Tensor) -> int:
    """Elements that rows lack to be whole units of 16 bytes, on a GPU. Hopper's products take such
    rows alone; for others cuBLAS falls back to an A100's, 2.8 times as long for Qwen2.5-VL's 3,420
    (an H200). A copy with zeros behind costs less, and an input that comes with them nothing."""
    return -matrix.shape[-1] % (16 // matrix.element_size()) if matrix.is_cuda else 0


class _Product(torch.autograd.Function):
    """x w^T + bias of x [.., in], or [.., in + row_padding] with zeros behind, weight [out, in],
    bias [out] or None, both in `own`; autograd gets them too where their gradients do not go past
    it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        own: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        ctx.own = matrix, added = own
        width, ctx.width = matrix.shape[0], x.shape[-1]
        y = x.new_empty(*x.shape[:-1], width)  # no view: what follows writes over it
        rows, padded = x.reshape(-1, ctx.width), matrix
        if spare := row_padding(matrix):
            padded = F.pad(matrix, (0, spare))
            if ctx.width == matrix.shape[1]:
                rows = F.pad(rows, (0, spare))
        ctx.save_for_backward(rows if matrix.requires_grad else None, matrix)
        mm(rows, padded.t(), bias=added, out=y.view(-1, width))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, _ = ctx.saved_tensors
        weight, bias = ctx.own
        needs_dx, sees_weight, sees_bias, _ = ctx.needs_input_grad
        shape, grad = grad.shape[:-1], grad.reshape(-1, grad.shape[-1])
        dx = dweight = None
        spare = row_padding(weight)
        if needs_dx:
            padded = F.pad(weight, (0, spare)) if spare else weight
            dx = mm(grad, padded)[:, : ctx.width].view(*shape, ctx.width)
        if x is not None:
            # apex's, where it is installed, knows no padding.
            into = weight_gradients if spare else layers.fused_weight_gradient_mlp_cuda
            into.wgrad_gemm_accum_fp32(x, grad, weight.main_grad)
        if sees_weight:
            # Megatron's hook wants a gradient where it starts a reduction, and does not read it.
            weight.grad_added_to_main_grad = True
            dweight = torch.empty_like(weight)
        hidden = bias is not None and bias.requires_grad and not sees_bias
        dbias = bias_gradient(grad, sees_bias, bias.main_grad if hidden else None)
        return dx, dweight, dbias, None


class Whole:
    """A linear with all its weights on this rank. On a GPU its input may have `row_padding` columns
    of zeros more."""

    weight: Tensor
    bias: Tensor | None
    skip_bias_add: bool

    def forward(self, x: Tensor, *unused: Any) -> tuple[Tensor, Tensor | None]:
        """Output and the bias that the caller adds."""
        own = self.weight, None if self.skip_bias_add else self.bias
        seen = (None if past_autograd(x, p) is not None else p for p in own)
        return _Product.apply(x, *seen, own), self.bias if self.skip_bias_add else None


def input_padding(linear: Any) -> int:
    """Columns of zeros that its input may have behind, for nothing."""
    return row_padding(linear.weight) if isinstance(linear, Whole) else 0


class WholeColumnParallelLinear(Whole, ColumnParallelLinear):
    """A ColumnParallelLinear of a group of one."""


class WholeRowParallelLinear(Whole, RowParallelLinear):
    """A RowParallelLinear of a group of one."""


class PlainLinear(torch.nn.Linear):
    """A linear that every rank has whole, with the same product and the same gradients."""

    def forward(self, x: Tensor) -> Tensor:
        learns = self.weight.requires_grad and torch.is_grad_enabled()
        if learns and not hasattr(self.weight, "main_grad"):
            return super().forward(x)  # outside of Megatron's DistributedDataParallel
        own = self.weight, self.bias
        seen = (None if past_autograd(x, p) is not None else p for p in own)
        result: Tensor = _Product.apply(x, *seen, own)
        return result


def whole_linear(module: Any) -> None:
    """Make a linear one of these where its group has one rank."""
    for parallel, whole in (
        (ColumnParallelLinear, WholeColumnParallelLinear),
        (RowParallelLinear, WholeRowParallelLinear),
    ):
        if type(module) is parallel and module.tp_group.size() == 1:
            module.__class__ = whole
