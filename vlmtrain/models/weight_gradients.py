"""Weight gradients added straight to Megatron's main_grad, without apex.

megatron-core's linears can add a weight's gradient to the float32 buffer in the matrix product
itself (`gradient_accumulation_fusion`), but ask apex for the two functions that do it. torch has
the product with an accumulator too, so these are its stand-ins: no gradient tensor is made, none
is read back to be added.

x: a linear's input [tokens, in]; grad: of its output [tokens, out]; main_grad [out, in].
"""

from __future__ import annotations

import functools
import importlib.util
import sys

import torch
from torch import Tensor

from vlmkernels.product import mm


def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """main_grad += grad^T x, into a float32 main_grad."""
    if x.is_cuda and x.dtype != torch.float32 and _accumulates_in_float32(x.dtype):
        torch.addmm(main_grad, grad.t(), x, out_dtype=torch.float32, out=main_grad)
    else:
        mm(grad.t(), x, out=main_grad, add=True)


def wgrad_gemm_accum_fp16(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """main_grad += grad^T x, all of one half-precision type."""
    main_grad.addmm_(grad.t(), x)


@functools.cache
def _accumulates_in_float32(dtype: torch.dtype) -> bool:
    """Whether this torch's addmm takes `dtype` operands and adds to a float32 matrix in place
    (torch >= 2.9 on CUDA), found out by a small product of exact numbers."""
    a = torch.full((16, 32), 2.0, dtype=dtype, device="cuda")
    total = torch.ones(16, 16, dtype=torch.float32, device="cuda")
    try:
        torch.addmm(total, a, a.t(), out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 129.0).all())


def enable() -> None:
    """Let megatron-core find them where apex is not installed. Once a process; idempotent."""
    from megatron.core.tensor_parallel import layers

    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        layers.fused_weight_gradient_mlp_cuda = sys.modules[__name__]
        layers._grad_accum_fusion_available = True
