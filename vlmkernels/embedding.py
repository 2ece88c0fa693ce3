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

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._native import _C, DTYPES, check_tensor, cuda_stream, define, has_cuda_kernels

# ---- plain-torch references: the documented meaning ----------------------------------------------


def visual_embedding_reference(
    input_ids: Tensor,
    weight: Tensor,
    visual: Tensor | None,
    visual_index: Tensor,
    *,
    vocab_range: tuple[int, int] | None = None,
    shard: tuple[int, int] | None = None,
) -> Tensor:
    """`visual_embedding` in plain torch: whole sequence first, sliced last."""
    start, end = vocab_range or (0, weight.shape[0])
    text = visual_index < 0
    here = text & (input_ids >= start) & (input_ids < end) if vocab_range else text
    words = F.embedding((input_ids - start).where(here, 0), weight)
    whole = words.where(here[:, None], 0)
    if visual is not None:
        whole = scatter_visual_reference(whole, visual, visual_index)
    first, rows = _shard_rows(shard, input_ids.shape[0])
    return whole[first : first + rows]


def scatter_visual_reference(
    embeddings: Tensor,
    visual: Tensor,
    visual_index: Tensor,
    *,
    shard: tuple[int, int] | None = None,
) -> Tensor:
    """`scatter_visual` in plain torch."""
    first, rows = _shard_rows(shard, visual_index.shape[0])
    index = visual_index[first : first + rows].long()
    with_zero_row = torch.cat([visual, visual.new_zeros(1, visual.shape[1])])
    picked = with_zero_row[index.where(index >= 0, visual.shape[0])]
    return torch.where((index >= 0)[:, None], picked, embeddings)


# ---- launchers -----------------------------------------------------------------------------------


def _on_cpu(name: str, stream_of: Tensor, *args: Any) -> None:
    getattr(_C, name)(*args)


def _on_cuda(name: str, stream_of: Tensor, *args: Any) -> None:
    if not has_cuda_kernels():
        raise RuntimeError(
            "vlmkernels was built without CUDA kernels: rebuild it where nvcc is found "
            "(VLMKERNELS_CUDA=ON says what is missing)"
        )
    with torch.cuda.device(stream_of.device):
        getattr(_C, name + "_cuda")(*args, cuda_stream(stream_of))


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1] * tensor.element_size()


def _kernels(call: Callable[..., None]) -> dict[str, Callable]:
    """The four ops on one device; `call(native name, tensor, *args)` runs the native function."""

    def embedding(
        input_ids: Tensor,
        weight: Tensor,
        visual: Tensor | None,
        visual_index: Tensor,
        vocab_start: int,
        partial: bool,
        first: int,
        rows: int,
        padding_idx: int,
    ) -> Tensor:
        input_ids, visual_index = input_ids.contiguous(), visual_index.contiguous()
        weight = weight.contiguous()
        visual = None if visual is None else visual.contiguous()
        out = weight.new_empty(rows, weight.shape[1])
        call(
            "embedding_forward",
            weight,
            *(_pointer(t) for t in (input_ids, visual_index, weight, visual, out)),
            first,
            rows,
            _row_bytes(weight),
            vocab_start,
            weight.shape[0],
            -1 if visual is None else visual.shape[0],
            partial,
        )
        return out

    def scatter(
        embeddings: Tensor, visual: Tensor | None, visual_index: Tensor, first: int
    ) -> Tensor:
        embeddings, visual_index = embeddings.contiguous(), visual_index.contiguous()
        visual = None if visual is None else visual.contiguous()
        out = torch.empty_like(embeddings)
        call(
            "embedding_forward",
            embeddings,
            0,
            *(_pointer(t) for t in (visual_index, embeddings, visual, out)),
            first,
            embeddings.shape[0],
            _row_bytes(embeddings),
            0,
            0,
            -1 if visual is None else visual.shape[0],
            False,
        )
        return out

    def visual_grad(grad: Tensor, visual_index: Tensor, first: int, visual_rows: int) -> Tensor:
        grad, visual_index = grad.contiguous(), visual_index.contiguous()
        inverse = visual_index.new_full((visual_rows,), -1)
        out = grad.new_empty(visual_rows, grad.shape[1])
        call(
            "embedding_gather",
            grad,
            *(_pointer(t) for t in (visual_index, grad, inverse, out)),
            first,
            grad.shape[0],
            _row_bytes(grad),
            visual_rows,
        )
        return out

    def weight_grad(
        grad: Tensor,
        input_ids: Tensor,
        visual_index: Tensor,
        vocab_start: int,
        vocab_rows: int,
        first: int,
        padding_idx: int,
    ) -> Tensor:
        grad = grad.contiguous()
        here = slice(first, first + grad.shape[0])
        ids = input_ids[here]
        row = ids - vocab_start
        other = (visual_index[here] >= 0) | (row < 0) | (row >= vocab_rows)
        if padding_idx >= 0:
            other |= ids == padding_idx
        # Stable, so that the rows of one id are added in the order of their positions.
        keys, order = row.masked_fill(other, vocab_rows).sort(stable=True)
        out = grad.new_zeros(vocab_rows, grad.shape[1])
        call(
            "embedding_reduce",
            grad,
            *(_pointer(t) for t in (keys, order, grad, out)),
            keys.shape[0],
            grad.shape[1],
            vocab_rows,
            DTYPES[grad.dtype],
        )
        return out

    return {
        "embedding": embedding,
        "scatter": scatter,
        "visual_grad": visual_grad,
        "weight_grad": weight_grad,
    }


# ---- registration --------------------------------------------------------------------------------

_cpu, _cuda = _kernels(_on_cpu), _kernels(_on_cuda)

_visual_grad = define(
    "visual_embedding_visual_grad(Tensor grad, Tensor visual_index, SymInt first,"
    " SymInt visual_rows) -> Tensor",
    cpu=_cpu["visual_grad"],
    cuda=_cuda["visual_grad"],
    fake=lambda grad, visual_index, first, visual_rows: grad.new_empty(visual_rows, grad.shape[1]),
)

_weight_grad = define(
    "visual_embedding_weight_grad(Tensor grad, Tensor input_ids, Tensor visual_index,"
    " SymInt vocab_start, SymInt vocab_rows, SymInt first, SymInt padding_idx) -> Tensor",
    cpu=_cpu["weight_grad"],
    cuda=_cuda["weight_grad"],
    fake=lambda grad, input_ids, visual_index, vocab_start, vocab_rows, first, padding_idx: (
        grad.new_empty(vocab_rows, grad.shape[1])
    ),
)


def _embedding_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    input_ids, weight, visual, visual_index, vocab_start, _, first, _, padding_idx = inputs
    ctx.save_for_backward(input_ids, visual_index)
    ctx.vocab_rows, ctx.vocab_start, ctx.first = weight.shape[0], vocab_start, first
    ctx.visual_rows = 0 if visual is None else visual.shape[0]
    ctx.padding_idx = padding_idx


def _embedding_backward(ctx: Any, grad: Tensor) -> tuple:
    input_ids, visual_index = ctx.saved_tensors
    dweight = dvisual = None
    if ctx.needs_input_grad[1]:
        dweight = _weight_grad(
            grad,
            input_ids,
            visual_index,
            ctx.vocab_start,
            ctx.vocab_rows,
            ctx.first,
            ctx.padding_idx,
        )
    if ctx.needs_input_grad[2]:
        dvisual = _visual_grad(grad, visual_index, ctx.first, ctx.visual_rows)
    return None, dweight, dvisual, None, None, None, None, None, None


_embedding = define(
    "visual_embedding(Tensor input_ids, Tensor weight, Tensor? visual, Tensor visual_index,"
    " SymInt vocab_start, bool partial, SymInt first, SymInt rows, SymInt padding_idx) -> Tensor",
    cpu=_cpu["embedding"],
    cuda=_cuda["embedding"],
    fake=lambda input_ids, weight, visual, index, start, partial, first, rows, padding_idx: (
        weight.new_empty(rows, weight.shape[1])
    ),
    backward=_embedding_backward,
    setup_context=_embedding_setup,
)


def _scatter_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, visual, visual_index, first = inputs
    ctx.save_for_backward(visual_index)
    ctx.first, ctx.visual_rows = first, 0 if visual is None else visual.shape[0]


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple:
    (visual_index,) = ctx.saved_tensors
    dembeddings = dvisual = None
    if ctx.needs_input_grad[0]:
        dembeddings = _scatter(grad, None, visual_index, ctx.first)  # zeros at visual rows
    if ctx.needs_input_grad[1]:
        dvisual = _visual_grad(grad, visual_index, ctx.first, ctx.visual_rows)
    return dembeddings, dvisual, None, None


_scatter = define(
    "scatter_visual(Tensor embeddings, Tensor? visual, Tensor visual_index, SymInt first)"
    " -> Tensor",
    cpu=_cpu["scatter"],
    cuda=_cuda["scatter"],
    fake=lambda embeddings, visual, visual_index, first: torch.empty_like(
        embeddings, memory_format=torch.contiguous_format
    ),
    backward=_scatter_backward,
    setup_context=_scatter_setup,
)


# ---- argument checks -----------------------------------------------------------------------------


def _shard_rows(shard: tuple[int, int] | None, positions: int) -> tuple[int, int]:
    """First position and number of rows of a shard of `positions`."""
    if shard is None:
        return 0, positions
    rank, size = shard
    if not 0 <= rank < size:
        raise ValueError(f"shard is {(rank, size)}; it must be (rank, size) with 0 <= rank < size")
    if positions % size != 0:
        raise ValueError(
            f"visual_index has {positions} positions, which {size} shards cannot share equally: "
            f"pad the pack to a multiple of {size}"
        )
    return positions // size * rank, positions // size


def _check_index(visual_index: Tensor, device: torch.device) -> None:
    check_tensor(
        "visual_index", visual_index, dtypes=[torch.int32], shape="[S]", dim=1, device=device
    )


def _check_visual(visual: Tensor, like: Tensor, name: str) -> None:
    check_tensor("visual", visual, dtypes=[like.dtype], shape="[n, h]", dim=2, device=like.device)
    if visual.shape[1] != like.shape[1]:
        raise ValueError(
            f"visual has rows of {visual.shape[1]} elements; they must be as long as {name}'s, "
            f"{like.shape[1]}"
        )


# ---- public functions ----------------------------------------------------------------------------


def visual_embedding(
    input_ids: Tensor,
    weight: Tensor,
    visual: Tensor | None,
    visual_index: Tensor,
    *,
    vocab_range: tuple[int, int] | None = None,
    shard: tuple[int, int] | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """Embedding of a pack whose placeholders are replaced by visual rows, in one pass.

    Args:
        input_ids: int64 [S]. Ids at visual positions are ignored.
        weight: [V, h], float32, bfloat16 or float16, contiguous.
        visual: [n, h], dtype of weight; None: rows with visual_index >= 0 become zeros (another
            rank adds them).
        visual_index: int32 [S], from `visual_index`.
        vocab_range: (start, end) of this rank's rows of a vocabulary-parallel table, end - start
            == V. Ids outside give zero rows, to be summed over the ranks.
        shard: (rank, size): only rows [rank * S / size, (rank + 1) * S / size) are made. size must
            divide S.
        padding_idx: an id whose row gets no gradient, as torch.nn.Embedding's.

    Returns:
        [S, h], or [S / size, h] with `shard`, dtype of weight.

    Gradients: dweight is dense [V, h] in the dtype of weight, each row summed in float32 in the
    order of the positions, so it has one value, on every instruction set and every GPU. dvisual is
    [n, h], zeros where no position of the shard names the row. A frozen weight or visual costs
    nothing.

    Raises:
        ValueError: a wrong argument; on the CPU an id or index out of range (CUDA: see the head of
            this file); in backward, a visual row that stands at two positions.
    """
    check_tensor("weight", weight, dtypes=DTYPES, shape="[V, h]", dim=2)
    if not weight.is_contiguous():
        raise ValueError("weight is not contiguous; pass weight.contiguous()")
    device = weight.device
    check_tensor("input_ids", input_ids, dtypes=[torch.int64], shape="[S]", dim=1, device=device)
    _check_index(visual_index, device)
    if input_ids.shape != visual_index.shape:
        raise ValueError(
            f"input_ids has {input_ids.shape[0]} positions and visual_index "
            f"{visual_index.shape[0]}; they must have the same number"
        )
    if visual is not None:
        _check_visual(visual, weight, "weight")
    start = 0
    if vocab_range is not None:
        start, end = vocab_range
        if start < 0 or end - start != weight.shape[0]:
            raise ValueError(
                f"vocab_range is {(start, end)}; it must hold as many ids as weight has rows, "
                f"{weight.shape[0]}"
            )
    first, rows = _shard_rows(shard, input_ids.shape[0])
    padding = -1 if padding_idx is None else padding_idx
    return _embedding(
        input_ids,
        weight,
        visual,
        visual_index,
        start,
        vocab_range is not None,
        first,
        rows,
        padding,
    )


def scatter_visual(
    embeddings: Tensor,
    visual: Tensor,
    visual_index: Tensor,
    *,
    shard: tuple[int, int] | None = None,
) -> Tensor:
    """A copy of `embeddings` whose visual rows are replaced, for a trainer that has embeddings.

    Args:
        embeddings: [S, h], or this rank's [S / size, h] with `shard`; float32, bfloat16, float16.
        visual: [n, h], dtype of embeddings.
        visual_index: int32 [S], of the whole sequence, from `visual_index`.
        shard: (rank, size): embeddings holds rows [rank * S / size, (rank + 1) * S / size).

    Returns:
        Like embeddings. Gradients: of embeddings, zero at visual rows; of visual, [n, h], zero for
        rows that no position of the shard names.

    Raises:
        ValueError: as `visual_embedding`.
    """
    check_tensor("embeddings", embeddings, dtypes=DTYPES, shape="[S, h]", dim=2)
    _check_index(visual_index, embeddings.device)
    _check_visual(visual, embeddings, "embeddings")
    first, rows = _shard_rows(shard, visual_index.shape[0])
    if embeddings.shape[0] != rows:
        raise ValueError(
            f"embeddings has {embeddings.shape[0]} rows, but visual_index "
            f"{visual_index.shape[0]} positions"
            + (f", {rows} for each of {shard[1]} shards" if shard else "")
        )
    return _scatter(embeddings, visual, visual_index, first)
