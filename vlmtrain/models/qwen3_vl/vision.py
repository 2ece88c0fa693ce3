"""The tower's table of learned positions, stretched over each image.

P = patches, D = tower width, side = patches along a side of the table. Reference: transformers'
Qwen3VLVisionModel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmkernels._native import to_device
from vlmtrain.models.common.layers import init_device, touch
from vlmtrain.models.common.vision import VisionInputs, VisionTower


class Qwen3VLTower(VisionTower):
    def make_embeddings(self) -> None:
        super().make_embeddings()
        self.pos_embed = torch.nn.Embedding(
            self.spec.position_side**2,
            self.spec.hidden_size,
            dtype=self.config.params_dtype,
            device=init_device(self.config),
        )

    def embed_patches(self, pixels: Tensor, inputs: VisionInputs) -> Tensor:
        x = super().embed_patches(pixels, inputs)
        corners, weights = interpolation(
            inputs.grids, self.spec.position_side, self.spec.spatial_merge_size
        )
        corners = self.own_rows(F.pad(corners, (0, 0, 0, inputs.padded_patches)))
        weights = self.own_rows(F.pad(weights, (0, 0, 0, inputs.padded_patches)))
        touch(self.pos_embed)
        positions = F.embedding_bag(
            to_device(corners, x.device),
            self.pos_embed.weight.float(),
            mode="sum",
            per_sample_weights=to_device(weights, x.device),
        )
        return x + positions.to(x.dtype).unsqueeze(1)


def interpolation(
    grids: Sequence[Sequence[int]], side: int, merge_size: int
) -> tuple[Tensor, Tensor]:
    """Where a table of side x side positions, stretched over each frame corner to corner, is read
    for each patch: int64 [P, 4] entries and float32 [P, 4] weights (bilinear).

    Patches stand unit by unit, merge_size x merge_size in each, as the processor lays them out.
    """
    entries: list[Tensor] = []
    weights: list[Tensor] = []
    for frames, height, width in grids:
        (top, row_weights), (left, column_weights) = _axis(height, side), _axis(width, side)
        # [rows, columns, 2 x 2 corners]
        entry = (top[:, None, :, None] * side + left[None, :, None, :]).flatten(2)
        weight = (row_weights[:, None, :, None] * column_weights[None, :, None, :]).flatten(2)
        for table, out in ((entry, entries), (weight, weights)):
            units = table.unflatten(1, (-1, merge_size)).unflatten(0, (-1, merge_size))
            out.append(units.transpose(1, 2).reshape(-1, 4).repeat(frames, 1))
    if not entries:
        return torch.empty(0, 4, dtype=torch.int64), torch.empty(0, 4)
    return torch.cat(entries), torch.cat(weights)


def _axis(length: int, side: int) -> tuple[Tensor, Tensor]:
    """The two places of a table's side that each of `length` patches lies between, and their
    weights, [length, 2] each."""
    # In float32 and in this order, so that weights are those of transformers to the bit.
    place = torch.arange(length, dtype=torch.float32) * (side - 1) / max(length - 1, 1)
    below, two = place.floor(), torch.arange(2)
    weights = 1 - ((place - below)[:, None] - two).abs()
    return (below.long()[:, None] + two).clamp_max(side - 1), weights
