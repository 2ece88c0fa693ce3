"""Tensor-parallel ranks of a vision tower need the same pixels; each decodes a part of them.

Decoding on every rank of the group would do the same work `tensor` times on one machine's CPUs.
Instead each rank's loader decodes the media that `StepInputs.owners` gives it, and the rows are
gathered over the group once a step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from vlmtrain.core.batch import PackedBatch
from vlmtrain.parallel.step_inputs import StepInputs


class SharedPixels:
    """Decoding shared by the ranks of a tensor-parallel `group`, which get the same packs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)

    def gather(self, inputs: StepInputs, packs: list[PackedBatch]) -> list[PackedBatch]:
        """The packs of a step, each with all of its pixels, on every rank. Collective.

        Packs whose loader decoded all their media on every rank pass through.
        """
        if all(pack.has_pixels is None for pack in packs):
            return packs
        patches: list[list[int]] = [[] for _ in range(self.size)]  # of each rank's media
        for owners, counts in zip(inputs.owners, inputs.patches, strict=True):
            for rank, count in zip(owners, counts, strict=True):
                patches[rank].append(count)
        local = torch.cat([pack.pixel_values for pack in packs])
        gathered = self._all_gather(local, [sum(counts) for counts in patches])
        media = [
            iter(rows[: sum(counts)].split(counts))
            for rows, counts in zip(gathered, patches, strict=True)
        ]
        return [
            replace(
                pack,
                pixel_values=torch.cat([local[:0], *(next(media[rank]) for rank in owners)]),
                has_pixels=None,
            )
            for pack, owners in zip(packs, inputs.owners, strict=True)
        ]

    def _all_gather(self, local: Tensor, rows: list[int]) -> list[Tensor]:
        """The rows of each rank. Collectives want equal sizes: padded to the largest, which the
        deal keeps near the others. As bytes, because gloo does not know every type."""
        largest, width = max(rows), local.shape[1] * local.element_size()
        padded = local.new_zeros(largest, local.shape[1])
        padded[: len(local)] = local
        out = torch.empty(self.size * largest, width, dtype=torch.uint8, device=local.device)
        dist.all_gather_into_tensor(out, padded.view(torch.uint8), group=self.group)
        return list(out.view(local.dtype).split(largest)) if largest else [local] * self.size
