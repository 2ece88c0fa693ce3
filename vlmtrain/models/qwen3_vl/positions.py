"""M-RoPE positions: each frame pair of a video is a medium of its own, between texts that say its
time (transformers' Qwen3VLModel.get_rope_index)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.common.positions import mrope_positions


def frame_positions(
    input_ids: Tensor,
    grids: Sequence[tuple[int, int, int]],
    kinds: Sequence[Literal["image", "video"]],
    spec: ModelSpec,
    seconds_per_grid: Sequence[float] | None = None,
) -> Tensor:
    """As `mrope_positions`. A video's seconds stand in the text and are not read."""
    if len(kinds) != len(grids):
        raise ValueError(f"kinds has {len(kinds)} entries but grids has {len(grids)}")
    frames = [
        ((1, h, w), kind)
        for (t, h, w), kind in zip(grids, kinds, strict=True)
        for _ in range(t)
    ]  # fmt: skip
    return mrope_positions(
        input_ids, [grid for grid, _ in frames], [kind for _, kind in frames], spec
    )
