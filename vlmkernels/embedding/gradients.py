"""The ops for gradients of visual_embedding and scatter_visual: rows gathered, rows summed by id.

R = rows of the shard, V = rows of the table held here, n = visual rows, h = hidden size, m =
positions whose id is one of the table's, u = different ids among them.

dvisual: each visual row stands at one position at most, so it is a gather, without atomics.
dweight: the positions are sorted by id, stably, and each id's rows are added one after another in
float32, so it has one value whatever the number of threads or the instruction set. Where it goes:

    dense       [V, h], rows without a position are zeros         V h + m h elements of traffic
    sparse      torch.sparse_coo_tensor of u rows                 2 m h at most
    into        added to a float32 [V, h] that exists already     m h, and 8 bytes by u h
    (frozen)    nothing is done
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlmkernels import _native
from vlmkernels._native import DTYPES, check_tensor, define, describe, launch, pointer
from vlmkernels.embedding.visual_index import check_index

#: Devices whose reduction writes the rows without a position as well.
CLEARS_ROWS = ("cpu",)

# ---- launchers -----------------------------------------------------------------------------------


def _visual_grad(
    grad: Tensor, visual_index: Tensor, first: int, visual_rows: int, dtype: torch.dtype
) -> Tensor:
    check_index(visual_index, grad.device)
    if not 0 <= first <= len(visual_index) - len(grad):
        raise ValueError(
            f"grad has {len(grad)} rows from position {first} on, but visual_index "
            f"{len(visual_index)} positions"
        )
    grad, visual_index = grad.contiguous(), visual_index.contiguous()
    inverse = visual_index.new_full((visual_rows,), -1)
    out = grad.new_empty(visual_rows, grad.shape[1], dtype=dtype)
    launch(
        "embedding_gather",
        grad,
        *map(pointer, (visual_index, grad, inverse, out)),
        first,
        *grad.shape,
        visual_rows,
        DTYPES[grad.dtype],
        DTYPES[dtype],
    )
    return out


def _sorted(
    grad: Tensor,
    input_ids: Tensor,
    visual_index: Tensor,
    vocab_start: int,
    vocab_rows: int,
    first: int,
    padding_idx: int,
) -> tuple[Tensor, Tensor]:
    """The rows of the table in ascending order, and their positions. On the CPU [m]; on CUDA [R],
    with rows of V behind them, for torch's sort."""
    rows = grad.shape[0]
    check_tensor(
        "input_ids", input_ids, dtypes=[torch.int64], shape="[S]", dim=1, device=grad.device
    )
    check_index(visual_index, grad.device)
    if not 0 <= first <= min(len(input_ids), len(visual_index)) - rows:
        raise ValueError(
            f"grad has {rows} rows from position {first} on, but input_ids {len(input_ids)} "
            f"positions and visual_index {len(visual_index)}"
        )
    if grad.is_cpu:
        input_ids, visual_index = input_ids.contiguous(), visual_index.contiguous()
        keys, order = input_ids.new_empty(rows), input_ids.new_empty(rows)
        count = _native._C.embedding_sort(
            *map(pointer, (input_ids, visual_index, keys, order)),
            first,
            rows,
            vocab_start,
            vocab_rows,
            padding_idx,
        )
        return keys[:count], order[:count]
    shard = slice(first, first + rows)
    ids = input_ids[shard]
    row = ids - vocab_start
    other = (visual_index[shard] >= 0) | (row < 0) | (row >= vocab_rows)
    if padding_idx >= 0:
        other |= ids == padding_idx
    # Stable, so that the rows of one id are added in the order of their positions.
    return row.masked_fill(other, vocab_rows).sort(stable=True)


def _reduce(keys: Tensor, order: Tensor, grad: Tensor, out: Tensor, accumulate: bool) -> None:
    launch(
        "embedding_reduce",
        grad,
        *map(pointer, (keys, order, grad, out)),
        keys.shape[0],
        grad.shape[1],
        out.shape[0],
        DTYPES[grad.dtype],
        DTYPES[out.dtype],
        accumulate,
    )


def _weight_grad(
    grad: Tensor,
    input_ids: Tensor,
    visual_index: Tensor,
    vocab_start: int,
    vocab_rows: int,
    first: int,
    padding_idx: int,
    dtype: torch.dtype,
) -> Tensor:
    grad = grad.contiguous()
    sizes = (vocab_start, vocab_rows, first, padding_idx)
    keys, order = _sorted(grad, input_ids, visual_index, *sizes)
    new = torch.empty if grad.device.type in CLEARS_ROWS else torch.zeros
    out = new(vocab_rows, grad.shape[1], dtype=dtype, device=grad.device)
    _reduce(keys, order, grad, out, False)
    return out


def _weight_grad_sparse(
    grad: Tensor, input_ids: Tensor, visual_index: Tensor, *sizes_and_dtype: Any
) -> tuple[Tensor, Tensor]:
    """As above; the rows of the table and their sums."""
    grad, (*sizes, dtype) = grad.contiguous(), sizes_and_dtype
    keys, order = _sorted(grad, input_ids, visual_index, *sizes)
    rows, number = torch.unique_consecutive(keys[keys < sizes[1]], return_inverse=True)
    values = grad.new_zeros(len(rows), grad.shape[1], dtype=dtype)
    _reduce(number, order, grad, values, False)
    return rows, values


def _weight_grad_into(
    main_grad: Tensor,
    grad: Tensor,
    input_ids: Tensor,
    visual_index: Tensor,
    vocab_start: int,
    first: int,
    padding_idx: int,
) -> None:
    check_tensor(
        "main_grad", main_grad, dtypes=[torch.float32], shape="[V, h]", dim=2, device=grad.device
    )
    if main_grad.shape[1] != grad.shape[1] or not main_grad.is_contiguous():
        raise ValueError(
            f"main_grad is {describe(main_grad)} with strides {main_grad.stride()}; a gradient "
            f"{list(grad.shape)} needs contiguous rows of as many elements"
        )
    grad = grad.contiguous()
    sizes = (vocab_start, main_grad.shape[0], first, padding_idx)
    keys, order = _sorted(grad, input_ids, visual_index, *sizes)
    _reduce(keys, order, grad, main_grad, True)


# ---- registration --------------------------------------------------------------------------------


def _sparse_fake(grad: Tensor, input_ids: Tensor, *sizes_and_dtype: Any) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return input_ids.new_empty(rows), grad.new_empty(rows, grad.shape[1], dtype=sizes_and_dtype[-1])


visual_grad = define(
    "visual_embedding_visual_grad(Tensor grad, Tensor visual_index, SymInt first,"
    " SymInt visual_rows, ScalarType dtype) -> Tensor",
    _visual_grad,
    fake=lambda grad, index, first, rows, dtype: grad.new_empty(rows, grad.shape[1], dtype=dtype),
)
weight_grad = define(
    "visual_embedding_weight_grad(Tensor grad, Tensor input_ids, Tensor visual_index,"
    " SymInt vocab_start, SymInt vocab_rows, SymInt first, SymInt padding_idx, ScalarType dtype)"
    " -> Tensor",
    _weight_grad,
    fake=lambda grad, ids, index, start, rows, first, padding_idx, dtype: grad.new_empty(
        rows, grad.shape[1], dtype=dtype
    ),
)
weight_grad_sparse = define(
    "visual_embedding_weight_grad_sparse(Tensor grad, Tensor input_ids, Tensor visual_index,"
    " SymInt vocab_start, SymInt vocab_rows, SymInt first, SymInt padding_idx, ScalarType dtype)"
    " -> (Tensor, Tensor)",
    _weight_grad_sparse,
    fake=_sparse_fake,
)
weight_grad_into = define(
    "visual_embedding_weight_grad_into(Tensor(a!) main_grad, Tensor grad, Tensor input_ids,"
    " Tensor visual_index, SymInt vocab_start, SymInt first, SymInt padding_idx) -> ()",
    _weight_grad_into,
    fake=lambda *_: None,
)
