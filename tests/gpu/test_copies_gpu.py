"""Packs that are copied to a real GPU beside its work, for `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)

pytest.importorskip("megatron.core")


def test_each_pack_is_waited_for() -> None:
    """Copies of 60 MB, behind a kernel and before one that overwrites what was read."""
    from vlmtrain.core.batch import PackedBatch
    from vlmtrain.core.copies import Copies
    from vlmtrain.core.device import Backend

    backend = Backend(torch.device("cuda", torch.cuda.current_device()), "nccl")
    ids = torch.arange(8)

    def pack(value: float) -> PackedBatch:
        return PackedBatch(
            input_ids=ids,
            labels=ids,
            position_ids=ids.expand(3, 8).contiguous(),
            cu_seqlens=torch.tensor([0, 8], dtype=torch.int32),
            visual_index=torch.full((8,), -1, dtype=torch.int32),
            pixel_values=torch.full((12_800, 1176), value),
            grid_thw=torch.tensor([[1, 8, 8]]),
            sample_ids=["a"],
            target_tokens=8,
            image_tokens=0,
            pad_tokens=0,
        ).pin_memory()

    for step in range(3):
        copies = Copies.start([pack(10.0 * step + i) for i in range(4)], backend)
        for i, moved in enumerate(copies.in_turn()):
            found = moved.pixel_values.double().sum()
            moved.pixel_values.zero_()
            assert float(found) == (10.0 * step + i) * moved.pixel_values.numel()
            assert moved.input_ids.is_cuda and not moved.labels.is_cuda
        del copies, moved


def test_a_layout_is_not_waited_for() -> None:
    """256 KB of positions, behind a kernel of about a second; from pageable memory the copy would
    begin after it."""
    from vlmkernels import VisionLayout

    layout = VisionLayout.from_grid([[1, 128, 128]], window_size=112)
    layout.to("cuda")  # page-locked memory, which is used again
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    moved = layout.to("cuda")
    assert not busy.query()
    assert torch.equal(moved.position_ids.cpu(), layout.position_ids)
