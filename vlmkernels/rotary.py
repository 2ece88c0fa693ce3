"""Rotary position embedding (Su et al., arXiv 2104.09864): one launch on CUDA, torch elsewhere.

T = packed tokens, H = heads, D = head_dim. The first half of a head is paired with the second
("rotate half", as in GPT-NeoX and transformers):

    y1 = x1 cos - x2 sin,    y2 = x2 cos + x1 sin

`rotate` computes in float32, as vision towers do and as vision_attention's kernels do while they
read q and k; `apply_rotary` by cosines and sines of x's own dtype, as transformers' language models
do. cos and sin are
computed once per forward and shared by all layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import (
    DTYPES,
    check_tensors,
    describe,
    has_cuda_kernels,
    is_plain,
    launch,
    once,
    pointer,
    recorded,
)


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


def _launchable(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel reads and writes them: on CUDA, heads whose halves and starts are whole
    units of 16 bytes, and a float32 table whose rows are."""
    if x.device.type != "cuda" or x.dtype not in DTYPES or not has_cuda_kernels():
        return False
    if torch.compiler.is_compiling() or not is_plain(x, out, cos, sin):
        return False
    unit = 16 // x.itemsize
    heads = all(
        t.stride(-1) == 1
        and t.data_ptr() % 16 == 0
        and all(stride % unit == 0 for stride in t.stride()[:-1])
        for t in (x, out)
    )
    return (
        heads
        and x.shape[-1] // 2 % unit == 0
        and cos.dtype == sin.dtype == torch.float32
        and cos.stride() == sin.stride()
        and cos.stride(0) % 4 == 0
        and cos.stride(1) == 1
        and (cos.data_ptr() | sin.data_ptr()) % 16 == 0
    )


def _rotate_heads(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> None:
    """out = x [T, groups, heads, D], rotated, or if `conjugate` by the negative angles."""
    if _launchable(x, out, cos, sin):
        launch(
            "rotate_heads",
            x,
            x=pointer(x),
            x_strides=x.stride()[:3],
            out=pointer(out),
            out_strides=out.stride()[:3],
            cos=pointer(cos),
            sin=pointer(sin),
            table_stride=cos.stride(0),
            shape=x.shape,
            conjugate=conjugate,
            dtype=DTYPES[x.dtype],
        )
        return
    # A product, then a fused multiply-add, per half: each element is read and written twice, but
    # no rotated copy of the head and no concatenation is made.
    cos, sin = cos[:, None, None].to(x.dtype), sin[:, None, None].to(x.dtype)
    half, sign = x.shape[-1] // 2, -1 if conjugate else 1
    x1, x2 = x[..., :half], x[..., half:]
    if torch.compiler.is_compiling():  # which takes no strided view as `out`
        out[..., :half] = torch.addcmul(x1 * cos, x2, sin, value=-sign)
        out[..., half:] = torch.addcmul(x2 * cos, x1, sin, value=sign)
        return
    torch.mul(x1, cos, out=out[..., :half]).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=out[..., half:]).addcmul_(x1, sin, value=sign)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> Tensor:
    """x [T, H, D] rotated, dense."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate_heads(x[:, None], out[:, None], cos, sin, conjugate)
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return once(_rotated, grad, *ctx.saved_tensors, True), None, None


_rotary = recorded(_Rotary)


def _gradient(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of a fused projection whose q and k were rotated."""
    tokens, kv_heads, head_dim = dk.shape
    group = dq.shape[1] // kv_heads
    out = dq.new_empty(tokens, kv_heads, group + 2, head_dim)
    _rotate_heads(dq.reshape(tokens, kv_heads, group, head_dim), out[:, :, :group], cos, sin, True)
    _rotate_heads(dk[:, :, None], out[:, :, group : group + 1], cos, sin, True)
    out[:, :, group + 1] = dv
    return out


class _RotaryQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        tokens, kv_heads, width, head_dim = qkv.shape
        group = width - 2
        q = qkv.new_empty(tokens, kv_heads, group, head_dim)
        k = qkv.new_empty(tokens, kv_heads, 1, head_dim)
        _rotate_heads(qkv[:, :, :group], q, cos, sin, False)
        _rotate_heads(qkv[:, :, group : group + 1], k, cos, sin, False)
        return q.view(tokens, kv_heads * group, head_dim), k[:, :, 0], qkv[:, :, group + 1]

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, None, None]:
        return once(_gradient, dq, dk, dv, *ctx.saved_tensors), None, None


_rotary_qkv = recorded(_RotaryQKV)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of x by its token's angles; on CUDA in one launch where halves of heads are
    whole units of 16 bytes.

    Args:
        x: [T, H, D], floating point; views with any strides are read as they are.
        cos, sin: [T, D / 2], rounded to x's dtype, as transformers does; no gradient. The kernel
            takes float32 ones, rows of one table or two.

    Returns:
        [T, H, D], contiguous, in x's dtype. Differentiable once in x.

    Raises:
        TypeError: x, cos or sin is no tensor.
        ValueError: D is odd, or cos and sin are not [T, D / 2].
    """
    check_tensors(x=x, cos=cos, sin=sin)
    if x.dim() != 3 or x.shape[-1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [T, H, D] with an even D")
    _check_table("x", x, cos, sin)
    return _rotary(x, cos, sin)


def apply_rotary_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of a fused projection, rotated as by `apply_rotary`, and v, with one gradient of the
    projection.

    Args:
        qkv: [T, Hkv, H / Hkv + 2, D], floating point: of each key/value head the query heads that
            read it, its key and its value, as Megatron's linear_qkv leaves them.
        cos, sin: [T, D / 2], as for apply_rotary.

    Returns:
        q [T, H, D] and k [T, Hkv, D], contiguous, and v [T, Hkv, D], a view of qkv, in qkv's dtype.
        Differentiable once in qkv.

    Raises:
        TypeError: qkv, cos or sin is no tensor.
        ValueError: D is odd, qkv has no query heads, or cos and sin are not [T, D / 2].
    """
    check_tensors(qkv=qkv, cos=cos, sin=sin)
    if qkv.dim() != 4 or qkv.shape[-1] % 2 or qkv.shape[2] < 3:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; it must be [T, Hkv, H / Hkv + 2, D] with an even D"
        )
    _check_table("qkv", qkv, cos, sin)
    return _rotary_qkv(qkv, cos, sin)


def _check_table(name_of_x: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"{name_of_x} is {describe(x)}; it must be of floating point")
    expected = (x.shape[0], x.shape[-1] // 2)
    for name, table in (("cos", cos), ("sin", sin)):
        if tuple(table.shape) != expected or table.device != x.device:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)} on {table.device}; x needs {expected} on "
                f"{x.device}"
            )
