"""What Megatron clips gradients with where neither transformer-engine nor apex is installed.

Its own stand-ins wait for the GPU once a tensor, and make a copy of every gradient that they scale.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor

from vlmkernels.optim.native import sum_of_squares


def install() -> None:
    """In the places of Megatron's stand-ins; transformer-engine's and apex's stay, on a GPU."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm or not torch.cuda.is_available():
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm, _scale


def _norm(chunk: int, flag: Any, lists: list[list[Tensor]], each: bool) -> tuple[Tensor, None]:
    """apex's multi_tensor_l2norm: the norm of all tensors, [1]."""
    if all(x.is_cpu and x.dtype == torch.float32 and x.is_contiguous() for x in lists[0]):
        return torch.tensor([math.sqrt(sum_of_squares(lists[0]))]), None
    return torch.stack(torch._foreach_norm(lists[0])).norm().view(1), None


def _scale(chunk: int, flag: Any, lists: list[list[Tensor]], factor: float) -> None:
    """apex's multi_tensor_scale: the second list is the first times `factor`."""
    sources, targets = lists
    if sources is not targets:
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)
