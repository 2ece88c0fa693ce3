"""Word embedding and visual rows in one pass, written straight into a sequence-parallel shard.

S = positions of the pack, R = rows returned (S, or S / size with shard=(rank, size)), V = rows of
the table held here, n = visual rows, h = hidden size. `visual_index[p]` is the row of `visual`
that stands at position p, or negative where p is text.

A forward reads and writes R rows once and nothing else: rows at placeholders are never read from
the table, no mask is built, no full-length tensor is made where a shard is asked for.

Out-of-range ids and indices: on the CPU a ValueError before anything is written; on CUDA the kernel
prints one line naming position, value and limit and traps, so that the next synchronising call
raises. Nothing out of range is ever read.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vlmkernels._native import (
    DTYPES,
    check_apart,
    check_in_place,
    check_pair,
    check_tensor,
    check_whole,
    define,
    describe,
    launch,
    main_grad_of,
    once,
    pointer,
    recorded,
    sparse_rows,
    without_transforms,
)
from vlmkernels.embedding import gradients
from vlmkernels.embedding.visual_index import check_index, check_rows, shard_rows

#: Where visual_embedding's gradient of the table goes.
WeightGrad = Literal["dense", "sparse", "main_grad"]

# ---- plain-torch references: the documented meaning ----------------------------------------------


def visual_embedding_reference(
    input_ids: Tensor,
    weight: Tensor,
    visual: Tensor | None,
    visual_index: Tensor,
    *,
    vocab_range: tuple[int, int] | None = None,
    shard: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """`visual_embedding` in plain torch: whole sequence first, sliced last."""
    start, end = vocab_range or (0, weight.shape[0])
    text = visual_index < 0
    here = text & (input_ids >= start) & (input_ids < end) if vocab_range else text
    words = F.embedding((input_ids - start).where(here, 0), weight)
    if padding_idx is not None:
        padding_idx += weight.shape[0] if padding_idx < 0 else 0
        words = torch.where((input_ids == padding_idx)[:, None], words.detach(), words)
    whole = words.where(here[:, None], 0).to(dtype or weight.dtype)
    if visual is not None:
        whole = scatter_visual_reference(whole, visual.to(whole.dtype), visual_index)
    first, rows = shard_rows(shard, input_ids.shape[0])
    return whole[first : first + rows]


def scatter_visual_reference(
    embeddings: Tensor,
    visual: Tensor,
    visual_index: Tensor,
    *,
    shard: tuple[int, int] | None = None,
) -> Tensor:
    """`scatter_visual` in plain torch."""
    first, rows = shard_rows(shard, visual_index.shape[0])
    index = visual_index[first : first + rows].long()
    with_zero_row = torch.cat([visual, visual.new_zeros(1, visual.shape[1])])
    picked = with_zero_row[index.where(index >= 0, visual.shape[0])]
    return torch.where((index >= 0)[:, None], picked, embeddings)


# ---- launchers -----------------------------------------------------------------------------------


def check_launch(
    out: Tensor,
    visual: Tensor | None,
    visual_index: Tensor,
    first: int,
    input_ids: Tensor | None = None,
) -> None:
    """What memory safety rests on, for who calls an op without its function: out [R, h]."""
    check_index(visual_index, out.device)
    if visual is not None:
        check_visual(visual, out, "out", any_dtype=True)
    shape = f"[{len(visual_index)}]"
    if input_ids is not None:
        check_tensor(
            "input_ids", input_ids, dtypes=[torch.int64], shape=shape, dim=1, device=out.device
        )
    rows = out.shape[:-1].numel()
    if not 0 <= first <= len(visual_index) - rows or not out.is_contiguous():
        raise ValueError(
            f"rows are {describe(out)} from position {first} on; they must be contiguous and no "
            f"more than visual_index has behind it, which is {list(visual_index.shape)}"
        )
    if input_ids is not None and len(input_ids) != len(visual_index):
        raise ValueError(f"input_ids is {list(input_ids.shape)}; it must be {shape}")


def _run(
    input_ids: Tensor | None,
    base: Tensor,
    visual: Tensor | None,
    visual_index: Tensor,
    out: Tensor,
    first: int,
    vocab_start: int = 0,
    partial: bool = False,
) -> None:
    check_launch(out, visual, visual_index, first, input_ids)
    input_ids = None if input_ids is None else input_ids.contiguous()
    visual = None if visual is None else visual.contiguous()
    visual_index = visual_index.contiguous()
    launch(
        "embedding_forward",
        base,
        *(pointer(t) for t in (input_ids, visual_index, base, visual, out)),
        first,
        *out.shape,
        vocab_start,
        0 if input_ids is None else base.shape[0],
        -1 if visual is None else visual.shape[0],
        partial,
        DTYPES[base.dtype],
        DTYPES[base.dtype if visual is None else visual.dtype],
        DTYPES[out.dtype],
    )


def check_used(visual: Tensor | None, visual_index: Tensor, allow_unused: bool) -> None:
    """On the CPU only: a device would have to be waited for."""
    if allow_unused or visual is None or visual.device.type != "cpu":
        return
    places = np.count_nonzero(visual_index.numpy() >= 0)  # a third of torch's time
    if places < len(visual):
        raise ValueError(
            f"visual has {len(visual)} rows, but visual_index has {places} positions for them; "
            "they must be as many, unless allow_unused=True says that some rows are not for here"
        )


def _run_embedding(
    input_ids: Tensor,
    weight: Tensor,
    visual: Tensor | None,
    visual_index: Tensor,
    vocab_start: int,
    partial: bool,
    first: int,
    rows: int,
    padding_idx: int,
    dtype: torch.dtype,
    allow_unused: bool,
) -> Tensor:
    check_used(visual, visual_index, allow_unused)
    weight = weight.contiguous()
    out = weight.new_empty(rows, weight.shape[1], dtype=dtype)
    _run(input_ids, weight, visual, visual_index, out, first, vocab_start, partial)
    return out


def _run_scatter(
    embeddings: Tensor,
    visual: Tensor | None,
    visual_index: Tensor,
    first: int,
    allow_unused: bool,
) -> Tensor:
    check_used(visual, visual_index, allow_unused)
    embeddings = embeddings.contiguous()
    out = torch.empty_like(embeddings)
    _run(None, embeddings, visual, visual_index, out, first)
    return out


def _run_scatter_in_place(
    embeddings: Tensor, visual: Tensor, visual_index: Tensor, first: int, allow_unused: bool
) -> None:
    check_used(visual, visual_index, allow_unused)
    check_apart("visual", visual, "embeddings", embeddings)
    _run(None, embeddings, visual, visual_index, embeddings, first)


# ---- registration --------------------------------------------------------------------------------


def _embedding_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    input_ids, weight, visual, visual_index, start, _, first, _, padding_idx, *_ = inputs
    ctx.save_for_backward(input_ids, visual_index)
    ctx.weight_dtype = weight.dtype
    ctx.geometry = start, weight.shape[0], first, padding_idx
    ctx.visual_rows, ctx.visual_dtype = (
        (0, weight.dtype) if visual is None else (visual.shape[0], visual.dtype)
    )


def _dvisual(ctx: Any, grad: Tensor, visual_index: Tensor) -> Tensor:
    first = ctx.geometry[2]
    return once(gradients.visual_grad, grad, visual_index, first, ctx.visual_rows, ctx.visual_dtype)


def _embedding_backward(ctx: Any, grad: Tensor) -> tuple:
    input_ids, visual_index = ctx.saved_tensors
    dweight = dvisual = None
    if ctx.needs_input_grad[1]:
        geometry = (*ctx.geometry, ctx.weight_dtype)
        dweight = once(gradients.weight_grad, grad, input_ids, visual_index, *geometry)
    if ctx.needs_input_grad[2]:
        dvisual = _dvisual(ctx, grad, visual_index)
    return None, dweight, dvisual, *[None] * 8


_embedding = define(
    "visual_embedding(Tensor input_ids, Tensor weight, Tensor? visual, Tensor visual_index,"
    " SymInt vocab_start, bool partial, SymInt first, SymInt rows, SymInt padding_idx,"
    " ScalarType dtype, bool allow_unused) -> Tensor",
    _run_embedding,
    fake=lambda ids, weight, visual, index, start, partial, first, rows, padding_idx, dtype, _: (
        weight.new_empty(rows, weight.shape[1], dtype=dtype)
    ),
    autograd=(_embedding_setup, _embedding_backward),
)


class _Embedding(torch.autograd.Function):
    """The same with dweight put elsewhere, or with another visual index for dvisual."""

    @staticmethod
    def forward(
        ctx: Any, mode: str, main_grad: Tensor | None, all_index: Tensor, *inputs: Any
    ) -> Tensor:
        _embedding_setup(ctx, inputs, inputs[1])
        ctx.save_for_backward(inputs[0], inputs[3], all_index)
        ctx.mode, ctx.main_grad, ctx.hidden = mode, main_grad, inputs[1].shape[1]
        return _embedding(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        input_ids, visual_index, all_index = ctx.saved_tensors
        start, vocab_rows, first, padding_idx = ctx.geometry
        arguments = (grad, input_ids, visual_index, *ctx.geometry, ctx.weight_dtype)
        dweight = dvisual = None
        if ctx.needs_input_grad[4]:
            if ctx.main_grad is not None:
                gradients.weight_grad_into(
                    ctx.main_grad, grad, input_ids, visual_index, start, first, padding_idx
                )
                values = grad.new_empty(0, ctx.hidden, dtype=ctx.weight_dtype)
                dweight = sparse_rows(values.new_empty(0, dtype=torch.int64), values, vocab_rows)
            elif ctx.mode == "sparse":
                rows, values = once(gradients.weight_grad_sparse, *arguments)
                dweight = sparse_rows(rows, values, vocab_rows)
            else:
                dweight = once(gradients.weight_grad, *arguments)
        if ctx.needs_input_grad[5]:
            dvisual = _dvisual(ctx, grad, all_index)
        return None, None, None, None, dweight, dvisual, *[None] * 8


_embedding_elsewhere = without_transforms("visual_embedding", recorded(_Embedding))


def _scatter_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, visual, visual_index, first, _ = inputs
    ctx.save_for_backward(visual_index)
    ctx.first = first
    ctx.visual_rows = 0 if visual is None else visual.shape[0]


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple:
    (visual_index,) = ctx.saved_tensors
    dembeddings = dvisual = None
    if ctx.needs_input_grad[0]:
        dembeddings = _scatter(grad, None, visual_index, ctx.first, True)  # zeros at visual rows
    if ctx.needs_input_grad[1]:
        sizes = ctx.first, ctx.visual_rows, grad.dtype
        dvisual = once(gradients.visual_grad, grad, visual_index, *sizes)
    return dembeddings, dvisual, None, None, None


_scatter = define(
    "scatter_visual(Tensor embeddings, Tensor? visual, Tensor visual_index, SymInt first,"
    " bool allow_unused) -> Tensor",
    _run_scatter,
    fake=lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    autograd=(_scatter_setup, _scatter_backward),
)
_scatter_in_place = define(
    "scatter_visual_(Tensor(a!) embeddings, Tensor visual, Tensor visual_index, SymInt first,"
    " bool allow_unused) -> ()",
    _run_scatter_in_place,
    fake=lambda *_: None,
)


class _ScatterInPlace(torch.autograd.Function):
    """register_autograd takes no ops that write into their arguments."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _scatter_setup(ctx, inputs, inputs[0])
        ctx.mark_dirty(inputs[0])
        _scatter_in_place(*inputs)
        return inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        return _scatter_backward(ctx, grad)


_scatter_with_gradients = without_transforms("scatter_visual_", recorded(_ScatterInPlace))


# ---- argument checks -----------------------------------------------------------------------------


def check_visual(visual: Tensor, like: Tensor, name: str, *, any_dtype: bool = False) -> None:
    dtypes = DTYPES if any_dtype else [like.dtype]
    check_tensor("visual", visual, dtypes=dtypes, shape="[n, h]", dim=2, device=like.device)
    if visual.shape[1] != like.shape[-1]:
        raise ValueError(
            f"visual has rows of {visual.shape[1]} elements; they must be as long as {name}'s, "
            f"{like.shape[-1]}"
        )


def _check_scatter(
    embeddings: Tensor, visual: Tensor, visual_index: Tensor, shard: tuple[int, int] | None
) -> int:
    """The first position of the shard."""
    check_tensor("embeddings", embeddings, dtypes=DTYPES, shape="[S, h]", dim=2)
    check_index(visual_index, embeddings.device)
    check_visual(visual, embeddings, "embeddings")
    return check_rows("embeddings", embeddings.shape[0], visual_index.shape[0], shard)


def _padding_id(padding_idx: int, weight: Tensor, vocab_range: tuple[int, int] | None) -> int:
    """The id that torch.nn.Embedding takes it for."""
    check_whole(padding_idx=padding_idx)
    vocab_rows = weight.shape[0]
    if vocab_range is not None:
        if padding_idx < 0:
            raise ValueError(
                f"padding_idx is {padding_idx}; with vocab_range it must be an id of the whole "
                "vocabulary, 0 or more"
            )
        return padding_idx
    if not -vocab_rows <= padding_idx < vocab_rows:
        raise ValueError(
            f"padding_idx is {padding_idx}; weight has {vocab_rows} rows, so it must be "
            f"{-vocab_rows} to {vocab_rows - 1}"
        )
    return padding_idx % vocab_rows


def _main_grad(weight: Tensor, weight_grad: str) -> Tensor | None:
    """What dweight is to be added to, if anything."""
    if weight_grad not in ("dense", "sparse", "main_grad"):
        raise ValueError(
            f"weight_grad is {weight_grad!r}; it must be 'dense', 'sparse' or 'main_grad'"
        )
    if torch.compiler.is_compiling() and weight_grad == "sparse":
        raise ValueError("weight_grad='sparse' can't be compiled; use 'dense'")
    return main_grad_of(weight) if weight_grad == "main_grad" else None


# ---- public functions ----------------------------------------------------------------------------


def visual_embedding(
    input_ids: Tensor,
    weight: Tensor,
    visual: Tensor | None,
    visual_index: Tensor,
    *,
    vocab_range: tuple[int, int] | None = None,
    shard: tuple[int, int] | None = None,
    contribute: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
    padding_idx: int | None = None,
    weight_grad: WeightGrad = "dense",
    allow_unused: bool = False,
) -> Tensor:
    """Embedding of a pack whose placeholders are replaced by visual rows, in one pass.

    Args:
        input_ids: int64 [S]. Ids at visual positions are ignored.
        weight: [V, h], float32, bfloat16 or float16, contiguous.
        visual: [n, h], dtype of weight, or any of these with `dtype`; None: rows with
            visual_index >= 0 become zeros (another rank adds them).
        visual_index: int32 [S], from `visual_index`.
        vocab_range: (start, end) of this rank's rows of a vocabulary-parallel table, end - start
            == V. Ids outside give zero rows, to be summed over the ranks.
        shard: (rank, size): only rows [rank * S / size, (rank + 1) * S / size) are made. size must
            divide S.
        contribute: (rank, size), with vocab_range: of the visual rows only those in part `rank` of
            `size` equal parts of the sequence are written, the others become zeros, so that the sum
            over the ranks holds each once. dvisual is that of all rows all the same: behind a
            reduce-scatter or an all-reduce every rank gets the whole gradient, and so the whole
            dvisual without another exchange.
        dtype: of the result: values are converted as they are written, rounded to nearest even;
            gradients are converted back in the same way. None: that of weight.
        padding_idx: an id whose row gets no gradient, as torch.nn.Embedding's; -1 is the last, not
            with vocab_range, where it is an id of the whole vocabulary.
        weight_grad: where dweight goes.
            "dense": [V, h], the only one under torch.compile.
            "sparse": a torch.sparse_coo_tensor without a row twice, for torch.optim.SparseAdam,
            SGD and the like (coalesced, which torch forgets as it becomes weight.grad).
            "main_grad": it is added to weight.main_grad, a contiguous float32 [V, h] such as
            megatron-core's DistributedDataParallel gives a parameter, and autograd gets an empty
            sparse tensor: hooks that Megatron has on the parameter fire as ever and add nothing,
            also where an output layer with tied weights has added its gradient. Under
            torch.compile as "dense".
        allow_unused: visual may have rows that no position names, such as a tower's padding or rows
            of other ranks. With shard or contribute it always may. Without, they are an error on
            the CPU; CUDA would have to be waited for: there give `visual_index` its `counts`.

    Returns:
        [S, h], or [S / size, h] with `shard`.

    Gradients: dweight is in the dtype of weight, each row summed in float32 in the order of the
    positions, so it has one value, on every instruction set and every GPU. dvisual is [n, h], zeros
    where no position of the shard names the row. A frozen weight or visual costs nothing.

    Raises:
        ValueError: a wrong argument; on the CPU an id or index out of range (CUDA: see the head of
            this file), or more visual rows than positions; in backward, a visual row that stands at
            two positions.
        TypeError: something else than a tensor.
    """
    check_tensor("weight", weight, dtypes=DTYPES, shape="[V, h]", dim=2)
    if not weight.is_contiguous():
        raise ValueError("weight is not contiguous; pass weight.contiguous()")
    device = weight.device
    check_tensor("input_ids", input_ids, dtypes=[torch.int64], shape="[S]", dim=1, device=device)
    check_index(visual_index, device)
    if input_ids.shape != visual_index.shape:
        raise ValueError(
            f"input_ids has {input_ids.shape[0]} positions and visual_index "
            f"{visual_index.shape[0]}; they must have the same number"
        )
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; it must be float32, bfloat16 or float16")
    if visual is not None:
        check_visual(visual, weight, "weight", any_dtype=dtype is not None)
    start = 0
    if vocab_range is not None:
        start, end = check_pair("vocab_range", vocab_range)
        if start < 0 or end - start != weight.shape[0]:
            raise ValueError(
                f"vocab_range is {(start, end)}; it must hold as many ids as weight has rows, "
                f"{weight.shape[0]}"
            )
    first, rows = shard_rows(shard, input_ids.shape[0])
    ids, index = input_ids, visual_index
    if contribute is not None:
        if vocab_range is None or visual is None:
            raise ValueError("contribute is given; it needs vocab_range and visual too")
        begin, count = shard_rows(contribute, input_ids.shape[0], "contribute")
        position = torch.arange(input_ids.shape[0], device=device)
        others = (visual_index >= 0) & ((position < begin) | (position >= begin + count))
        # A text id that no rank holds: a row of zeros, and no gradient.
        ids, index = ids.masked_fill(others, -1), index.masked_fill(others, -1)
    padding = -1 if padding_idx is None else _padding_id(padding_idx, weight, vocab_range)
    parts = shard is not None or contribute is not None
    inputs = (
        ids,
        weight,
        visual,
        index,
        start,
        vocab_range is not None,
        first,
        rows,
        padding,
        weight.dtype if dtype is None else dtype,
        allow_unused or parts,
    )
    main_grad = _main_grad(weight, weight_grad)
    if main_grad is None and weight_grad != "sparse" and contribute is None:
        return _embedding(*inputs)
    return _embedding_elsewhere(weight_grad, main_grad, visual_index, *inputs)


def scatter_visual(
    embeddings: Tensor,
    visual: Tensor,
    visual_index: Tensor,
    *,
    shard: tuple[int, int] | None = None,
    allow_unused: bool = False,
) -> Tensor:
    """A copy of `embeddings` whose visual rows are replaced, for a trainer that has embeddings.

    Args:
        embeddings: [S, h], or this rank's [S / size, h] with `shard`; float32, bfloat16, float16.
        visual: [n, h], dtype of embeddings.
        visual_index: int32 [S], of the whole sequence, from `visual_index`.
        shard: (rank, size): embeddings holds rows [rank * S / size, (rank + 1) * S / size).
        allow_unused: as `visual_embedding`.

    Returns:
        Like embeddings. Gradients: of embeddings, zero at visual rows; of visual, [n, h], zero for
        rows that no position of the shard names.

    Raises:
        ValueError, TypeError: as `visual_embedding`.
    """
    first = _check_scatter(embeddings, visual, visual_index, shard)
    return _scatter(embeddings, visual, visual_index, first, allow_unused or shard is not None)


def scatter_visual_(
    embeddings: Tensor,
    visual: Tensor,
    visual_index: Tensor,
    *,
    shard: tuple[int, int] | None = None,
    allow_unused: bool = False,
) -> Tensor:
    """`scatter_visual` into `embeddings` itself: only visual rows are read and written.

    Args, gradients: as `scatter_visual`; embeddings must be contiguous and no leaf that requires a
    gradient. Where the backward pass of what made it needs its values, torch says so in backward,
    as after every operation in place; that of an embedding layer doesn't.

    Returns:
        embeddings.

    Raises:
        ValueError, TypeError: as `scatter_visual`, or embeddings can't be written in place.
    """
    first = _check_scatter(embeddings, visual, visual_index, shard)
    check_in_place("embeddings", embeddings, "use scatter_visual", visual)
    allow_unused = allow_unused or shard is not None
    if torch.compiler.is_compiling():  # which traces no autograd.Function that writes its input
        return embeddings.copy_(_scatter(embeddings, visual, visual_index, first, allow_unused))
    visual = visual.resolve_neg()  # torch resolves no arguments of what returns nothing
    return _scatter_with_gradients(embeddings, visual, visual_index, first, allow_unused)
