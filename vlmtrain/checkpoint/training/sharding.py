"""What of a checkpoint's tensors this rank holds, cut into boxes.

A tensor of a checkpoint is a whole model's: all layers of a tower, all tensor-parallel ranks. A
rank holds parameters of it and, of their optimizer state, a range of each parameter's elements in
row-major order. Such a range is a few boxes of the whole tensor (part of a row, whole rows, part of
a row), and boxes are what the format stores and any layout can read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor

from vlmtrain.checkpoint.tensors import flat_boxes


@dataclass(frozen=True)
class Piece:
    """A box of a checkpoint's tensor, and the memory here that it comes from or goes to."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the box in it
    data: Tensor  # the box: as many dimensions as `shape`
    padded: bool  # dim 0 is padded with rows of zeros, on each layout another number


class ShardedLocation:
    """Where one tensor of this rank's model lies in a checkpoint."""

    def __init__(self, location: ShardedTensor | ShardedTensorFactory) -> None:
        self.data: Tensor = location.data
        parts = [location]
        if isinstance(location, ShardedTensorFactory):  # gate and up lie apart in the checkpoint
            parts = list(nested_values(location.build()))
        self._parts: list[tuple[int, ShardedTensor]] = []
        at = 0
        for part in parts:
            assert part.data.storage_offset() == self.data.storage_offset() + at, part.key
            self._parts.append((at, part))
            at += part.data.numel()
        assert at == self.data.numel(), location.key
        copy: Any = location.replica_id  # its number among pipeline, tensor and data-parallel ranks
        assert len(copy) == 3, (location.key, copy)
        self.is_duplicate = copy[:2] != (0, 0)  # of what another stage or tensor rank writes
        self.is_first = copy == (0, 0, 0)

    def keys(self) -> set[str]:
        return {part.key for _, part in self._parts}

    def pieces(self, flat: Tensor, start: int = 0, prefix: str = "") -> Iterator[Piece]:
        """The boxes that `flat`, elements `start` and on of this tensor, is made of.

        With `prefix` they are boxes of the optimizer's state of the same shape.
        """
        stop = start + flat.numel()
        for at, part in self._parts:
            low, high = max(start, at), min(stop, at + part.data.numel())
            shape = tuple(part.data.shape)
            lead = len(part.global_shape) - len(shape)  # the layer's dimension
            for box in flat_boxes(shape, low - at, high - at):
                sizes = [last - first for first, last in box]
                offsets = [
                    offset + first
                    for offset, (first, _) in zip(part.global_offset[lead:], box, strict=True)
                ]
                count = math.prod(sizes)
                yield Piece(
                    prefix + part.key,
                    tuple(part.global_shape),
                    (*part.global_offset[:lead], *offsets),
                    flat[low - start : low - start + count].view((1,) * lead + tuple(sizes)),
                    part.allow_shape_mismatch,
                )
                low += count


def locations(parts: list[Any]) -> dict[Tensor, ShardedLocation]:
    """Every tensor of a model's parts (`Engine.parts`) and where it lies in a checkpoint."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    table: dict[Tensor, ShardedLocation] = {}
    for part in parts:
        state = part.sharded_state_dict(metadata={"dp_cp_group": group})
        for value in nested_values(state):
            if isinstance(value, ShardedTensor | ShardedTensorFactory):
                table[value.data] = ShardedLocation(value)
    return table
