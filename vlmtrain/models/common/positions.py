"""M-RoPE positions of one sample, by our own function.

The installed transformers is no reference for videos: 4.57 rounds the seconds before they are
scaled, 5.x lets the text after a video start inside the video's time span. This follows the
official training code of Qwen2-VL and Qwen2.5-VL; for images, single-frame videos and text all
versions agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vlmtrain.core.spec import MediaKind, ModelSpec


def mrope_positions(
    input_ids: Tensor,
    grids: Sequence[tuple[int, int, int]],
    kinds: Sequence[MediaKind],
    spec: ModelSpec,
    seconds_per_grid: Sequence[float] | None = None,
) -> Tensor:
    """Time, height and width positions of every token of one sample.

    Text advances all three axes together. A medium gets start + (time, row, column) over its
    merged grid, and the text after it goes on at the largest of these + 1. Time counts slices;
    for a Qwen2.5-VL video it is long(slice * seconds_per_grid * tokens_per_second) in float32.

    Args:
        input_ids: int64 [S], one sample, placeholders expanded.
        grids: (t, h, w) in patches, in sequence order, images and videos together.
        kinds: "image" or "video" for each grid.
        spec: gives the placeholder ids, merge size and tokens_per_second.
        seconds_per_grid: seconds per temporal slice for each grid (temporal_patch_size /
            sampled fps); values for images are not read. Default 1.0, as transformers'.

    Returns:
        int64 [3, S].

    Raises:
        ValueError: the placeholders in input_ids do not match the grids, in number, kind or
            contiguity.
    """
    if len(kinds) != len(grids):
        raise ValueError(f"kinds has {len(kinds)} entries but grids has {len(grids)}")
    if seconds_per_grid is None:
        seconds_per_grid = [1.0] * len(grids)
    if len(seconds_per_grid) != len(grids):
        raise ValueError(
            f"seconds_per_grid has {len(seconds_per_grid)} entries but grids has {len(grids)}"
        )
    ids = input_ids.numpy()
    merge = spec.vision.spatial_merge_size
    pad_ids = {"image": spec.image_token_id, "video": spec.video_token_id}
    visual = np.flatnonzero((ids == pad_ids["image"]) | (ids == pad_ids["video"]))
    expected = sum(t * h * w for t, h, w in grids) // merge**2
    if len(visual) != expected:
        raise ValueError(
            f"input_ids holds {len(visual)} image and video placeholders but the grids need "
            f"{expected}"
        )
    pieces: list[np.ndarray] = []
    cursor = 0  # token
    start = 0  # position
    used = 0  # placeholders
    for number, ((t, h, w), kind, seconds) in enumerate(
        zip(grids, kinds, seconds_per_grid, strict=True)
    ):
        rows, columns = h // merge, w // merge
        count = t * rows * columns
        if count == 0:
            raise ValueError(f"grid {number} is ({t}, {h}, {w}): it has no tokens")
        begin = int(visual[used])
        if visual[used + count - 1] != begin + count - 1 or np.any(
            ids[begin : begin + count] != pad_ids[kind]
        ):
            raise ValueError(
                f"medium {number} ({kind}) needs {count} {kind} placeholders in a row from token "
                f"{begin} on, and input_ids holds something else there"
            )
        text = np.arange(start, start + begin - cursor)
        pieces.append(np.broadcast_to(text, (3, len(text))))
        start += begin - cursor
        time: np.ndarray = np.arange(t)
        if kind == "video" and spec.vision.tokens_per_second is not None:
            scaled = time.astype(np.float32) * np.float32(seconds)
            time = (scaled * np.float32(spec.vision.tokens_per_second)).astype(np.int64)
        block = np.stack(
            np.meshgrid(time, np.arange(rows), np.arange(columns), indexing="ij")
        ).reshape(3, count)
        pieces.append(block + start)
        start += int(block.max()) + 1
        cursor = begin + count
        used += count
    text = np.arange(start, start + len(ids) - cursor)
    pieces.append(np.broadcast_to(text, (3, len(text))))
    return torch.from_numpy(np.concatenate(pieces, axis=1).astype(np.int64))


def mrope_table(position_ids: Tensor, spec: ModelSpec) -> Tensor:
    """float32 [S, head_dim]: of each token the cosines of its head_dim / 2 angles, then the sines.

    position_ids: int64 [3, S]. Each axis rotates its own section of the frequencies
    (`spec.mrope_section`: time first, then height, then width). Interleaved, the axes take turns
    until a section is used up, and time has what is left.
    """
    half = spec.head_dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=position_ids.device)
    frequencies = 1.0 / spec.rope_theta ** (steps / half)
    positions = position_ids.float()
    if spec.interleaved_mrope:
        angles = positions[0, :, None] * frequencies
        for axis in (1, 2):
            turns = slice(axis, 3 * spec.mrope_section[axis], 3)
            angles[:, turns] = positions[axis, :, None] * frequencies[turns]
        return torch.cat([angles.cos(), angles.sin()], -1)
    angles = torch.cat(
        [
            positions[axis, :, None] * part
            for axis, part in enumerate(frequencies.split(list(spec.mrope_section)))
        ],
        -1,
    )
    return torch.cat([angles.cos(), angles.sin()], -1)
