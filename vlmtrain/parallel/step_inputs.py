"""What one step asks of the ranks of a model replica, worked out from its packs alone.

All ranks of a replica (tensor x pipeline) have the same packs, and know their lengths and the grids
of their media on the host. So every rank works out the same answers, asks no other and waits for no
device: which rank decodes and encodes an image, and how large each message between stages is.
The loader, the exchange of pixels or of rows and the pipeline all read them here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vlmtrain.core.batch import PackedBatch
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models import message
from vlmtrain.models.common.vision import padded_groups
from vlmtrain.models.flops import Work, prices
from vlmtrain.models.message import Shape


@dataclass(frozen=True)
class StepInputs:
    """The lengths and media of a step's packs, and what follows from them."""

    spec: ModelSpec
    layout: Layout
    grids: Sequence[np.ndarray]  # of each pack int64 [m, 3]: t, h, w of its media, in patches
    lengths: Sequence[int] = ()  # of each pack, in tokens; `message` reads them
    rows: Sequence[Sequence[int]] = ()  # of each pack, visual rows in each part of the sequence

    @classmethod
    def of(cls, spec: ModelSpec, layout: Layout, packs: Sequence[PackedBatch]) -> StepInputs:
        grids, lengths = [p.grid_thw.numpy() for p in packs], [p.length for p in packs]
        parts = layout.sequence_parts
        rows = [[p.visual_rows(part, parts)[1] for part in range(parts)] for p in packs]
        return cls(spec, layout, grids, lengths, rows)

    @cached_property
    def patches(self) -> list[list[int]]:
        """Of each pack's media."""
        return [grid.prod(1).tolist() for grid in self.grids]

    @cached_property
    def owners(self) -> list[list[int]]:
        """For each pack, which rank decodes each of its media.

        A rank of the tensor-parallel group, on the first pipeline stage; with multiplexed vision a
        rank of the model-parallel group, which encodes the medium too.
        """
        layout = self.layout
        if layout.multiplexed:
            ranks = layout.tensor * layout.pipeline
            costs = media_flops(self.spec, self.grids)
        else:
            ranks = layout.tensor
            costs = [count for patches in self.patches for count in patches]
        owner = iter(owners_of(costs, ranks))
        return [[next(owner) for _ in grid] for grid in self.grids]

    def decoded_by(self, rank: int | None) -> list[tuple[bool, ...]]:
        """For each pack, which of its media a rank (as in `owners`; None: no rank) decodes."""
        return [tuple(owner == rank for owner in owners) for owners in self.owners]

    def row_owners(self) -> list[Tensor]:
        """For each pack, which rank decodes each of its visual rows, int64 [n]."""
        unit = self.spec.vision.merge_unit
        return [
            torch.tensor(owners, dtype=torch.int64).repeat_interleave(torch.tensor(counts) // unit)
            if counts
            else torch.empty(0, dtype=torch.int64)
            for owners, counts in zip(self.owners, self.patches, strict=True)
        ]

    def message(self, stage: int, pack: int, tensor_rank: int = 0) -> Shape:
        """Shape of what `stage` sends to the next one, and gets a gradient of, for a pack; without
        DeepStack's features where `rows` are not known."""
        unit, shards = self.spec.vision.merge_unit, self.layout.sequence_parts
        sizes = message.parts(
            self.spec,
            self.layout,
            stage,
            tokens=self.lengths[pack] // shards,
            patches=padded_groups(sum(self.patches[pack]) // unit, shards) * unit // shards,
            rows=self.rows[pack][tensor_rank % shards] if self.rows else 0,
        )
        return message.shape(sizes)


def media_flops(spec: ModelSpec, grids: Sequence[np.ndarray]) -> list[int]:
    """Forward FLOPs of the tower and the merger for each image and video of the packs."""
    parts = prices(spec)
    price = parts["patch_embed"].total + parts["vision"].total + parts["merger"].total
    media = (medium for pack in grids for medium in pack)
    return [price @ Work.of((), [medium], spec.vision, targets=0) for medium in media]


def owners_of(costs: Sequence[int], ranks: int) -> list[int]:
    """Owner of each item: longest processing time first, ties by order. Deterministic.

    The slowest rank is at most 4/3 of the best possible (Graham 1969).
    """
    heap = [(0, rank) for rank in range(ranks)]
    owner = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(heap)
        owner[item] = rank
        heapq.heappush(heap, (load + costs[item], rank))
    return owner
