"""Attention of a vision tower, straight from the fused projection to the output.

Legend: P = patches, H = heads, D = head_dim, n = segments.

Method: varlen_attention's kernels (vlmkernels/attention.py), which here turn q and k by the 2D
rotary embedding of Qwen2-VL (https://arxiv.org/abs/2409.12191) while they are packed, turn dq and
dk back while they are stored, and find their rows through the window permutation. So between the
projection and the output nothing is written to memory: no q, k, v apart, no rotated copy, no
permuted copy. On CUDA that holds in bfloat16 and float16 for windows, segments of at most 128
patches (64 at head_dim 128; csrc/cuda/attention_window_vision.cu). For longer segments, whole
frames, k is turned once for all of a frame's queries, and in the backward q for all its keys, in
workspace of one [P, H, D] (compute capability 9.0: two, q and k) that is gone afterwards; the rest
is turned where it stands (csrc/cuda/attention_flash_vision.cu). What has no kernel there is
composed: choose_kernel().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import (
    _C,
    DTYPES,
    check_last_contiguous,
    check_tensor,
    cuda_stream,
    define,
    describe,
    once,
)
from vlmkernels.attention import (
    MAX_HEAD_DIM,
    aligned,
    heads_view,
    is_window,
    no_tiles,
    no_window,
    tile_list,
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
    qkv: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    order: Tensor | None,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    patches, _, heads, head_dim = qkv.shape
    # stats [2, H, P]: the maximum and the sum of each softmax row, by place
    stats = qkv.new_empty((2, heads, patches), dtype=torch.float32)
    return qkv.new_empty((patches, heads, head_dim)), stats


def _forward(native: Callable[..., None], inputs: tuple[Any, ...], *extra: int) -> tuple:
    qkv, table, cu_seqlens, order, _, scale = inputs
    _check(qkv, table, cu_seqlens, order)
    table, cu_seqlens, order = _dense(table, cu_seqlens, order)  # type: ignore[assignment]
    out, stats = _forward_fake(*inputs)
    native(*_arguments(qkv, out, stats, table, cu_seqlens, order, scale), *extra)
    return out, stats


def _backward_fake(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    stats: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    order: Tensor | None,
    longest: int,
    scale: float,
) -> Tensor:
    return torch.empty_like(qkv)  # in qkv's own order of dimensions, so that no copy follows


def _backward(native: Callable[..., None], inputs: tuple[Any, ...], *extra: int) -> Tensor:
    dout, qkv, out, stats, table, cu_seqlens, order, _, scale = inputs
    _check(qkv, table, cu_seqlens, order)
    check_tensor("dout", dout, dtypes=(qkv.dtype,), shape="[P, H, D]", dim=3, device=qkv.device)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()  # sum().backward() expands a scalar
    table, cu_seqlens, order = _dense(table, cu_seqlens, order)  # type: ignore[assignment]
    dqkv = _backward_fake(*inputs)
    arguments = _arguments(qkv, out, stats, table, cu_seqlens, order, scale)
    views = (heads_view(dout), *map(heads_view, dqkv.unbind(1)))
    native(*arguments, *views, *extra)
    return dqkv


def _forward_cpu(*inputs: Any) -> tuple[Tensor, Tensor]:
    return _forward(_C.vision_attention_forward, inputs)


def _backward_cpu(*inputs: Any) -> Tensor:
    return _backward(_C.vision_attention_backward, inputs)


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _turned(qkv: Tensor, order: Tensor | None, longest: int) -> tuple[Tensor, Tensor | None]:
    """Workspace of the tiled kernels, [H, P, D], for q or k turned, and another for q, which those
    for compute capability 9.0 want turned beforehand as well."""
    if order is not None:
        raise ValueError(
            f"window_order is given and longest is {longest}; the kernel for such segments at "
            f"head_dim {qkv.shape[-1]} takes no order (rotated_attention permutes for it)"
        )
    patches, _, heads, head_dim = qkv.shape
    turned = torch.empty((heads, patches, head_dim), dtype=qkv.dtype, device=qkv.device)
    return turned, torch.empty_like(turned) if _capability(qkv.device) == (9, 0) else None


def _forward_cuda(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The window kernel or the tiled one; `longest` is a promise that both check."""
    qkv, table, cu_seqlens, order, longest, scale = inputs
    inputs = (aligned(qkv), aligned(table), cu_seqlens, order, longest, scale)
    if is_window(qkv.shape[-1], longest):
        return _forward(_C.vision_window_forward_cuda, inputs, longest, cuda_stream(qkv))
    tiles, turned = tile_list(qkv, cu_seqlens, 1), _turned(qkv, order, longest)
    workspace = (x.data_ptr() if x is not None else 0 for x in (tiles, *turned))
    return _forward(_C.flash_vision_forward_cuda, inputs, longest, *workspace, cuda_stream(qkv))


def _backward_cuda(*inputs: Any) -> Tensor:
    dout, qkv, out, stats, table, cu_seqlens, order, longest, scale = inputs
    rest = (cu_seqlens, order, longest, scale)
    inputs = (aligned(dout), aligned(qkv), out, stats, aligned(table), *rest)
    if is_window(qkv.shape[-1], longest):
        return _backward(_C.vision_window_backward_cuda, inputs, longest, cuda_stream(qkv))
    tiles, turned = tile_list(qkv, cu_seqlens, 2), _turned(qkv, order, longest)
    rows = torch.empty_like(stats)
    workspace = (x.data_ptr() if x is not None else 0 for x in (tiles, rows, *turned))
    return _backward(_C.flash_vision_backward_cuda, inputs, longest, *workspace, cuda_stream(qkv))


# ---- registration -------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, table, cu_seqlens, order, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(qkv, *output, table, cu_seqlens, order)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    dqkv = once(_backward_op, dout, *ctx.saved_tensors, ctx.longest, ctx.scale)
    return (dqkv, None, None, None, None, None)


_backward_op = define(
    "vision_attention_backward(Tensor dout, Tensor qkv, Tensor out, Tensor stats, Tensor table, "
    "Tensor cu_seqlens, Tensor? order, int longest, float scale) -> Tensor",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
)
_forward_op = define(
    "vision_attention(Tensor qkv, Tensor table, Tensor cu_seqlens, Tensor? order, int longest, "
    "float scale) -> (Tensor, Tensor)",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
    setup_context=_setup_context,
    backward=_gradient,
)


# ---- which kernel -------------------------------------------------------------------------------


def choose_kernel(
    device: str, dtype: torch.dtype, head_dim: int, longest: int | None, permuted: bool
) -> str:
    """What serves segments of at most `longest` patches on a device of this type: "cpu", "window"
    or "tiled", kernels that turn q and k themselves, or "composed": rotation in torch, copies in
    the order of the windows where they are `permuted`, varlen_attention.

    The tiled kernels come before flash-attn here, other than in varlen_attention: a rotation in
    torch moves 48 bytes for each element of q and k, which takes an A100 longer than attention to
    frames of up to 3,700 patches at the full rate of its tensor cores (docs/attention-cuda.md).
    """
    if device != "cuda":
        return "cpu"
    if longest is None:  # the kernels must be promised something
        return "composed"
    if not no_window(device, dtype, head_dim, longest):
        return "window"
    if not permuted and not no_tiles(device, dtype, head_dim):
        return "tiled"
    return "composed"


def _composed(
    qkv: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    order: Tensor | None,
    longest: int | None,
    scale: float,
) -> Tensor:
    """The same from varlen_attention, with copies of what is rotated and permuted."""
    _check(qkv, table, cu_seqlens, order)
    q, k, v = qkv.unbind(1)
    q, k = rotate(q, table), rotate(k, table)
    if order is not None:
        q, k, v = (x.index_select(0, order) for x in (q, k, v))
    out = varlen_attention(q, k, v, cu_seqlens, max_seqlen=longest, scale=scale)
    return out if order is None else torch.empty_like(out).index_copy(0, order.long(), out)


def rotated_attention(
    qkv: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    order: Tensor | None = None,
    longest: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """vision_attention on the parts of a layout, for towers that have made them themselves.

    Args:
        qkv: as there.
        table: float32 [P, D], cosines and sines of each patch's D / 2 angles.
        cu_seqlens: int32 [n + 1], borders of the segments in places.
        order: int32 [P], the patch at each place; None: place i is patch i.
        longest: segment, in patches; on CUDA without it the call is composed.
        scale: default D ** -0.5.
    """
    scale = qkv.shape[-1] ** -0.5 if scale is None else float(scale)
    permuted = order is not None
    kernel = choose_kernel(qkv.device.type, qkv.dtype, qkv.shape[-1], longest, permuted)
    if kernel == "composed":
        return _composed(qkv, table, cu_seqlens, order, longest, scale)
    return _forward_op(qkv, table, cu_seqlens, order, longest or 0, scale)[0]


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
        but the output and 8 bytes a row and head is written. On CUDA the same holds for bfloat16
        and float16, head_dim 64, 80, 96 and 128 and segments of at most 128 patches (head_dim 128:
        64). Longer segments, in patch order, and head_dim 72 take workspace of [P, H, D] in qkv's
        dtype while they run (two in a forward on compute capability 9.0), and 8 bytes a row and
        head more in the backward. Other calls, float32 or with permuted segments of such a length,
        are composed of rotated and permuted copies and varlen_attention.

    Raises:
        ValueError: qkv doesn't fit, or the layout doesn't fit to it, or window without windows.
    """
    cu_seqlens, order, longest = _segments(layout, window)
    table = layout.rotary_table(qkv.shape[-1])
    return rotated_attention(qkv, table, cu_seqlens, order, longest, scale)
