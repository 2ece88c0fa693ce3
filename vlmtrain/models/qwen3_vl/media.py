"""Images and videos of Qwen3-VL: a video is one span of tokens a frame pair, with its time in text.

Reference: transformers' Qwen3VLProcessor, Qwen3VLVideoProcessor and Qwen3VLModel.get_rope_index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vlmtrain.core.spec import MediaKind, ModelSpec
from vlmtrain.models.common.family import Family, MediaDefaults

if TYPE_CHECKING:
    from torch import Tensor


class TimedVideos(Family):
    """A family that reads media as Qwen3-VL does."""

    media = MediaDefaults(
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        image_pixels=(64 * 32 * 32, 16384 * 32 * 32),
        video_pixels=(4 * 32 * 32, 24576 * 32 * 32),
        timed_videos=True,
    )
    system_prompt = False

    def video_placeholders(self, times: Sequence[float]) -> str:
        # The template's own <|vision_start|> and <|vision_end|> stay around them all, as in
        # transformers 5.10 and later.
        return "".join(
            f"<{time:.1f} seconds><|vision_start|><|video_pad|><|vision_end|>" for time in times
        )

    def positions(
        self,
        input_ids: Tensor,
        grids: Sequence[tuple[int, int, int]],
        kinds: Sequence[MediaKind],
        spec: ModelSpec,
        seconds_per_grid: Sequence[float] | None = None,
    ) -> Tensor:
        """Each slice of a video counts as an image of its own; its seconds stand in the text."""
        pairs = list(zip(grids, kinds, strict=True))
        slices = [((1, h, w), kind) for (t, h, w), kind in pairs for _ in range(t)]
        return super().positions(
            input_ids, [grid for grid, _ in slices], [kind for _, kind in slices], spec
        )
