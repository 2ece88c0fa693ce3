"""Weight gradients added straight to Megatron's main_grad, without apex.

megatron-core's linears can add a weight's gradient to the float32 buffer in the matrix product
itself (`gradient_accumulation_fusion`), but ask apex for the two functions that do it. torch has
the product with an accumulator too, so these are its stand-ins: no gradient tensor is made, none
is read back to be added.

x: a linear's input [tokens, in]; grad: of its output [tokens, out]; main_grad [out, in].
"""

from __future__ import annotations

import importlib.util
import sys

import torch
from torch import Tensor

from vlmkernels.product import accumulates, mm


def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """main_grad += grad^T x, into a float32 main_grad. Columns of x beyond main_grad's are zeros,
    which make its rows whole units of 16 bytes (linears.py)."""
    width = main_grad.shape[1]
    if x.shape[1] > width and x.is_cuda and accumulates(x.dtype, x.device):
        # main_grad's rows are no such units, and the product into it would be the slow one.
        main_grad.add_(torch.mm(grad.t(), x, out_dtype=torch.float32)[:, :width])
    else:
        mm(grad.t(), x[:, :width], out=main_grad, add=True)


def wgrad_gemm_accum_fp16(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """main_grad += grad^T x, all of one half-precision type."""
    main_grad.addmm_(grad.t(), x)


def enable() -> None:
    """Let megatron-core find them where apex is not installed. Once a process; idempotent."""
    from megatron.core.tensor_parallel import layers

    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        layers.fused_weight_gradient_mlp_cuda = sys.modules[__name__]
        layers._grad_accum_fusion_available = True
