"""What varlen_attention and vision_attention mean, in plain torch: for tests and documentation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vlmkernels.layout import VisionLayout
from vlmkernels.rotary import rotate


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
    """`varlen_attention` segment by segment, at the inputs' dtype."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // max(k.shape[1], 1)
    out = [q[:0]]
    offsets = cu_seqlens.tolist()
    for begin, end in zip(offsets, offsets[1:], strict=False):
        qs, ks, vs = (x[begin:end].transpose(0, 1) for x in (q, k, v))  # [H, L, D]
        ks, vs = ks.repeat_interleave(group, 0), vs.repeat_interleave(group, 0)
        scores = qs @ ks.transpose(1, 2) * scale
        if causal:
            later = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        out.append((scores.softmax(-1) @ vs).transpose(0, 1))
    return torch.cat(out)


def vision_attention_reference(
    qkv: Tensor, layout: VisionLayout, *, window: bool, scale: float | None = None
) -> Tensor:
    """`vision_attention` by rotated and permuted copies, at qkv's dtype."""
    table = layout.rotary_table(qkv.shape[-1])
    q, k, v = qkv.unbind(1)
    q, k = rotate(q, table), rotate(k, table)
    cu_seqlens, order, _ = layout.segments(window)
    if order is not None:
        q, k, v = (x[order] for x in (q, k, v))
    out = varlen_attention_reference(q, k, v, cu_seqlens, scale=scale)
    return out if order is None else torch.empty_like(out).index_copy(0, order.long(), out)
