"""Tensor-parallel ranks of a vision tower need the same pixels; each decodes a part of them.

Decoding on every rank of the group would do the same work `tensor` times on one machine's CPUs.
Instead the media of a step are dealt to the group by patches, largest first, each rank's loader
decodes its own, and the rows are gathered over the group once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vlmtrain.core.batch import PackedBatch
from vlmtrain.parallel.multiplex import deal


def deal_pixels(grids: Sequence[np.ndarray], ranks: int) -> list[list[int]]:
    """Which rank decodes each medium of each pack, from int64 [m, 3] of each pack."""
    owner = iter(deal(np.concatenate(grids).prod(1).tolist(), ranks))
    return [[next(owner) for _ in pack] for pack in grids]


def grid_of(pack: PackedBatch) -> np.ndarray:
    """Its media's grids, which lie in host memory wherever the rest does."""
    return pack.grid_thw.numpy()


class SharedPixels:
    """Decoding shared by the ranks of `group`, which get the same packs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def share(self, grids: Sequence[np.ndarray]) -> list[tuple[bool, ...]]:
        """Which media of a step's packs this rank decodes: the loader's `pixel_share`."""
        return [tuple(o == self.rank for o in pack) for pack in deal_pixels(grids, self.size)]

    def gather(self, packs: list[PackedBatch]) -> list[PackedBatch]:
        """The packs of a step, each with all of its pixels, on every rank. Collective.

        Packs that a loader without `share` has made pass through.
        """
        if all(pack.has_pixels is None for pack in packs):
            return packs
        grids = [grid_of(pack) for pack in packs]
        owners = deal_pixels(grids, self.size)
        sizes = [grid.prod(1).tolist() for grid in grids]
        rows = [0] * self.size
        for owner, patches in zip(owners, sizes, strict=True):
            for rank, count in zip(owner, patches, strict=True):
                rows[rank] += count
        mine = torch.cat([pack.pixel_values for pack in packs])
        parts = self._all_gather(mine, rows)
        start = [0] * self.size
        whole = []
        for pack, owner, patches in zip(packs, owners, sizes, strict=True):
            taken = []
            for rank, count in zip(owner, patches, strict=True):
                taken.append(parts[rank][start[rank] : start[rank] + count])
                start[rank] += count
            pixels = torch.cat(taken) if taken else mine[:0]
            whole.append(replace(pack, pixel_values=pixels, has_pixels=None))
        return whole

    def _all_gather(self, mine: Tensor, rows: list[int]) -> list[Tensor]:
        """The rows of each rank. Collectives want equal sizes: padded to the largest, which the
        deal keeps near the others. As bytes, because gloo does not know every type."""
        largest, width = max(rows), mine.shape[1] * mine.element_size()
        padded = mine.new_zeros(largest, mine.shape[1])
        padded[: len(mine)] = mine
        out = torch.empty(self.size * largest, width, dtype=torch.uint8, device=mine.device)
        dist.all_gather_into_tensor(out, padded.view(torch.uint8), group=self.group)
        return list(out.view(mine.dtype).split(largest)) if largest else [mine] * self.size
