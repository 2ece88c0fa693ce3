"""Attention over packed sequences of unequal lengths.

Legend: T = packed tokens, H = query heads, Hkv = key/value heads, D = head_dim, n = segments.

Method: FlashAttention-2's online softmax (Dao 2023, https://arxiv.org/abs/2307.08691). On the CPU
with scores transposed, so that queries lie in vector lanes (csrc/cpu/attention/kernel.cpp);
arithmetic is float32 for every storage type, but for bfloat16 on processors with fast bf16 dot
products, and results don't depend on the number of threads. On CUDA, segments of at most 128 tokens
stand whole in shared memory (csrc/cuda/attention_window.cuh), longer ones are tiled
(csrc/cuda/attention_flash.cu). docs/attention.md and docs/attention-cuda.md explain them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
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
    once,
)

MAX_HEAD_DIM = 256


def varlen_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """What varlen_attention means, in plain torch at the inputs' dtype: tests and documentation."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // max(k.shape[1], 1)
    out = [q[:0]]
    borders = cu_seqlens.tolist()
    for begin, end in zip(borders, borders[1:], strict=False):
        qs, ks, vs = (x[begin:end].transpose(0, 1) for x in (q, k, v))  # [H, L, D]
        ks, vs = ks.repeat_interleave(group, 0), vs.repeat_interleave(group, 0)
        scores = qs @ ks.transpose(1, 2) * scale
        if causal:
            later = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        out.append((scores.softmax(-1) @ vs).transpose(0, 1))
    return torch.cat(out)


# ---- launchers ----------------------------------------------------------------------------------


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> None:
    check_tensor("q", q, dtypes=DTYPES, shape="[T, H, D]", dim=3)
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, dtypes=(q.dtype,), shape="[T, Hkv, D]", dim=3, device=q.device)
    tokens, heads, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] != tokens or k.shape[2] != head_dim:
        raise ValueError(
            f"k is {list(k.shape)} and v is {list(v.shape)}; both must be "
            f"[T, Hkv, D] with q's T = {tokens} and D = {head_dim}"
        )
    if not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q's head_dim is {head_dim}; it must be 1 to {MAX_HEAD_DIM}")
    if heads == 0 or k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(
            f"q has {heads} heads and k has {k.shape[1]}; q's must be a positive multiple of k's"
        )
    check_tensor(
        "cu_seqlens", cu_seqlens, dtypes=(torch.int32,), shape="[n + 1]", dim=1, device=q.device
    )
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens is empty; it must hold n + 1 borders, [0] for no segment")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_last_contiguous(name, x)


def heads_view(x: Tensor) -> tuple[int, int, int]:
    """vlmk::HeadsView: address, strides of tokens and heads in elements."""
    return x.data_ptr(), x.stride(0), x.stride(1)


def _native_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Any, ...]:
    views = (heads_view(q), heads_view(k), heads_view(v), heads_view(out))
    tokens, heads, head_dim = q.shape
    sizes = (cu_seqlens.shape[0] - 1, tokens, heads, k.shape[1], head_dim)
    addresses = (stats.data_ptr(), cu_seqlens.data_ptr())
    return (DTYPES[q.dtype], *views, *addresses, *sizes, scale, causal)


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    # stats [2, H, T]: the maximum and the sum of each softmax row (csrc/params.h)
    stats = q.new_empty((2, q.shape[1], q.shape[0]), dtype=torch.float32)
    return q.new_empty(q.shape), stats


def _backward_fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def aligned(x: Tensor) -> Tensor:
    """x, copied where a row of its last dimension, 16 bits wide or more, starts off a multiple of
    16 bytes."""
    *outer, last = x.stride()
    if x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in outer) and last == 1:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def is_window(head_dim: int, longest: int) -> bool:
    """Whether the operators on CUDA take the window kernel; else the tiled one."""
    return longest <= WINDOW_LENGTHS.get(head_dim, -1)


def tile_list(q: Tensor, cu_seqlens: Tensor, lists: int) -> Tensor:
    """Workspace: int32 [lists, T / 128 + n, 4] (csrc/params.h)."""
    most = q.shape[0] // TILE_ROWS + max(cu_seqlens.shape[0] - 1, 0)
    return torch.empty((lists, most, 4), dtype=torch.int32, device=q.device)


def _forward(native: Callable[..., None], inputs: tuple[Any, ...], *extra: int) -> tuple:
    q, k, v, cu_seqlens, _, causal, scale = inputs
    _check(q, k, v, cu_seqlens)
    cu_seqlens = cu_seqlens.contiguous()
    out, stats = _forward_fake(*inputs)
    native(*_native_arguments(q, k, v, out, stats, cu_seqlens, causal, scale), *extra)
    return out, stats


def _backward(native: Callable[..., None], inputs: tuple[Any, ...], *extra: int) -> tuple:
    dout, q, k, v, out, stats, cu_seqlens, _, causal, scale = inputs
    _check(q, k, v, cu_seqlens)
    check_tensor("dout", dout, dtypes=(q.dtype,), shape="[T, H, D]", dim=3, device=q.device)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()  # sum().backward() expands a scalar
    cu_seqlens = cu_seqlens.contiguous()
    grads = _backward_fake(*inputs)
    arguments = _native_arguments(q, k, v, out, stats, cu_seqlens, causal, scale)
    native(*arguments, heads_view(dout), *map(heads_view, grads), *extra)
    return grads


def _forward_cpu(*inputs: Any) -> tuple[Tensor, Tensor]:
    return _forward(_C.attention_forward, inputs)


def _backward_cpu(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(_C.attention_backward, inputs)


def _forward_cuda(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The window kernel or the tiled one; `longest` is a promise that both check."""
    q, k, v, cu_seqlens, longest, *rest = inputs
    if is_window(q.shape[-1], longest):
        inputs = (*map(aligned, (q, k, v)), cu_seqlens, longest, *rest)
        return _forward(_C.window_attention_forward_cuda, inputs, longest, cuda_stream(q))
    return tiled_forward(_C.flash_attention_forward_cuda, *inputs)


def tiled_forward(native: Callable[..., None], *inputs: Any) -> tuple[Tensor, Tensor]:
    """By flash_attention_forward_cuda, which takes wgmma where the GPU has it, or for comparison by
    flash_mma_forward_cuda, which never does."""
    q, k, v, cu_seqlens, longest, *rest = inputs
    inputs = (*map(aligned, (q, k, v)), cu_seqlens, longest, *rest)
    tiles = tile_list(q, cu_seqlens, 1)
    return _forward(native, inputs, longest, tiles.data_ptr(), cuda_stream(q))


def _backward_cuda(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out, stats, cu_seqlens, longest, *rest = inputs
    if is_window(q.shape[-1], longest):
        inputs = (*map(aligned, (dout, q, k, v)), out, stats, cu_seqlens, longest, *rest)
        return _backward(_C.window_attention_backward_cuda, inputs, longest, cuda_stream(q))
    return tiled_backward(_C.flash_attention_backward_cuda, *inputs)


def tiled_backward(native: Callable[..., None], *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """By flash_attention_backward_cuda or flash_mma_backward_cuda, after either forward."""
    dout, q, k, v, out, stats, cu_seqlens, longest, *rest = inputs
    inputs = (*map(aligned, (dout, q, k, v)), out, stats, cu_seqlens, longest, *rest)
    tiles, rows = tile_list(q, cu_seqlens, 2), torch.empty_like(stats)
    extra = (longest, tiles.data_ptr(), rows.data_ptr(), cuda_stream(q))
    return _backward(native, inputs, *extra)


# ---- registration -------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.longest, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grads = once(_backward_op, dout, *saved, ctx.longest, ctx.causal, ctx.scale)
    return (*grads, None, None, None, None)


_backward_op = define(
    "varlen_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor stats, Tensor cu_seqlens, int longest, bool causal, float scale) "
    "-> (Tensor, Tensor, Tensor)",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
)
_forward_op = define(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int longest, bool causal, "
    "float scale) -> (Tensor, Tensor)",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
    setup_context=_setup_context,
    backward=_gradient,
)


# ---- which kernel -------------------------------------------------------------------------------

#: What csrc/cuda/attention_window.cuh holds whole in shared memory, by its instances' head_dim.
WINDOW_LENGTHS = {64: 128, 80: 128, 96: 128, 128: 64}
#: Rows of a tile of csrc/cuda/attention_flash.cu, and its instances.
TILE_ROWS = 128
TILED_HEAD_DIMS = (64, 72, 80, 96, 128)
_HAS_CUDA = hasattr(_C, "window_attention_forward_cuda")  # built with CUDA kernels

#: "cpu", "window" and "tiled" are ours; "flash-attn" is that package; "sdpa" is torch's, once per
#: segment. Where none is asked for, the first that can.
BACKENDS = ("cpu", "window", "flash-attn", "tiled", "sdpa")


def choose_backend(
    device: str, dtype: torch.dtype, head_dim: int, longest: int, forced: str | None = None
) -> str:
    """Which of BACKENDS attends on a device of this type to segments of at most `longest` tokens.

    On CUDA a window's whole attention fits into one thread block up to 128 tokens (64 at head_dim
    128). For longer segments flash-attn comes before our tiled kernels, because it has been
    measured on GPUs and they have not; they come before SDPA, which works on one segment after
    another.

    Raises:
        ValueError: the forced one can't, and why.
    """
    hindrances = {
        "cpu": device != "cpu" and f"it runs on the CPU, the tensors are on {device}",
        "window": no_window(device, dtype, head_dim, longest),
        "tiled": no_tiles(device, dtype, head_dim),
        "flash-attn": _no_flash_attn(device, dtype),
        "sdpa": False,
    }
    if forced is None:
        return next(name for name in BACKENDS if not hindrances[name])
    if forced not in hindrances:
        raise ValueError(f"backend is {forced!r}; it must be one of {', '.join(BACKENDS)}")
    if hindrances[forced]:
        raise ValueError(f"backend {forced!r} can't be used: {hindrances[forced]}")
    return forced


def promised(backend: str, longest: int) -> int:
    """What the operator is told of the longest segment: it takes the window kernel for short ones,
    so the tiled one is asked for by a promise of longer ones."""
    return max(longest, max(WINDOW_LENGTHS.values()) + 1) if backend == "tiled" else longest


def _no_kernel(device: str, dtype: torch.dtype, head_dim: int, head_dims: Iterable[int]) -> str:
    if device != "cuda":
        return f"it runs on CUDA, the tensors are on {device}"
    if not _HAS_CUDA:
        return "vlmkernels was built without CUDA kernels"
    if dtype == torch.float32:
        return "it takes bfloat16 and float16"
    if head_dim not in head_dims:
        return f"head_dim is {head_dim}, it has {', '.join(map(str, head_dims))}"
    return ""


def no_window(device: str, dtype: torch.dtype, head_dim: int, longest: int) -> str:
    """Why the window kernels can't attend to such segments, or ""."""
    if reason := _no_kernel(device, dtype, head_dim, WINDOW_LENGTHS):
        return reason
    if longest > WINDOW_LENGTHS[head_dim]:
        limit = f"{WINDOW_LENGTHS[head_dim]} at head_dim {head_dim}"
        return f"the longest segment has {longest} tokens, it takes {limit}"
    return ""


def no_tiles(device: str, dtype: torch.dtype, head_dim: int) -> str:
    """Why the tiled kernels can't attend, or ""."""
    return _no_kernel(device, dtype, head_dim, TILED_HEAD_DIMS)


def _no_flash_attn(device: str, dtype: torch.dtype) -> str:
    if device != "cuda":
        return f"it runs on CUDA, the tensors are on {device}"
    if dtype == torch.float32:
        return "it takes bfloat16 and float16"
    return "" if _flash_attn() else "flash-attn is not installed"


@functools.cache
def _flash_attn() -> Callable[..., Tensor] | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, scale: float
) -> Tensor:
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != q.shape[0] or borders != sorted(borders):
        raise ValueError(
            f"cu_seqlens runs from {borders[0]} to {borders[-1]}; it must start at 0, never "
            f"decrease and end at q's number of tokens, {q.shape[0]}"
        )
    sizes = [end - begin for begin, end in zip(borders, borders[1:], strict=False)]
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in segment),
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )[0].transpose(0, 1)
        for segment in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        if segment[0].shape[0]
    ]
    return torch.cat([q[:0], *parts])


# ---- public -------------------------------------------------------------------------------------


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
            cu_seqlens[i + 1]; starts at 0, ends at T; segments may be empty.
        max_seqlen: the longest segment, if known: spares a device synchronisation on CUDA, where a
            longer one than it says ends the kernel with an error.
        causal: a token sees itself and earlier tokens of its segment only.
        scale: default D ** -0.5.
        backend: one of BACKENDS, instead of what choose_backend says (`python -m vlmkernels.info`
            prints it); "sdpa" runs everywhere.

    Returns:
        [T, H, D], contiguous, q's dtype. Differentiable in q, k and v; bitwise repeatable, forward
        and backward, with the backends "cpu" (with any number of threads), "window" and "tiled".

    Raises:
        ValueError: an argument's dtype, shape, device, strides or values don't fit.
    """
    scale = max(q.shape[-1:].numel(), 1) ** -0.5 if scale is None else float(scale)
    if not q.is_cuda and backend in (None, "cpu"):
        return _forward_op(q, k, v, cu_seqlens, 0, causal, scale)[0]
    _check(q, k, v, cu_seqlens)
    if max_seqlen is None:
        longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    else:
        longest = max_seqlen
    backend = choose_backend(q.device.type, q.dtype, q.shape[-1], longest, backend)
    if backend == "flash-attn" and (flash := _flash_attn()) is not None:
        borders = (cu_seqlens, cu_seqlens, longest, longest)
        return flash(q, k, v, *borders, softmax_scale=scale, causal=causal)
    if backend == "sdpa":
        return _sdpa(q, k, v, cu_seqlens, causal, scale)
    return _forward_op(q, k, v, cu_seqlens, promised(backend, longest), causal, scale)[0]
