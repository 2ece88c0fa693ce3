"""M-RoPE positions against transformers (images, single-frame videos, text) and by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.common.positions import mrope_positions

Grid = tuple[int, int, int]


def sequence(spec: ModelSpec, pieces: list[int | tuple[str, Grid]]) -> torch.Tensor:
    """Ids of text runs (a number of tokens) and media between their start and end tokens."""
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            ids += [1] * piece
            continue
        kind, (t, h, w) = piece
        pad = spec.image_token_id if kind == "image" else spec.video_token_id
        ids += [spec.vision_start_token_id, *[pad] * (t * h * w // 4), spec.vision_end_token_id]
    return torch.tensor(ids)


def positions(
    spec: ModelSpec, pieces: list[int | tuple[str, Grid]], seconds: list[float] | None = None
) -> torch.Tensor:
    media = [piece for piece in pieces if not isinstance(piece, int)]
    return mrope_positions(
        sequence(spec, pieces),
        [grid for _, grid in media],
        [kind for kind, _ in media],
        spec,
        seconds,
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_equals_transformers(family: str, spec: ModelSpec, rng: np.random.Generator) -> None:
    if family == "qwen2_vl":
        vision = dataclasses.replace(spec.vision, tokens_per_second=None)
        spec, model = dataclasses.replace(spec, family=family, vision=vision), Qwen2VLModel
    else:
        model = Qwen2_5_VLModel
    owner = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=SimpleNamespace(
                spatial_merge_size=2, tokens_per_second=spec.vision.tokens_per_second
            )
        )
    )
    owner.get_vision_position_ids = lambda *a, **k: model.get_vision_position_ids(owner, *a, **k)
    for _ in range(50):
        pieces: list[int | tuple[str, Grid]] = [int(rng.integers(0, 9))]
        for _ in range(rng.integers(0, 5)):
            grid = (1, 2 * int(rng.integers(1, 6)), 2 * int(rng.integers(1, 6)))
            pieces += [("image" if rng.random() < 0.6 else "video", grid), int(rng.integers(0, 7))]
        ids = sequence(spec, pieces)
        if not len(ids):
            continue
        types = torch.zeros_like(ids)
        types[ids == spec.image_token_id] = 1
        types[ids == spec.video_token_id] = 2
        grids = {
            kind: torch.tensor([p[1] for p in pieces if not isinstance(p, int) and p[0] == kind])
            for kind in ("image", "video")
        }
        expected, _ = model.get_rope_index(
            owner, ids[None], types[None], grids["image"], grids["video"]
        )
        ours = positions(spec, pieces)
        assert ours.dtype == torch.int64
        assert torch.equal(ours, expected[:, 0]), pieces


def test_video_by_hand(spec: ModelSpec) -> None:
    """3 slices of 2x4 patches (1x2 tokens), 0.5 s each, 2 positions a second: time 0, 1, 2."""
    assert spec.vision.tokens_per_second == 2
    ours = positions(spec, [1, ("video", (3, 2, 4)), 2], [0.5])
    assert ours.tolist() == [
        [0, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7],
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 3, 2, 3, 2, 3, 5, 6, 7],
    ]


def test_video_time_is_truncated_after_scaling(spec: ModelSpec) -> None:
    """0.8 s a slice: 0, 1.6, 3.2, 4.8 -> 0, 1, 3, 4; the text goes on after the largest."""
    ours = positions(spec, [("video", (4, 2, 2)), 1], [0.8])
    assert ours[0].tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert ours[1].tolist() == [0, 1, 1, 1, 1, 6, 7]


def test_qwen2_vl_video_counts_slices(spec: ModelSpec) -> None:
    spec = dataclasses.replace(
        spec, vision=dataclasses.replace(spec.vision, tokens_per_second=None)
    )
    ours = positions(spec, [("video", (4, 2, 2)), 1], [7.5])
    assert ours[0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_mismatches_are_refused(spec: ModelSpec) -> None:
    ids = sequence(spec, [2, ("image", (1, 4, 4)), 1])
    with pytest.raises(ValueError, match="4 image and video placeholders but the grids need 6"):
        mrope_positions(ids, [(1, 4, 6)], ["image"], spec)
    with pytest.raises(ValueError, match="needs 4 video placeholders in a row from token 3"):
        mrope_positions(ids, [(1, 4, 4)], ["video"], spec)
    with pytest.raises(ValueError, match="kinds has 0 entries"):
        mrope_positions(ids, [(1, 4, 4)], [], spec)
    ids = torch.cat([ids, ids])
    with pytest.raises(ValueError, match="needs 8 image placeholders in a row"):
        mrope_positions(ids, [(1, 4, 8)], ["image"], spec)
