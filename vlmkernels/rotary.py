"""Rotary position embedding (Su et al., arXiv 2104.09864), the only one in Python.

T = packed tokens, H = heads, D = head_dim. The first half of a head is paired with the second
("rotate half", as in GPT-NeoX and transformers):

    y1 = x1 cos - x2 sin,    y2 = x2 cos + x1 sin

`rotate` computes in float32, as vision towers do and as vision_attention's kernels do while they
read q and k; `apply_rotary` in x's own dtype, as transformers' language models do. cos and sin are
computed once per forward and shared by all layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import check_tensors


def frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """float32 [head_dim / 4]: radians per patch of the 2D embedding, alike for rows and columns.

    Raises:
        ValueError: head_dim is no positive multiple of 4.
    """
    if head_dim <= 0 or head_dim % 4:
        raise ValueError(f"head_dim is {head_dim}; it must be a positive multiple of 4")
    exponent = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device)
    return 1.0 / theta ** (exponent / (head_dim // 2))


def apply_rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What `apply_rotary` means, in plain torch."""
    x1, x2 = x.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x [T, H, D] rotated in float32 (float64 for float64) and rounded once.

    table: float32 [T, D], of each token D / 2 cosines, then as many sines
    (VisionLayout.rotary_table).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return apply_rotary_reference(wide, *table.chunk(2, -1)).to(x.dtype)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A product, then a fused multiply-add, per half: each element is read and written twice, but
    no rotated copy of the head and no concatenation is made."""
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half], x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(x1, cos, out=out[..., :half]).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=out[..., half:]).addcmul_(x1, sin)
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate_halves(grad, cos, -sin), None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of x by its token's angles.

    Args:
        x: [T, H, D], floating point; views with any strides are read as they are.
        cos, sin: [T, D / 2], cast to x's dtype, as transformers does; no gradient.

    Returns:
        [T, H, D], contiguous, in x's dtype.

    Raises:
        ValueError: D is odd, or cos and sin are not [T, D / 2].
    """
    check_tensors(x=x, cos=cos, sin=sin)
    if x.dim() != 3 or x.shape[-1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [T, H, D] with an even D")
    expected = (x.shape[0], x.shape[-1] // 2)
    for name, table in (("cos", cos), ("sin", sin)):
        if tuple(table.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(table.shape)}; x needs {expected}")
    return _Rotary.apply(x, cos, sin)
