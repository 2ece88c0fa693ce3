"""The three torch ops of attention: checks, workspace, the native call of one kernel, gradients.

T = tokens (of vision_attention patches), H = heads, Hkv = key/value heads, D = head_dim, n =
segments. All ops hand the same arguments to the same kernels; those of vision_attention and
qkv_attention take q, k and v from one projection, a rotary table and, in a vision tower, an order,
and write one gradient of the projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vlmkernels._native import (
    _C,
    DTYPES,
    check_last_contiguous,
    check_tensor,
    define,
    describe,
    launch,
    once,
    pointer,
)
from vlmkernels.attention.select import CPU, MAX_HEAD_DIM, SM90, TILED, kept_floats, machine_of

#: Native functions of a kernel: varlen_attention's forward and backward, vision_attention's.
NATIVE = {
    kernel: tuple(f"{op}_{way}" for op in ops for way in ("forward", "backward"))
    for kernel, ops in {
        "cpu": ("attention", "attention"),
        "cpu-kept": ("attention", "attention"),
        **{name: (name, f"{name}_vision") for name in ("window", "sm80", "sm90")},
    }.items()
}
#: vision_attention's backward of sm90 is the one that there is workspace for.
NATIVE["sm90-fused"] = (
    "sm90_forward", "sm90_fused_backward", "sm90_vision_forward", "sm90_vision_backward"
)  # fmt: skip

# ---- argument checks -----------------------------------------------------------------------------


def check_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> None:
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
        raise ValueError("cu_seqlens is empty; it must hold n + 1 offsets, [0] for no segment")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_last_contiguous(name, x)


def check_vision(qkv: Tensor, table: Tensor, cu_seqlens: Tensor, order: Tensor | None) -> None:
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
    parts: list[tuple[str, Tensor, torch.dtype, list[int] | None]] = [
        ("the layout's rotary table", table, torch.float32, [patches, head_dim]),
        ("the layout's cu_seqlens", cu_seqlens, torch.int32, None),
    ]
    if order is not None:
        parts.append(("the layout's window_order", order, torch.int32, [patches]))
    for name, x, dtype, shape in parts:
        fits = list(x.shape) == shape if shape else x.dim() == 1 and len(x) > 0
        if x.dtype != dtype or x.device != qkv.device or not fits:
            raise ValueError(
                f"{name} is {describe(x)}; qkv {list(qkv.shape)} on {qkv.device} needs "
                f"{str(dtype)[6:]} {shape or '[n + 1]'} there"
            )


def check_qkv(qkv: Tensor, table: Tensor, cu_seqlens: Tensor) -> None:
    check_tensor("qkv", qkv, dtypes=DTYPES, shape="[T, Hkv, H / Hkv + 2, D]", dim=4)
    tokens, kv_heads, group, head_dim = qkv.shape
    if kv_heads == 0 or group < 3:
        raise ValueError(
            f"qkv is {list(qkv.shape)}; it must be [T, Hkv, H / Hkv + 2, D] with at least one head "
            "of q for each of k and v"
        )
    if head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"qkv's head_dim is {head_dim}; it must be even and 2 to {MAX_HEAD_DIM}")
    check_last_contiguous("qkv", qkv)
    for name, x, dtype, dim in (
        ("table", table, torch.float32, 2),
        ("cu_seqlens", cu_seqlens, torch.int32, 1),
    ):
        shape = f"[{tokens}, {head_dim}]" if dim == 2 else "[n + 1]"
        check_tensor(name, x, dtypes=(dtype,), shape=shape, dim=dim, device=qkv.device)
    if table.shape != (tokens, head_dim) or len(cu_seqlens) == 0:
        raise ValueError(
            f"table is {list(table.shape)} and cu_seqlens {list(cu_seqlens.shape)}; qkv "
            f"{list(qkv.shape)} needs {[tokens, head_dim]} and [n + 1]"
        )


def check_device(kernel: str, q: Tensor) -> None:
    if kernel not in NATIVE or q.is_cuda == (kernel in CPU):
        raise ValueError(f"kernel is {kernel!r}, which takes no tensors on {q.device}")


# ---- launch --------------------------------------------------------------------------------------


def heads_view(x: Tensor) -> tuple[int, int, int]:
    """vlmk::HeadsView of [T, H, D] or [T, Hkv, H / Hkv, D]: address, strides of tokens and heads in
    elements."""
    return pointer(x), x.stride(0), x.stride(-2)


def group_gap(q: Tensor) -> int:
    """Elements between two groups of q's heads beyond the heads' stride."""
    return q.stride(1) - q.shape[2] * q.stride(2) if q.dim() == 4 else 0


def aligned(x: Tensor) -> Tensor:
    """x, copied where a row of its last dimension, 16 bits wide or more, starts off a multiple of
    16 bytes: kernels on CUDA load as many at a time."""
    *outer, last = x.stride()
    if x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in outer) and last == 1:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _upstream(dout: Tensor, like: Tensor, shape: str, kernel: str) -> Tensor:
    """dout as the kernel can read it."""
    check_tensor("dout", dout, dtypes=(like.dtype,), shape=shape, dim=3, device=like.device)
    # sum().backward() expands a scalar; TMA reads no expanded tensor at all.
    if dout.stride(-1) != 1 or (kernel in SM90 and 0 in dout.stride()):
        dout = dout.contiguous()
    return dout if kernel in CPU else aligned(dout)


def _stream(q: Tensor) -> int | None:
    """The stream that a call on q is launched on; None where a CUDA graph is captured from it."""
    index = q.device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return _stream(q)
    capturing = torch.cuda.is_current_stream_capturing()
    return None if capturing else torch._C._cuda_getCurrentRawStream(index)


#: Of each cu_seqlens its lists of tiles, and what they were made of.
_LISTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _list_tiles(
    q: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, causal: bool, vision: bool
) -> Tensor:
    """int32 [2 (T / 128 + n) + 1, 4], the tiles of queries and of keys and a counter of those that
    a kernel's blocks have taken, 0 between launches: made once for all layers and
    both ways, and again after cu_seqlens has been written to (where torch does not count it, the
    kernels end with an error). A captured graph makes its own at each call, because it is replayed
    with what cu_seqlens then holds; inference mode too, where torch counts no write."""
    tokens, segments = q.shape[0], cu_seqlens.shape[0] - 1
    stream = None if cu_seqlens.is_inference() else _stream(q)
    key = None
    if stream is not None:
        version = (cu_seqlens.data_ptr(), cu_seqlens.stride(), cu_seqlens._version)
        key = (stream, *version, segments, tokens, max_seqlen, causal)
        known, tiles = _LISTS.get(cu_seqlens, (None, None))
        if known == key:
            return tiles
    rows = 2 * (tokens // _C.TILE_ROWS + segments) + 1
    tiles = torch.empty((rows, 4), dtype=torch.int32, device=q.device)
    dense = cu_seqlens.contiguous()
    launch(
        "list_tiles",
        q,
        cu_seqlens=pointer(dense),
        segments=segments,
        tokens=tokens,
        max_seqlen=max_seqlen,
        causal=causal,
        vision=vision,
        tiles=pointer(tiles),
    )
    if key is not None:
        _LISTS[cu_seqlens] = key, tiles
    return tiles


def group_parts(processors: int, tokens: int, heads: int, kv_heads: int) -> int:
    """Blocks to which sm90's backward deals the query heads that share a key, so that each
    processor gets about three tiles of keys. Each but the last has as many heads."""
    group, tiles = heads // kv_heads, -(-tokens // _C.TILE_ROWS) * kv_heads
    most = max(1, group * tiles // (3 * processors))
    return -(-group // most)


def _workspace(
    kernel: str, q: Tensor, kv_heads: int, segments: int, rotary: bool, backward: bool
) -> dict[str, Tensor]:
    """Of the kernels for long segments (csrc/common/params.h): in the backward float32 [2, H, T],
    lse and delta of each row, for two kernels float32 [group_parts, 2, T, Hkv, D] where several
    blocks share a key's heads, and for one kernel sums of dq, [H, T / DQ_ROWS + n, DQ_ROWS, D],
    and counts of what was added; for vision_attention [H, T, D], k rotated (then q), and in sm90
    another, q rotated."""
    tokens, heads, head_dim = q.shape
    workspace = {}
    if backward:
        lse_delta = torch.empty((2, heads, tokens), dtype=torch.float32, device=q.device)
        workspace["lse_delta"] = lse_delta
    if backward and kernel == "sm90":
        parts = group_parts(machine_of(q.device).processors, tokens, heads, kv_heads)
        if parts > 1:
            sums = q.new_empty((parts, 2, tokens, kv_heads, head_dim), dtype=torch.float32)
            workspace["dkv_parts"] = sums
    if backward and kernel == "sm90-fused":
        parts = heads * (tokens // _C.DQ_ROWS + segments)
        workspace["dq_sum"] = q.new_empty((parts, _C.DQ_ROWS, head_dim), dtype=torch.float32)
        workspace["done"] = q.new_zeros(parts, dtype=torch.int32)
    if rotary:
        rotated = torch.empty((heads, tokens, head_dim), dtype=q.dtype, device=q.device)
        workspace["rotated_k"] = rotated
        if kernel in SM90:
            workspace["rotated_q"] = torch.empty_like(rotated)
    return workspace


def _run(
    kernel: str,
    qkv: tuple[Tensor, ...],
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    causal: bool,
    scale: float,
    results: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, ...] = (),
    rotary: tuple[Tensor, Tensor | None] | None = None,
) -> None:
    """Calls the kernel's forward, or with `gradients` = (dout, dq, dk, dv) its backward.

    results: out and softmax_stats. rotary: table and order, for vision_attention.
    """
    (q, k, v), (out, softmax_stats) = qkv, results
    check_device(kernel, q)
    tokens, heads, head_dim = q.shape[0], q.shape[1:-1].numel(), q.shape[-1]
    segments = cu_seqlens.shape[0] - 1
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be a finite number")
    kept = kept_floats(q.dtype) if kernel == "cpu-kept" else 0
    if gradients:  # what was saved may have been through hooks
        rows, stats = (tokens, heads, head_dim), (kept + 2, heads, tokens)
        if softmax_stats.shape != stats or gradients[0].shape != rows or out.shape != rows:
            shapes = ", ".join(str(list(x.shape)) for x in (gradients[0], out, softmax_stats))
            raise ValueError(
                f"dout, out and softmax_stats are {shapes}; the forward pass gave {list(rows)} and "
                f"{list(stats)}"
            )
        same = {"shape": "as the forward pass gave it", "dim": 3, "device": q.device}
        check_tensor("out", out, dtypes=(q.dtype,), **same)
        check_tensor("softmax_stats", softmax_stats, dtypes=(torch.float32,), **same)
        check_last_contiguous("out", out)
        out = out if kernel in CPU else aligned(out)
        softmax_stats = softmax_stats.contiguous()
    if kernel not in CPU and segments == 0 and tokens > 0:  # no kernel would see it
        raise ValueError(
            f"cu_seqlens has one element and names no segment; it must end at {tokens}, the number "
            "of tokens"
        )
    table, order = rotary or (None, None)
    if order is not None and kernel in TILED:
        raise ValueError(f"window_order is given; {kernel} takes no order")
    table, order = (None if x is None else x.contiguous() for x in (table, order))
    dense = cu_seqlens.contiguous()
    stats_at = pointer(softmax_stats)
    named = {
        "dtype": DTYPES[q.dtype],
        "q": heads_view(q),
        "k": heads_view(k),
        "v": heads_view(v),
        "out": heads_view(out),
        "row_stats": stats_at + 4 * kept * heads * tokens,
        "cu_seqlens": pointer(dense),
        "segments": segments,
        "tokens": tokens,
        "heads": heads,
        "kv_heads": k.shape[1],
        "head_dim": head_dim,
        "scale": scale,
        "causal": causal,
        "order": pointer(order),
        "rotary": pointer(table),
    }
    if kernel in CPU:
        named["q_group_gap"] = group_gap(q)
    else:
        named["max_seqlen"] = max_seqlen
    if kept:
        named["probabilities"] = stats_at
    workspace = {}  # held by this name until the kernel is launched
    if kernel in TILED:
        ways = rotary is not None, bool(gradients)
        workspace = _workspace(kernel, q, k.shape[1], segments, *ways)
        workspace["tiles"] = _list_tiles(q, cu_seqlens, max_seqlen, causal, rotary is not None)
        if "dkv_parts" in workspace:
            named["group_parts"] = len(workspace["dkv_parts"])
        named.update({name: pointer(x) for name, x in workspace.items()})
    if gradients:
        named.update(zip(("dout", "dq", "dk", "dv"), map(heads_view, gradients), strict=True))
    launch(NATIVE[kernel][2 * (rotary is not None) + bool(gradients)], q, **named)


# ---- varlen_attention ----------------------------------------------------------------------------


def _softmax_stats(like: Tensor, heads: int, kernel: str) -> Tensor:
    """float32 [2, H, T], the maximum and the sum of each softmax row; where probabilities are kept
    [66, H, T], before them [H, T, 64], or [34, H, T] where in bf16 (common/params.h)."""
    planes = 2 + (kept_floats(like.dtype) if kernel == "cpu-kept" else 0)
    return like.new_empty((planes, heads, like.shape[0]), dtype=torch.float32)


def _varlen_outputs(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """out and softmax_stats."""
    softmax_stats = _softmax_stats(q, q.shape[1], arguments[-1])
    return torch.empty_like(q, memory_format=torch.contiguous_format), softmax_stats


def _varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    causal: bool,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    check_varlen(q, k, v, cu_seqlens)
    results = _varlen_outputs(q, kernel)
    if kernel not in CPU:
        q, k, v = aligned(q), aligned(k), aligned(v)
    _run(kernel, (q, k, v), cu_seqlens, max_seqlen, causal, scale, results)
    return results


def _varlen_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    dense = torch.contiguous_format
    return tuple(torch.empty_like(x, memory_format=dense) for x in (q, k, v))


def _varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    softmax_stats: Tensor,
    max_seqlen: int | None,
    causal: bool,
    scale: float,
    kernel: str,
) -> tuple[Tensor, ...]:
    check_varlen(q, k, v, cu_seqlens)
    dout = _upstream(dout, q, "[T, H, D]", kernel)
    dqkv = _varlen_gradients(dout, q, k, v)
    if kernel not in CPU:
        q, k, v = aligned(q), aligned(k), aligned(v)
    results, grads = (out, softmax_stats), (dout, *dqkv)
    _run(kernel, (q, k, v), cu_seqlens, max_seqlen, causal, scale, results, grads)
    return dqkv


# ---- vision_attention ----------------------------------------------------------------------------


def _vision_outputs(qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """As above; softmax_stats in the order of the segments."""
    patches, _, heads, head_dim = qkv.shape
    softmax_stats = _softmax_stats(qkv, heads, arguments[-1])
    return qkv.new_empty(patches, heads, head_dim), softmax_stats


def _vision_forward(
    qkv: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    order: Tensor | None,
    max_seqlen: int | None,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    check_vision(qkv, table, cu_seqlens, order)
    results = _vision_outputs(qkv, kernel)
    if kernel not in CPU:
        qkv, table = aligned(qkv), aligned(table)
    rotary = (table, order)
    _run(kernel, qkv.unbind(1), cu_seqlens, max_seqlen, False, scale, results, rotary=rotary)
    return results


def _vision_gradient(dout: Tensor, qkv: Tensor, *_: Any) -> Tensor:
    """In qkv's own order of dimensions, so that no copy follows, but where its heads overlap: then
    a head's elements would not lie side by side."""
    dqkv = torch.empty_like(qkv)
    return dqkv if dqkv.stride(-1) == 1 else qkv.new_empty(qkv.shape)


def _vision_backward(
    dout: Tensor,
    qkv: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    order: Tensor | None,
    out: Tensor,
    softmax_stats: Tensor,
    max_seqlen: int | None,
    scale: float,
    kernel: str,
) -> Tensor:
    check_vision(qkv, table, cu_seqlens, order)
    dout = _upstream(dout, qkv, "[P, H, D]", kernel)
    dqkv = _vision_gradient(dout, qkv)
    if kernel not in CPU:
        qkv, table = aligned(qkv), aligned(table)
    results, grads = (out, softmax_stats), (dout, *dqkv.unbind(1))
    options = (cu_seqlens, max_seqlen, False, scale)
    _run(kernel, qkv.unbind(1), *options, results, grads, (table, order))
    return dqkv


# ---- qkv_attention -------------------------------------------------------------------------------


def _dense(qkv: Tensor) -> Tensor:
    """qkv, copied where its gradient has other strides: kernels have one gap for q and dq."""
    same = qkv.is_contiguous() or torch.empty_like(qkv).stride() == qkv.stride()
    return qkv if same else qkv.contiguous()


def _split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Hkv, H / Hkv, D], k and v [T, Hkv, D]."""
    group = qkv.shape[2] - 2
    return qkv[:, :, :group], qkv[:, :, group], qkv[:, :, group + 1]


def _qkv_outputs(qkv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, kv_heads, group, head_dim = qkv.shape
    heads = kv_heads * (group - 2)
    softmax_stats = _softmax_stats(qkv, heads, "cpu")
    return qkv.new_empty(tokens, heads, head_dim), softmax_stats


def _qkv_forward(
    qkv: Tensor, table: Tensor, cu_seqlens: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    check_qkv(qkv, table, cu_seqlens)
    qkv, results = _dense(qkv), _qkv_outputs(qkv)
    _run("cpu", _split(qkv), cu_seqlens, None, causal, scale, results, rotary=(table, None))
    return results


def _qkv_gradient(dout: Tensor, qkv: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(_dense(qkv))


def _qkv_backward(
    dout: Tensor,
    qkv: Tensor,
    table: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    softmax_stats: Tensor,
    causal: bool,
    scale: float,
) -> Tensor:
    check_qkv(qkv, table, cu_seqlens)
    dout = _upstream(dout, qkv, "[T, H, D]", "cpu")
    qkv, dqkv = _dense(qkv), _qkv_gradient(dout, qkv)
    results, grads = (out, softmax_stats), (dout, *_split(dqkv))
    _run("cpu", _split(qkv), cu_seqlens, None, causal, scale, results, grads, (table, None))
    return dqkv


# ---- registration --------------------------------------------------------------------------------


def _autograd(backward_op: Callable[..., Any], tensors: int = 4) -> tuple[Callable, Callable]:
    """Of all ops: some tensors and options go in, out and softmax_stats come out; their backward
    gets dout, the tensors, both results and the options."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.options = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # else softmax_stats, 69 MB of windows, had one of zeros

    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * (tensors + len(ctx.options))
        grads = once(backward_op, dout, *ctx.saved_tensors, *ctx.options)
        grads = (grads,) if isinstance(grads, Tensor) else grads
        return (*grads, *[None] * (tensors - len(grads) + len(ctx.options)))

    return setup_context, backward


_varlen_backward_op = define(
    "varlen_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, "
    "Tensor out, Tensor softmax_stats, SymInt? max_seqlen, bool causal, float scale, str kernel) "
    "-> (Tensor, Tensor, Tensor)",
    _varlen_backward,
    capturable=False,  # it keeps lists of tiles
    fake=_varlen_gradients,
)
varlen_op = define(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, SymInt? max_seqlen, "
    "bool causal, float scale, str kernel) -> (Tensor, Tensor)",
    _varlen_forward,
    capturable=False,  # it keeps lists of tiles
    fake=_varlen_outputs,
    autograd=_autograd(_varlen_backward_op),
)
_vision_backward_op = define(
    "vision_attention_backward(Tensor dout, Tensor qkv, Tensor table, Tensor cu_seqlens, "
    "Tensor? order, Tensor out, Tensor softmax_stats, SymInt? max_seqlen, float scale, "
    "str kernel) -> Tensor",
    _vision_backward,
    capturable=False,  # it keeps lists of tiles
    fake=_vision_gradient,
)
vision_op = define(
    "vision_attention(Tensor qkv, Tensor table, Tensor cu_seqlens, Tensor? order, "
    "SymInt? max_seqlen, float scale, str kernel) -> (Tensor, Tensor)",
    _vision_forward,
    capturable=False,  # it keeps lists of tiles
    fake=_vision_outputs,
    autograd=_autograd(_vision_backward_op),
)
_qkv_backward_op = define(
    "qkv_attention_backward(Tensor dout, Tensor qkv, Tensor table, Tensor cu_seqlens, Tensor out, "
    "Tensor softmax_stats, bool causal, float scale) -> Tensor",
    _qkv_backward,
    fake=_qkv_gradient,
    devices=("CPU",),
)
qkv_op = define(
    "qkv_attention(Tensor qkv, Tensor table, Tensor cu_seqlens, bool causal, float scale) "
    "-> (Tensor, Tensor)",
    _qkv_forward,
    fake=_qkv_outputs,
    devices=("CPU",),
    autograd=_autograd(_qkv_backward_op, tensors=3),
)
