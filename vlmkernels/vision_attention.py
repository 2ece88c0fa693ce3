"""Attention of a vision tower, straight from the fused projection to the output.

Legend: P = patches, H = heads, D = head_dim, n = segments.

Method: varlen_attention's kernels (vlmkernels/attention.py), which here turn q and k by the 2D
rotary embedding of Qwen2-VL (https://arxiv.org/abs/2409.12191) while they are packed, turn dq and
dk back while they are stored, and find their rows through the window permutation. So between the
projection and the output nothing is written to memory: no q, k, v apart, no rotated copy, no
permuted copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import _C, DTYPES, check_last_contiguous, check_tensor, define, describe
from vlmkernels.attention import (
    MAX_HEAD_DIM,
    heads_view,
    varlen_attention,
    varlen_attention_reference,
)
from vlmkernels.vision_layout import VisionLayout


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x [P, H, D] turned by table [P, D] (VisionLayout.rotary_table), in float32."""
    cosine, sine = (half[:, None] for half in table.chunk(2, -1))
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1).to(x.dtype)


def vision_attention_reference(
    qkv: Tensor, layout: VisionLayout, *, window: bool, scale: float | None = None
) -> Tensor:
    """What vision_attention means, in plain torch at qkv's dtype: tests and documentation."""
    table = layout.rotary_table(qkv.shape[-1])
    q, k, v = qkv.unbind(1)
    q, k = rotate(q, table), rotate(k, table)
    cu, order, _ = _segments(layout, window)
    if order is not None:
        q, k, v = (x[order] for x in (q, k, v))
    out = varlen_attention_reference(q, k, v, cu, scale=scale)
    return out if order is None else torch.empty_like(out).index_copy(0, order.long(), out)


def _segments(layout: VisionLayout, window: bool) -> tuple[Tensor, Tensor | None, int]:
    """Borders, the patch at each place (None: place i is patch i), the longest segment."""
    if not window:
        return layout.cu_seqlens, None, layout.max_seqlen
    if layout.cu_window_seqlens is None:
        raise ValueError("window is True, but the layout was made without a window_size")
    return layout.cu_window_seqlens, layout.window_order, layout.max_window_seqlen


# ---- launchers ----------------------------------------------------------------------------------


def _check(qkv: Tensor, table: Tensor, cu_seqlens: Tensor, order: Tensor | None) -> None:
    check_tensor("qkv", qkv, dtypes=DTYPES, shape="[P, 3, H, D]", dim=4)
    patches, three, heads, head_dim = qkv.shape
    if three != 3 or heads == 0:
        raise ValueError(
            f"qkv is {list(qkv.shape)}; it must be [P, 3, H, D] with at least one head"
        )
    if head_dim % 4 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"qkv's head_dim is {head_dim}; it must be a multiple of 4 up to {MAX_HEAD_DIM}"
        )
    check_last_contiguous("qkv", qkv)
    for name, x, dtype, shape in (
        ("the layout's rotary table", table, torch.float32, [patches, head_dim]),
        ("the layout's cu_seqlens", cu_seqlens, torch.int32, None),
        ("the layout's window_order", order, torch.int32, [patches]),
    ):
        if x is None:
            continue
        if x.dtype != dtype or x.device != qkv.device or (shape and list(x.shape) != shape):
            raise ValueError(
                f"{name} is {describe(x)}; qkv {list(qkv.shape)} on {qkv.device} needs "
                f"{str(dtype)[6:]} {shape or '[n + 1]'} there"
            )


def _arguments(
    qkv: Tensor,
    out: Tensor,
    stats: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    order: Tensor | None,
    scale: float,
) -> tuple[Any, ...]:
    views = (*map(heads_view, qkv.unbind(1)), heads_view(out))
    patches, _, heads, head_dim = qkv.shape
    sizes = (cu_seqlens.shape[0] - 1, patches, heads, head_dim)
    addresses = (stats.data_ptr(), cu_seqlens.data_ptr())
    tables = (0 if order is None else order.data_ptr(), table.data_ptr())
    return (DTYPES[qkv.dtype], *views, *addresses, *sizes, scale, *tables)


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _forward_fake(
    qkv: Tensor, table: Tensor, cu_seqlens: Tensor, order: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    patches, _, heads, head_dim = qkv.shape
    # stats [2, H, P]: the maximum and the sum of each softmax row, by place
    stats = qkv.new_empty((2, heads, patches), dtype=torch.float32)
    return qkv.new_empty((patches, heads, head_dim)), stats


def _forward_cpu(
    qkv: Tensor, table: Tensor, cu_seqlens: Tensor, order: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    _check(qkv, table, cu_seqlens, order)
    table, cu_seqlens, order = _dense(table, cu_seqlens, order)  # type: ignore[assignment]
    out, stats = _forward_fake(qkv, table, cu_seqlens, order, scale)
    _C.vision_attention_forward(*_arguments(qkv, out, stats, table, cu_seqlens, order, scale))
    return out, stats


def _backward_fake(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    stats: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    order: Tensor | None,
    scale: float,
) -> Tensor:
    return torch.empty_like(qkv)  # in qkv's own order of dimensions, so that no copy follows


def _backward_cpu(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    stats: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    order: Tensor | None,
    scale: float,
) -> Tensor:
    _check(qkv, table, cu_seqlens, order)
    check_tensor("dout", dout, dtypes=(qkv.dtype,), shape="[P, H, D]", dim=3, device=qkv.device)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()  # sum().backward() expands a scalar
    table, cu_seqlens, order = _dense(table, cu_seqlens, order)  # type: ignore[assignment]
    dqkv = _backward_fake(dout, qkv, out, stats, table, cu_seqlens, order, scale)
    arguments = _arguments(qkv, out, stats, table, cu_seqlens, order, scale)
    _C.vision_attention_backward(*arguments, heads_view(dout), *map(heads_view, dqkv.unbind(1)))
    return dqkv


# ---- registration -------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, table, cu_seqlens, order, ctx.scale = inputs
    ctx.save_for_backward(qkv, *output, table, cu_seqlens, order)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (_backward_op(dout, *ctx.saved_tensors, ctx.scale), None, None, None, None)


_backward_op = define(
    "vision_attention_backward(Tensor dout, Tensor qkv, Tensor out, Tensor stats, Tensor table, "
    "Tensor cu_seqlens, Tensor? order, float scale) -> Tensor",
    cpu=_backward_cpu,
    fake=_backward_fake,
)
_forward_op = define(
    "vision_attention(Tensor qkv, Tensor table, Tensor cu_seqlens, Tensor? order, float scale) "
    "-> (Tensor, Tensor)",
    cpu=_forward_cpu,
    fake=_forward_fake,
    setup_context=_setup_context,
    backward=_backward,
)


# ---- CUDA ---------------------------------------------------------------------------------------


def _composed(
    qkv: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    order: Tensor | None,
    longest: int,
    scale: float,
) -> Tensor:
    """The same from varlen_attention, with copies of what is rotated and permuted: the CUDA kernels
    don't read through either yet."""
    _check(qkv, table, cu_seqlens, order)
    q, k, v = qkv.unbind(1)
    q, k = rotate(q, table), rotate(k, table)
    if order is not None:
        q, k, v = (x.index_select(0, order) for x in (q, k, v))
    out = varlen_attention(q, k, v, cu_seqlens, max_seqlen=longest, scale=scale)
    return out if order is None else torch.empty_like(out).index_copy(0, order.long(), out)


# ---- public -------------------------------------------------------------------------------------


def vision_attention(
    qkv: Tensor, layout: VisionLayout, *, window: bool, scale: float | None = None
) -> Tensor:
    """A vision tower's attention: rotary embedding, windows or frames, softmax(scale q k^T) v.

    Args:
        qkv: [P, 3, H, D], float32, bfloat16 or float16, as the fused projection leaves it, in patch
            order; D a multiple of 4 up to 256. A strided view does, if D is its last dimension and
            contiguous: Megatron's [P, H, 3, D] is qkv.transpose(1, 2).
        layout: of these patches, on qkv's device.
        window: attend within the layout's windows, else within frames.
        scale: default D ** -0.5.

    Returns:
        [P, H, D], contiguous, in patch order. Differentiable in qkv, whose gradient is one tensor
        in qkv's memory order. On the CPU bitwise repeatable with any number of threads, and nothing
        but the output and 8 bytes a row and head is written; on CUDA it is composed of rotated and
        permuted copies and varlen_attention.

    Raises:
        ValueError: qkv doesn't fit, or the layout doesn't fit to it, or window without windows.
    """
    cu_seqlens, order, longest = _segments(layout, window)
    table = layout.rotary_table(qkv.shape[-1])
    scale = qkv.shape[-1] ** -0.5 if scale is None else float(scale)
    if qkv.is_cuda:
        return _composed(qkv, table, cu_seqlens, order, longest, scale)
    return _forward_op(qkv, table, cu_seqlens, order, scale)[0]
