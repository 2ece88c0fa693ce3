"""Tensors in files: boxes of them read with plain reads, and checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vlmtrain.checkpoint.mapping import Box, Transform, WeightError
from vlmtrain.core.files import PIECE_BYTES

_FINITE_STEP = 1 << 24


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise WeightError where a tensor holds NaN or infinite values."""
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _FINITE_STEP):  # the mask of a whole table is large
        if not torch.isfinite(flat[start : start + _FINITE_STEP]).all():
            raise WeightError(f"{what} holds NaN or infinite values")


def read_box(
    file: Any,
    start: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    box: Box,
    rows: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Read a box of a row-major tensor that lies at byte `start` of an unbuffered file.

    Whole rows go straight into the result, `out` where it is given; where a row is cut, rows are
    read in pieces.

    Raises:
        WeightError: the file ends before the tensor does.
    """
    sizes = [stop - first for first, stop in box]
    length = max(rows, sizes[0]) if rows is not None else None
    if out is None:
        out = torch.empty([length, *sizes[1:]] if length is not None else sizes, dtype=dtype)
    if length is not None:
        out[sizes[0] :].zero_()
    if not shape:
        _read_into(file, start, out)
        return out
    inner = math.prod(shape[1:])
    stride = inner * out.element_size()
    first, stop = box[0]
    if tuple(sizes[1:]) == tuple(shape[1:]):
        _read_into(file, start + first * stride, out[: sizes[0]])
        return out
    step = max(1, PIECE_BYTES // max(1, stride))
    index = (slice(None), *(slice(*bounds) for bounds in box[1:]))
    for row in range(first, stop, step):
        count = min(step, stop - row)
        whole = torch.empty([count, *shape[1:]], dtype=dtype)
        _read_into(file, start + row * stride, whole)
        out[row - first : row - first + count] = whole[index]
    return out


def _read_into(file: Any, start: int, tensor: Tensor) -> None:
    view = memoryview(as_bytes(tensor))
    file.seek(start)
    while len(view):
        count = file.readinto(view[: 1 << 30])  # Linux reads at most 2 GiB at once
        if not count:
            raise WeightError(f"{file.name} is damaged or cut short; download or convert it again")
        view = view[count:]


def as_bytes(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor as a flat numpy array of bytes; not a copy."""
    return tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b""


def hf_shapes(transform: Transform, megatron: Sequence[int]) -> list[list[int]]:
    """Shapes of a row's Hugging Face tensors, from that of its whole Megatron tensor."""
    return [list(t.shape) for t in transform.to_hf(torch.empty(list(megatron), device="meta"))]


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Boxes that together are elements start..stop of a row-major tensor, in their order."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    inner = math.prod(shape[1:])

    def part_of_row(row: int, first: int, last: int) -> list[Box]:
        boxes = flat_boxes(shape[1:], first - row * inner, last - row * inner)
        return [((row, row + 1), *box) for box in boxes]

    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:
        return part_of_row(last, start, stop)
    head = part_of_row(first - 1, start, first * inner)
    whole: list[Box] = [((first, last), *((0, n) for n in shape[1:]))] if first < last else []
    return head + whole + part_of_row(last, last * inner, stop)
