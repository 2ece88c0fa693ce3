"""Visual rows added to hidden states in place: Qwen3-VL's DeepStack, behind its first layers.

S = positions of the pack, R = rows of hidden (S, or S / size with shard=(rank, size)), n = visual
rows, h = hidden size. Only rows with a visual index are read and written, 3 n h elements in all;
the gradient of hidden passes through as it is.

Indices out of range: as visual_embedding's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import (
    DTYPES,
    check_apart,
    check_in_place,
    check_tensor,
    define,
    launch,
    once,
    pointer,
    recorded,
    without_transforms,
)
from vlmkernels.embedding.gradients import visual_grad
from vlmkernels.embedding.lookup import (
    check_launch,
    check_used,
    check_visual,
    scatter_visual,
)
from vlmkernels.embedding.visual_index import check_index, check_rows, shard_rows


def add_visual_reference(
    hidden: Tensor,
    visual: Tensor,
    visual_index: Tensor,
    *,
    shard: tuple[int, int] | None = None,
) -> Tensor:
    """`add_visual_` in plain torch, into a tensor of its own."""
    first, rows = shard_rows(shard, visual_index.shape[0])
    index = visual_index[first : first + rows].long()
    places = (index >= 0).nonzero()[:, 0]
    flat = hidden.reshape(rows, hidden.shape[-1])
    return flat.index_add(0, places, visual[index[places]]).view(hidden.shape)


def _run(
    hidden: Tensor, visual: Tensor, visual_index: Tensor, first: int, allow_unused: bool
) -> None:
    check_used(visual, visual_index, allow_unused)
    check_apart("visual", visual, "hidden", hidden)
    check_launch(hidden, visual, visual_index, first)
    visual, visual_index = visual.contiguous(), visual_index.contiguous()
    launch(
        "embedding_add",
        hidden,
        *map(pointer, (visual_index, visual, hidden)),
        first,
        hidden.shape[:-1].numel(),
        visual.shape[1],
        visual.shape[0],
        DTYPES[hidden.dtype],
    )


_add = define(
    "add_visual_(Tensor(a!) hidden, Tensor visual, Tensor visual_index, SymInt first,"
    " bool allow_unused) -> ()",
    _run,
    fake=lambda *_: None,
)


class _Add(torch.autograd.Function):
    """register_autograd takes no ops that write into their arguments."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, visual: Tensor, *rest: Any) -> Tensor:
        visual_index, ctx.first, _ = rest
        ctx.save_for_backward(visual_index)
        ctx.visual_rows = len(visual)
        ctx.mark_dirty(hidden)
        _add(hidden, visual, *rest)
        return hidden

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        (visual_index,) = ctx.saved_tensors
        dvisual = None
        if ctx.needs_input_grad[1]:
            flat = grad.reshape(-1, grad.shape[-1])
            sizes = ctx.first, ctx.visual_rows, grad.dtype
            dvisual = once(visual_grad, flat, visual_index, *sizes)
        return grad, dvisual, None, None, None


_add_with_gradients = without_transforms("add_visual_", recorded(_Add))


def add_visual_(
    hidden: Tensor,
    visual: Tensor,
    visual_index: Tensor,
    *,
    shard: tuple[int, int] | None = None,
    allow_unused: bool = False,
) -> Tensor:
    """Adds visual rows to the rows of `hidden` at their placeholders, in place.

    Args:
        hidden: [R, h], or [R, 1, h] and [B, S / B, h] as Megatron and transformers have them;
            float32, bfloat16 or float16, contiguous, no leaf that requires a gradient. Give the
            tensor that a layer returned rather than a view of it: autograd copies the gradient of a
            view that was written. Where the backward pass of what made it needs its values, torch
            says so in backward, as after every operation in place; that of a residual sum doesn't.
        visual: [n, h], dtype of hidden.
        visual_index: int32 [S], of the whole sequence, from `visual_index`.
        shard: (rank, size): hidden holds rows [rank * S / size, (rank + 1) * S / size).
        allow_unused: as `visual_embedding`.

    Returns:
        hidden. Sums are rounded once, so they are torch's bit for bit. Gradients: of hidden, the
        result's, not copied; of visual, [n, h], zeros for rows that no position of the shard names:
        the ranks' sum is the whole.

    Raises:
        ValueError, TypeError: as `scatter_visual_`.
    """
    dim = 3 if isinstance(hidden, Tensor) and hidden.dim() == 3 else 2
    shape = "[R, h], [R, 1, h] or [B, S / B, h]"
    check_tensor("hidden", hidden, dtypes=DTYPES, shape=shape, dim=dim)
    check_index(visual_index, hidden.device)
    check_visual(visual, hidden, "hidden")
    rows = hidden.shape[:-1].numel()
    first = check_rows("hidden", rows, visual_index.shape[0], shard)
    check_in_place("hidden", hidden, "pass hidden.clone()", visual)
    allow_unused = allow_unused or shard is not None
    if torch.compiler.is_compiling():  # which traces no autograd.Function that writes its input
        flat = hidden.reshape(rows, hidden.shape[-1])
        zeros, unused = torch.zeros_like(flat), allow_unused
        added = scatter_visual(zeros, visual, visual_index, shard=shard, allow_unused=unused)
        index = visual_index[first : first + rows, None]
        return hidden.copy_(torch.where(index >= 0, flat + added, flat).view_as(hidden))
    visual = visual.resolve_neg()  # torch resolves no arguments of what returns nothing
    return _add_with_gradients(hidden, visual, visual_index, first, allow_unused)
