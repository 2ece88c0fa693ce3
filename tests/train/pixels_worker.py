"""One rank of a tensor-parallel group (`ranks.run_cases`). Its loader decodes a part of the media;
what it gathers must be what a loader that decodes all hands out, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.worker import serve
from vlmtrain.core import device
from vlmtrain.core.batch import PackedBatch, empty_pack
from vlmtrain.core.config import LoaderSection
from vlmtrain.data.index import scan_sources
from vlmtrain.data.loader import LoaderRank, PackedLoader
from vlmtrain.data.processor import Processor
from vlmtrain.models.family import read_spec
from vlmtrain.parallel.layout import make_layout
from vlmtrain.parallel.pixel_sharing import SharedPixels
from vlmtrain.parallel.step_inputs import StepInputs


def run(case: dict[str, Any], backend: device.Backend) -> None:
    shared = SharedPixels(dist.group.WORLD)
    spec = read_spec(case["model"])
    layout = replace(make_layout(spec, world_size=1), tensor=shared.size)
    processor = Processor.from_folder(case["model"], spec)
    index = scan_sources([case["data"]], processor, spec, 320)

    def loader(dtype: torch.dtype, decodes: Any = None) -> PackedLoader:
        return PackedLoader(
            index,
            processor,
            spec,
            LoaderSection(workers=0),
            LoaderRank(decodes=decodes, pixel_dtype=dtype),
            pack_length=320,
            global_batch=3,
            prefetch=False,
        )

    def decodes(grids: Sequence[np.ndarray]) -> list[tuple[bool, ...]]:
        return StepInputs(spec, layout, grids).decoded_by(dist.get_rank())

    def gather(packs: list[PackedBatch]) -> list[PackedBatch]:
        return shared.gather(StepInputs.of(spec, layout, packs), packs)

    for dtype in (torch.float32, torch.bfloat16):
        part, whole = loader(dtype, decodes), loader(dtype)
        for _ in range(part.steps_per_epoch):
            packs, wanted = part.next_step(), whole.next_step()
            same(gather(packs), wanted)
            assert gather(wanted) is wanted
        decoded = torch.tensor([part.decoded, whole.decoded])
        dist.all_reduce(decoded)
        print(f"decoded {part.decoded} of {whole.decoded}")
        assert decoded[0] * shared.size == decoded[1]  # each medium once in the group
        assert 0 < part.decoded < whole.decoded
    nothing = empty_pack(64, 0, spec.vision.patch_dim, torch.float32)
    nothing.has_pixels = ()
    (got,) = gather([nothing])
    assert got.pixel_values.shape == (0, spec.vision.patch_dim) and got.has_pixels is None


def same(got: list[PackedBatch], wanted: list[PackedBatch]) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.sample_ids == b.sample_ids and a.has_pixels is None
        assert a.pixel_values.dtype == b.pixel_values.dtype
        assert torch.equal(a.pixel_values, b.pixel_values)


if __name__ == "__main__":
    serve(run)
