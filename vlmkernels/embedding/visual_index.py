"""Which visual row stands at which position.

S = positions of the pack, n = visual rows, k = samples of the pack.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral, Number
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vlmkernels._native import check_pair, check_tensor

#: Rows of one stream: their number, or numbers to be summed (rows of each image).
Count: TypeAlias = "int | Sequence[int] | Tensor"


def shard_rows(
    shard: tuple[int, int] | None, positions: int, name: str = "shard"
) -> tuple[int, int]:
    """First position and number of positions of part `shard` = (rank, size) of a sequence.

    Raises:
        ValueError: no such part, or size does not divide the positions.
    """
    if shard is None:
        return 0, positions
    rank, size = check_pair(name, shard)
    if not 0 <= rank < size:
        raise ValueError(f"{name} is {(rank, size)}; it must be (rank, size) with 0 <= rank < size")
    if positions % size != 0:
        raise ValueError(
            f"visual_index has {positions} positions, which {size} shards cannot share equally: "
            f"pad the pack to a multiple of {size}"
        )
    return positions // size * rank, positions // size


def check_index(visual_index: Tensor, device: torch.device | None = None) -> None:
    check_tensor(
        "visual_index", visual_index, dtypes=[torch.int32], shape="[S]", dim=1, device=device
    )


def check_rows(name: str, rows: int, positions: int, shard: tuple[int, int] | None) -> int:
    """The first position of the shard, whose number of positions must be `rows`."""
    first, wanted = shard_rows(shard, positions)
    if rows != wanted:
        raise ValueError(
            f"{name} has {rows} rows, but visual_index {positions} positions"
            + (f", {wanted} for each of {shard[1]} shards" if shard else "")
        )
    return first


def visual_index_reference(
    input_ids: Tensor, token_ids: int | Sequence[int], *, separate: bool = False
) -> Tensor:
    """What `visual_index` returns, position by position."""
    ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
    groups = [[token] for token in ids] if separate else [ids]
    rows, row = [-1] * len(input_ids), 0
    for wanted in groups:
        for position, token in enumerate(input_ids.tolist()):
            if token in wanted:
                rows[position], row = row, row + 1
    return torch.tensor(rows, dtype=torch.int32, device=input_ids.device)


def visual_index(
    input_ids: Tensor,
    token_ids: int | Sequence[int],
    counts: Count | Sequence[Count] | None = None,
    *,
    separate: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Tensor:
    """The row of the merged visual features that stands at each position.

    Args:
        input_ids: int64 [S].
        token_ids: the placeholder's id, or the ids of several (image and video).
        counts: how many visual rows there are, to be compared with the placeholders found (which
            on CUDA waits for the device): a number, or a sequence that is summed (rows per image).
            With `separate`, one of these per id; with `cu_seqlens`, one of these per sample.
        separate: False: the features of all ids form one stream in sequence order. True: each id
            has a stream of its own, and the features are these streams one after another, as
            transformers keeps images and videos.
        cu_seqlens: [k + 1], offsets of the samples in input_ids. With `counts` each sample is
            compared by itself, so that the error can name it. Not together with `separate`.
        names: [k], what to call the samples in the error; else their numbers.

    Returns:
        int32 [S]: rows 0, 1, 2, ... at the placeholders in order, -1 elsewhere.

    Raises:
        TypeError: input_ids is no tensor.
        ValueError: an argument of another kind; or the placeholders are not `counts` in number:
            the message gives both numbers and, where known, the sample.
    """
    check_tensor("input_ids", input_ids, dtypes=[torch.int64], shape="[S]", dim=1)
    try:
        listed: Any = [token_ids] if isinstance(token_ids, Integral) else token_ids
        ids = [operator.index(token) for token in listed]
    except TypeError:
        raise ValueError(f"token_ids is {token_ids!r}; it must be an id or several") from None
    if not ids:
        raise ValueError("token_ids is empty; it must name at least one placeholder id")
    if separate and len(set(ids)) < len(ids):
        raise ValueError(f"token_ids {ids} has an id twice; with separate=True each has one stream")
    if separate and cu_seqlens is not None:
        raise ValueError("cu_seqlens is given with separate=True; give one of the two")
    if separate:
        if counts is not None and _entries(counts) != len(ids):
            raise ValueError(
                f"counts is {counts}; with separate=True it must hold one entry for each of "
                f"token_ids {ids}"
            )
        masks = [input_ids == token for token in ids]
        for i, mask in enumerate(masks if counts is not None else []):
            _check_count(int(mask.sum()), _total(counts[i]), [ids[i]], "")  # type: ignore[index]
        index, before = input_ids.new_full(input_ids.shape, -1, dtype=torch.int32), 0
        for mask in masks:
            running = mask.cumsum(0, dtype=torch.int32)
            index = torch.where(mask, running - 1 + before, index)
            before = before + running[-1] if len(running) else 0
        return index
    placeholder = input_ids == ids[0]
    for token in ids[1:]:
        placeholder = placeholder | (input_ids == token)
    running = placeholder.cumsum(0, dtype=torch.int32)
    if counts is not None and cu_seqlens is not None:
        _check_samples(running, counts, cu_seqlens, ids, names)
    elif counts is not None:
        _check_count(int(running[-1]) if len(running) else 0, _total(counts), ids, "")
    return torch.where(placeholder, running - 1, -1)


def _entries(counts: Any) -> int:
    """How many entries a sequence or tensor has; of a number -1."""
    return -1 if getattr(counts, "shape", None) == () or isinstance(counts, Number) else len(counts)


def _total(count: Any) -> int:
    if isinstance(count, Integral):
        return int(count)
    numbers = isinstance(count, Tensor) and not count.dtype.is_floating_point
    if numbers and not count.dtype.is_complex:
        return int(count.sum())
    one = isinstance(count, (str, bytes, Tensor)) or getattr(count, "shape", None) == ()
    if one or not hasattr(count, "__iter__"):
        raise ValueError(f"counts holds {count!r}; it must hold whole numbers, or tensors of them")
    return sum(_total(part) for part in count)


def _check_count(have: int, wanted: int, ids: list[int], where: str) -> None:
    if have != wanted:
        raise ValueError(
            f"{where or 'input_ids'} holds {have} placeholders of token_ids {ids}, but counts says "
            f"that there are {wanted} visual rows"
        )


def _check_samples(
    running: Tensor,
    counts: Any,
    cu_seqlens: Tensor | Sequence[int],
    ids: list[int],
    names: Sequence[str] | None,
) -> None:
    try:
        offsets = [operator.index(offset) for offset in cu_seqlens]
    except TypeError:
        raise ValueError(f"cu_seqlens is {cu_seqlens}; it must hold whole numbers") from None
    if offsets[:1] != [0] or offsets[-1] != len(running) or offsets != sorted(offsets):
        raise ValueError(
            f"cu_seqlens is {offsets}; it must rise from 0 to the {len(running)} positions of "
            "input_ids"
        )
    samples = len(offsets) - 1
    if _entries(counts) != samples:
        raise ValueError(
            f"counts is {counts}; with cu_seqlens it must hold one entry for each of its "
            f"{samples} samples"
        )
    if names is not None and len(names) != samples:
        raise ValueError(f"names is {names}; it must hold one for each of {samples} samples")
    up_to = [0, *running.tolist()]
    for i, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        where = f"sample {names[i] if names is not None else i} of input_ids"
        _check_count(up_to[end] - up_to[begin], _total(counts[i]), ids, where)
