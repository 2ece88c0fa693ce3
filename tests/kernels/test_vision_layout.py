"""VisionLayout against plain loops over windows, and against transformers."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmkernels import VisionLayout
from vlmkernels.layout import layout_reference

grids = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 11), st.integers(1, 11)), min_size=0, max_size=4
)


def looped(grid: list[list[int]], m: int, side: int) -> tuple[list[int], list[int], list[int]]:
    """(window_index, cu_window_seqlens, cu_seqlens) as one would write them down by hand."""
    index, windows, frames, first = [], [0], [0], 0
    for t, h, w in grid:
        rows, columns = h // m, w // m
        for _ in range(t):
            for top in range(0, rows, side):
                for left in range(0, columns, side):
                    inside = [
                        first + r * columns + c
                        for r in range(top, min(top + side, rows))
                        for c in range(left, min(left + side, columns))
                    ]
                    index += inside
                    windows.append(windows[-1] + len(inside) * m * m)
            first += rows * columns
            frames.append(frames[-1] + h * w)
    return index, windows, frames


def looped_positions(grid: list[list[int]], m: int) -> list[list[int]]:
    return [
        [top + r, left + c]
        for t, h, w in grid
        for _ in range(t)
        for top in range(0, h, m)
        for left in range(0, w, m)
        for r in range(m)
        for c in range(m)
    ]


@settings(max_examples=60)
@given(units=grids, m=st.integers(1, 3), side=st.integers(1, 5))
def test_equals_loops_and_plain_torch(units: list[tuple[int, int, int]], m: int, side: int):
    grid = [[t, h * m, w * m] for t, h, w in units]
    # A window need not be a whole number of merged units.
    size = side * 14 * m + 5
    native = VisionLayout.from_grid(grid, merge_size=m, window_size=size)
    check_loops(native, grid, m, side)
    plain = layout_reference(grid, merge_size=m, window_size=size)
    check_loops(plain, grid, m, side)
    for kind in (None, size):
        a = VisionLayout.from_grid(grid, merge_size=m, window_size=kind)
        b = layout_reference(grid, merge_size=m, window_size=kind)
        for field in fields(VisionLayout):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, torch.Tensor):
                assert x.dtype == y.dtype and x.equal(y), field.name
            else:
                assert x == y, field.name


def check_loops(layout: VisionLayout, grid: list[list[int]], m: int, side: int) -> None:
    index, windows, frames = looped(grid, m, side)
    assert layout.num_patches == sum(t * h * w for t, h, w in grid)
    assert layout.window_index is not None and layout.reverse_index is not None
    assert layout.cu_window_seqlens is not None
    assert layout.window_index.tolist() == index
    assert layout.reverse_index.tolist() == sorted(range(len(index)), key=index.__getitem__)
    assert layout.cu_window_seqlens.tolist() == windows
    assert layout.cu_seqlens.tolist() == frames
    assert layout.window_order is not None
    assert layout.window_order.tolist() == [u * m * m + j for u in index for j in range(m * m)]
    assert layout.max_side == max((max(h, w) for _, h, w in grid), default=0)
    assert layout.position_ids.tolist() == looped_positions(grid, m)
    assert layout.position_ids.shape == (layout.num_patches, 2)
    assert layout.max_seqlen == max((h * w for _, h, w in grid), default=0)
    steps = layout.cu_window_seqlens.diff()
    assert layout.max_window_seqlen == (int(steps.max()) if len(steps) else 0)
    for tensor, dtype in (
        (layout.cu_seqlens, torch.int32),
        (layout.cu_window_seqlens, torch.int32),
        (layout.window_order, torch.int32),
        (layout.window_index, torch.int64),
        (layout.reverse_index, torch.int64),
        (layout.position_ids, torch.int64),
    ):
        assert tensor.dtype == dtype


@pytest.mark.parametrize(
    "grid",
    [
        [[1, 8, 8]],  # divides evenly: transformers pads whole empty windows
        [[1, 16, 24], [3, 10, 6], [1, 4, 4], [2, 8, 18]],
        [[1, 34, 46]],
    ],
)
def test_equals_transformers(grid: list[list[int]]):
    reference = pytest.importorskip("transformers.vision_utils")
    modeling = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    config = pytest.importorskip("transformers.models.qwen2_5_vl.configuration_qwen2_5_vl")
    thw = torch.tensor(grid)
    layout = VisionLayout.from_grid(thw, window_size=112)
    assert layout.cu_seqlens.equal(reference.get_vision_cu_seqlens(thw))
    assert layout.position_ids.equal(reference.get_vision_position_ids(thw, 2))
    index, windows = reference.get_vision_window_index(thw, 2, 112, 14)
    assert layout.window_index is not None and layout.window_index.equal(index)
    assert layout.cu_window_seqlens is not None
    assert layout.cu_window_seqlens.equal(windows.unique_consecutive())

    vision = config.Qwen2_5_VLVisionConfig(hidden_size=160, num_heads=2)  # head_dim 80
    rotary = modeling.Qwen2_5_VLVisionRotaryEmbedding(vision)
    cos, sin = rotary(torch.zeros(1), layout.position_ids)
    angles = layout.rotary(80, windowed=False)
    assert torch.cat((angles, angles), -1).cos().equal(cos)
    assert torch.cat((angles, angles), -1).sin().equal(sin)
    units = angles.view(len(index), 4, -1)
    assert layout.rotary(80, windowed=True).equal(units[index].view_as(angles))
    table = layout.rotary_table(80)
    assert table.equal(torch.cat((angles.cos(), angles.sin()), -1))
    assert layout.rotary_table(80) is table  # made once


def test_rotary_by_hand():
    layout = VisionLayout.from_grid([[1, 2, 4]], window_size=28)
    angles = layout.rotary(8, theta=100.0, windowed=False)
    # frequencies 100^0 and 100^-(2/4): rows first, then columns
    expected = [[r, r / 10, c, c / 10] for r, c in layout.position_ids.tolist()]
    torch.testing.assert_close(angles, torch.tensor(expected), rtol=1e-6, atol=0)


def test_windows_of_one_image_stay_apart_and_come_back():
    layout = VisionLayout.from_grid([[2, 12, 20]], window_size=112)
    rows = torch.arange(layout.num_patches).view(-1, 4, 1)
    assert layout.window_index is not None and layout.reverse_index is not None
    windowed = rows[layout.window_index]
    assert not windowed.equal(rows)
    assert windowed[layout.reverse_index].equal(rows)


@pytest.mark.parametrize("window_size", [None, 112])
def test_no_media(window_size: int | None):
    for grid in ([], torch.empty(0, 3, dtype=torch.int64)):
        layout = VisionLayout.from_grid(grid, window_size=window_size)
        assert (layout.num_patches, layout.cu_seqlens.tolist()) == (0, [0])
        assert layout.position_ids.shape == (0, 2)
        assert layout.rotary(80, windowed=window_size is not None).shape == (0, 40)
        if window_size:
            assert layout.cu_window_seqlens is not None and layout.window_index is not None
            assert layout.cu_window_seqlens.tolist() == [0]
            assert layout.window_index.shape == (0,)


def test_to_moves_every_tensor():
    layout = VisionLayout.from_grid([[1, 4, 4]], window_size=112).to("meta")
    tensors = (layout.cu_seqlens, layout.cu_window_seqlens, layout.window_index)
    tensors += (layout.window_order, layout.rotary_table(80))
    for tensor in (*tensors, layout.reverse_index, layout.position_ids):
        assert tensor is not None and tensor.device.type == "meta"
    assert VisionLayout.from_grid([[1, 4, 4]]).to("meta").window_index is None


@pytest.mark.parametrize(
    "grid, keywords, message",
    [
        ([[1, 4]], {}, "grid_thw is int64 [1, 2]; it must be integers [n, 3]"),
        ([[1.0, 4.0, 4.0]], {}, "grid_thw is float32 [1, 3]"),
        ([[1, 4, 4], [1, 4, 5]], {}, "grid_thw[1] is [1, 4, 5]; t, h and w must be at least 1"),
        ([[0, 4, 4]], {}, "grid_thw[0] is [0, 4, 4]"),
        ([[1, 4, 4]], {"window_size": 27}, "window_size is 27 pixels; it must be at least one"),
        ([[1, 4, 4]], {"merge_size": 0}, "merge_size is 0; it must be at least 1"),
        ([[1, 4, 4]], {"window_size": 112, "patch_size": 0}, "patch_size is 0; it must be at"),
        ([[1, 4, 4]], {"merge_size": 2.0}, "merge_size is 2.0; it must be a whole number"),
        ([[1, 4, 4]], {"window_size": 112.0}, "window_size is 112.0; it must be a whole number"),
        ([[1, 4, 4], [1, 2]], {}, "grid_thw is [[1, 4, 4], [1, 2]]; it must be integers [n, 3]"),
        # 2^66, which is 0 in 64 bits
        ([[4, 2**32, 2**32]], {}, "grid_thw has 73786976294838206464 patches; a batch must"),
        ([[1, 65536, 32768]], {}, "grid_thw has 2147483648 patches; a batch must have less than"),
    ],
)
def test_bad_grids_are_named(grid, keywords, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        VisionLayout.from_grid(grid, **keywords)


def test_bad_rotary_is_named():
    layout = VisionLayout.from_grid([[1, 4, 4]])
    with pytest.raises(ValueError, match="head_dim is 6; it must be a positive multiple of 4"):
        layout.rotary(6, windowed=False)
    with pytest.raises(ValueError, match="head_dim is 6; it must be a positive multiple of 4"):
        layout.rotary_table(6)
    with pytest.raises(ValueError, match="windowed is True, but this layout was made without"):
        layout.rotary(8, windowed=True)


def test_layouts_are_compared_by_value():
    one, same = (VisionLayout.from_grid([[1, 4, 6]], window_size=56) for _ in range(2))
    one.rotary_table(8)  # what has been computed from it does not count
    assert one == same and hash(one) == hash(same) and len({one, same}) == 1
    assert not one != same
    others = (
        VisionLayout.from_grid([[1, 4, 6]]),
        VisionLayout.from_grid([[1, 6, 4]], window_size=56),
        VisionLayout.from_grid([[1, 4, 6]], window_size=28),
        one.in_window_order(),
        one.padded(1),
        one.to("meta"),
        None,
    )
    assert not any(one == other for other in others)


def test_torchs_default_device_changes_nothing() -> None:
    grid = [[1, 4, 6], [2, 8, 4]]
    want = VisionLayout.from_grid(grid, window_size=56)
    for same in (grid, torch.tensor(grid)):
        with torch.device("meta"):
            assert VisionLayout.from_grid(same, window_size=56) == want
            assert VisionLayout.from_grid([]).num_patches == 0
    padded = want.padded(2)
    with torch.device("meta"):
        assert want.padded(2) == padded
