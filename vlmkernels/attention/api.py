"""Attention over packed segments of unequal lengths, and straight from a tower's projection.

T = packed tokens, P = patches, H = heads, Hkv = key/value heads, D = head_dim, n = segments.

Method: FlashAttention-2's online softmax (Dao 2023, https://arxiv.org/abs/2307.08691). On the CPU
with scores transposed, so that queries lie in vector lanes (csrc/cpu/attention/kernel.cpp);
arithmetic is float32 for every storage type, but for bfloat16 on processors with fast bf16 dot
products, and results don't depend on the number of threads. docs/attention.md and
docs/attention-cuda.md explain the kernels, select.py says which one serves a call.

vision_attention's kernels rotate q and k by the 2D embedding of Qwen2-VL
(https://arxiv.org/abs/2409.12191) while they are packed, rotate dq and dk back while they are
stored, and find their rows through the window permutation: between the projection and the output
nothing is written to memory, no separate q, k, v, no rotated copy, no permuted copy. On CUDA that
holds for windows; for longer segments k is rotated once for all queries (sm90: q too), and in the
backward q for all keys, in workspace of [P, H, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import get_interpreter_stack

from vlmkernels._native import _C, DTYPES, check_tensor, check_tensors, is_whole
from vlmkernels.attention.launch import check_varlen, check_vision, qkv_op, varlen_op, vision_op
from vlmkernels.attention.select import flash_attn, keeping, machine_of, select
from vlmkernels.layout import VisionLayout
from vlmkernels.rotary import rotate


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v inside each segment of a packed batch.

    Args:
        q: [T, H, D], float32, bfloat16 or float16; D up to 256. May be a strided view whose last
            dimension is contiguous, such as a slice of a fused projection.
        k, v: [T, Hkv, D], same dtype and device; Hkv divides H, and query head h reads key/value
            head h // (H / Hkv).
        cu_seqlens: int32 [n + 1] on q's device: segment i is tokens cu_seqlens[i] up to
            cu_seqlens[i + 1]; starts at 0, ends at T; segments may be empty. Another is an error,
            on CUDA one that ends the kernel.
        max_seqlen: the longest segment, if known: spares a device synchronisation on CUDA, where a
            longer one than it says ends the kernel with an error. On the CPU the backward of
            segments of at most 64 tokens is faster with it, for 128 or 256 bytes a row and head
            that are kept until then; backend="cpu" keeps none.
        causal: a token sees itself and earlier tokens of its segment only.
        scale: default D ** -0.5.
        backend: the one kernel to be considered, else `select` chooses (select.py; `python -m
            vlmkernels.info` prints what): "cpu", "window", "flash-attn", "sm90", "sm80", "tiled"
            for either of these two, "sm90-fused", whose backward is one kernel (bfloat16), or
            "sdpa", which runs everywhere.

    Returns:
        [T, H, D], contiguous, q's dtype. Differentiable in q, k and v; bitwise repeatable, forward
        and backward, by all kernels of ours, on the CPU with any number of threads.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: an argument's dtype, shape, device, strides or values don't fit.
    """
    check_tensors(q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    head_dim = q.shape[-1:].numel()
    scale, max_seqlen = _number(scale, head_dim), _length(max_seqlen)
    machine = machine_of(q.device)
    strides: tuple[int, ...] = ()
    short = False
    if machine.device == "cuda":
        check_varlen(q, k, v, cu_seqlens)
        max_seqlen = longest_segment(cu_seqlens) if max_seqlen is None else max_seqlen
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
        short = have_short(cu_seqlens, q)
    kernel = select(
        machine, q.dtype, head_dim, max_seqlen, short=short, strides=strides, backend=backend
    )
    if kernel in ("sdpa", "flash-attn"):
        check_varlen(q, k, v, cu_seqlens)
        q, scale = _positive(q, scale)
        if machine.device == "cuda":
            q, k, v = _aligned(q), _aligned(k), _aligned(v)
        flash = flash_attn() if kernel == "flash-attn" and len(q) else None
        if flash is not None and max_seqlen is not None:
            return _flash(flash, q, k, v, cu_seqlens, max_seqlen, causal, scale)
        return _sdpa(q, k, v, cu_seqlens, causal, scale)
    if backend is None:
        kernel = keeping(kernel, max_seqlen, q, k, v)
    return varlen_op(q, k, v, cu_seqlens, max_seqlen, causal, scale, kernel)[0]


def _number(scale: float | None, head_dim: int) -> float:
    if isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "scale is a tensor that requires a gradient and would get none; multiply q by it and "
            "pass scale=1"
        )
    if scale is None:
        return max(head_dim, 1) ** -0.5
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise ValueError(f"scale is {scale!r}; it must be a number") from None


def _length(max_seqlen: int | None) -> int | None:
    if max_seqlen is None or is_whole(max_seqlen):
        return max_seqlen
    if isinstance(max_seqlen, Tensor) and max_seqlen.numel() == 1:
        return int(max_seqlen)  # on CUDA it waits for the device
    raise ValueError(f"max_seqlen is {max_seqlen!r}; it must be a whole number")


def longest_segment(cu_seqlens: Tensor) -> int:
    """Tokens of the longest segment; on CUDA it waits for the device."""
    return int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0


def have_short(cu_seqlens: Tensor, tokens: Tensor) -> bool:
    """Whether segments have fewer than DQ_ROWS of the tokens on average."""
    return (cu_seqlens.numel() - 1) * _C.DQ_ROWS > tokens.shape[0]


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q and a scale above 0 with the same scores: flash-attn and torch's sdpa mask scores with -inf
    before they scale them, so that another scale gives NaN."""
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be a finite number")
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def _aligned(x: Tensor) -> Tensor:
    """x, copied where its rows could start at multiples of 16 bytes and don't: torch's kernels and
    flash-attn's load as many at a time. Compiled code and torch.func, whose tensors have no
    address, take x as it is."""
    if torch.compiler.is_compiling() or get_interpreter_stack():
        return x
    size = x.element_size()
    if x.shape[-1] * size % 16:
        return x
    fits = x.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _flash(
    flash: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    causal: bool,
    scale: float,
) -> Tensor:
    """flash-attn's function, which leaves rows unwritten that no segment of at most max_seqlen
    tokens has."""
    lengths = cu_seqlens.diff()
    fits = (lengths == lengths.clamp(0, min(max_seqlen, 2**31 - 1))).all()
    fits &= (cu_seqlens[0] == 0) & (cu_seqlens[-1] == len(q))
    torch._assert_async(
        fits,
        "varlen_attention: cu_seqlens must start at 0, never decrease, end at the number of tokens "
        "and have no segment longer than max_seqlen",
    )
    dense, longest = cu_seqlens.contiguous(), max(max_seqlen, 2)  # 1 is another path of its own
    return flash(q, k, v, dense, dense, longest, longest, softmax_scale=scale, causal=causal)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, scale: float
) -> Tensor:
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != q.shape[0] or offsets != sorted(offsets):
        raise ValueError(
            f"cu_seqlens runs from {offsets[0]} to {offsets[-1]}; it must start at 0, never "
            f"decrease and end at q's number of tokens, {q.shape[0]}"
        )
    group, gqa = q.shape[1] // k.shape[1], q.shape[1] != k.shape[1]
    if gqa and q.is_cuda and (q.dtype == torch.float32 or machine_of(q.device).capability < (8, 0)):
        # Only torch's flash kernel has it without a matrix of all scores, which it keeps.
        k, v, gqa = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), False
    sizes = [end - begin for begin, end in zip(offsets, offsets[1:], strict=False)]
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in segment),
            is_causal=causal,
            scale=scale,
            enable_gqa=gqa,
        )[0].transpose(0, 1)
        for segment in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        if segment[0].shape[0]
    ]
    return torch.cat([q[:0], *parts])


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
        but the output and 8 bytes a row and head is written, in windows whose gradient will be
        asked for 264 (docs/attention.md). On CUDA the same, with 8 bytes, holds for bfloat16
        and float16, head_dim 64, 80, 96 and 128 and segments of at most 128 patches (head_dim 128:
        64). Longer segments, in patch order, and head_dim 72 take workspace of [P, H, D] in qkv's
        dtype while they run (two in a forward on compute capability 9.0), and 8 bytes a row and
        head more in the backward. Other calls, float32 or with permuted segments of such a length,
        are composed of rotated and permuted copies and varlen_attention.

    Raises:
        TypeError: qkv is no tensor, or layout no VisionLayout.
        ValueError: qkv doesn't fit, or the layout doesn't fit to it, or window without windows.
    """
    if not isinstance(layout, VisionLayout):
        raise TypeError(f"layout is a {type(layout).__name__}; it must be a VisionLayout")
    check_tensor("qkv", qkv, dtypes=DTYPES, shape="[P, 3, H, D]", dim=4)
    cu_seqlens, order, max_seqlen = layout.segments(window)
    table = layout.rotary_table(qkv.shape[-1])
    return rotated_attention(qkv, table, cu_seqlens, order, max_seqlen, scale)


def rotated_attention(
    qkv: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    order: Tensor | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """vision_attention on the parts of a layout, for towers that have made them themselves.

    Args:
        qkv: as there.
        table: float32 [P, D], cosines and sines of each patch's D / 2 angles.
        cu_seqlens: int32 [n + 1], segment i is patches cu_seqlens[i] up to cu_seqlens[i + 1], in
            the order that `order` gives.
        order: int32 [P], a permutation of the patches; None: as they stand.
        max_seqlen: the longest segment, in patches; on CUDA without it the call is composed.
        scale: default D ** -0.5.

    Returns:
        [P, H, D], contiguous, qkv's dtype, in the order of qkv's patches. Differentiable in qkv.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: an argument's dtype, shape, device, strides or values don't fit.
    """
    check_tensor("qkv", qkv, dtypes=DTYPES, shape="[P, 3, H, D]", dim=4)
    check_tensors(table=table, cu_seqlens=cu_seqlens)
    if order is not None:
        check_tensors(order=order)
    head_dim = qkv.shape[-1]
    scale, max_seqlen = _number(scale, head_dim), _length(max_seqlen)
    machine = machine_of(qkv.device)
    strides = (qkv.stride(0), qkv.stride(-2)) if machine.device == "cuda" else ()
    permuted = order is not None
    kernel = select(
        machine,
        qkv.dtype,
        head_dim,
        max_seqlen,
        vision=True,
        permuted=permuted,
        short=machine.device == "cuda" and have_short(cu_seqlens, qkv),
        strides=strides,
    )
    if kernel == "composed":
        return _composed(qkv, table, cu_seqlens, order, max_seqlen, scale)
    kernel = keeping(kernel, max_seqlen, qkv)
    return vision_op(qkv, table, cu_seqlens, order, max_seqlen, scale, kernel)[0]


def _composed(
    qkv: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    order: Tensor | None,
    max_seqlen: int | None,
    scale: float,
) -> Tensor:
    """The same from varlen_attention, with copies of what is rotated and permuted."""
    check_vision(qkv, table, cu_seqlens, order)
    q, k, v = qkv.unbind(1)
    q, k = rotate(q, table), rotate(k, table)
    if order is not None:
        q, k, v = (x.index_select(0, order) for x in (q, k, v))
    out = varlen_attention(q, k, v, cu_seqlens, max_seqlen=max_seqlen, scale=scale)
    return out if order is None else torch.empty_like(out).index_copy(0, order.long(), out)


def qkv_attention(
    qkv: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """A language model's attention, on the CPU, from its fused projection: rotary embedding, then
    varlen_attention. No copy of q, no rotated copies, one gradient of the projection.

    Args:
        qkv: [T, Hkv, H / Hkv + 2, D], float32, bfloat16 or float16 in host memory: of each
            key/value head the query heads that read it, its key and its value, as Megatron's
            linear_qkv leaves them; D even and up to 256. Another view whose last dimension is
            contiguous is copied.
        table: float32 [T, D], of each token D / 2 cosines, then as many sines. q and k are rotated
            in float32 while they are read.
        cu_seqlens: int32 [n + 1], as for varlen_attention.
        causal: a token sees itself and earlier tokens of its segment only.
        scale: default D ** -0.5.

    Returns:
        [T, H, D], contiguous, qkv's dtype. Differentiable in qkv; bitwise repeatable with any
        number of threads.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: an argument's dtype, shape, strides or values don't fit, or qkv is not in host
            memory.
    """
    check_tensors(qkv=qkv, table=table, cu_seqlens=cu_seqlens)
    if qkv.device.type != "cpu":
        raise ValueError(
            f"qkv is on {qkv.device}; qkv_attention runs on the CPU: use apply_rotary and "
            "varlen_attention there"
        )
    scale = _number(scale, qkv.shape[-1:].numel())
    return qkv_op(qkv, table, cu_seqlens, causal, scale)[0]
