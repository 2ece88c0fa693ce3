"""Resizing beside Pillow, preprocessing beside transformers' image processor, planning, and the
loader (loader.py). `python -m benchmarks.data` prints how evenly the plan deals a typical mix."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import ceilings, loader
from benchmarks.harness import Comparison, Context, Row, compare
from tests.released import released_spec
from vlmkernels import patchify, resize
from vlmkernels.image.patchify import patchify_reference
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.media.images import ImageSettings, load_image
from vlmtrain.data.media.images import patchify as patch_rows
from vlmtrain.data.media.images import resize as resize_image
from vlmtrain.data.packing.costs import sample_costs
from vlmtrain.data.packing.plan import POLICIES, Policy, deal, plan_epoch
from vlmtrain.data.sample import FileRange, Sample

PACK = 8192
MICROBATCHES = 8


def mix(spec: ModelSpec, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and costs of the planner's typical mix, repeated to that many samples."""
    from vlmtrain.plan.workload import typical

    data = typical(spec)
    start = np.cumsum([0, *(len(sample) for sample in data.grids)])
    grids = np.array([grid for sample in data.grids for grid in sample])
    lengths = np.array(data.tokens)
    targets = np.array(data.targets)
    exact = sample_costs(lengths, targets, start, grids, spec).sum(1)
    costs = np.rint(16 * exact).astype(np.int64)
    copies = -(-samples // len(lengths))
    return np.tile(lengths, copies)[:samples], np.tile(costs, copies)[:samples]


def balance(family: str, policy: Policy, ranks: int, samples: int = 40_000) -> tuple[float, ...]:
    """(slowest rank, costliest microbatch, costliest sample) over the mean of ranks and of
    microbatches, averaged over steps, and the fill. A microbatch can't cost less than a sample."""
    lengths, costs = mix(released_spec(f"{family}-7b"), samples)
    plan = plan_epoch(lengths, PACK, 0, 0, "bench", costs=costs, policy=policy)
    size = ranks * MICROBATCHES
    found = []
    for step in range(len(plan) // size):
        batch = plan.costs[step * size : (step + 1) * size]
        dealt = deal(batch, ranks, policy)
        mean = batch.mean()
        slowest = max(batch[share].sum() for share in dealt) / mean / MICROBATCHES
        packs = plan.packs[step * size : (step + 1) * size]
        found.append((slowest, batch.max() / mean, costs[np.concatenate(packs)].max() / mean))
    fill = plan.tokens.sum() / (len(plan) * PACK)
    return (*np.mean(found, axis=0).tolist(), float(fill))


def photograph(width: int, height: int) -> bytes:
    """A JPEG with smooth and sharp parts."""
    from PIL import Image

    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x // 3 + y // 5, y // 2, x * y // 999], axis=-1) % 256
    noise = np.random.default_rng(0).integers(0, 12, pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray(((pixels + noise) % 256).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _same(theirs: Any, ours: Any) -> str | None:
    return None if torch.equal(torch.as_tensor(theirs), ours) else "gives other pixels"


def kernel(context: Context) -> Iterator[Comparison]:
    """Resized bytes to patch rows; the peer is the processor's own arithmetic in torch."""
    height, width = (280, 252) if context.quick else (1008, 980)
    pixels = torch.randint(0, 256, (1, height, width, 3), dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        out = patchify(pixels, dtype=dtype)
        yield Comparison(
            op="patchify",
            shape=f"{width}x{height} image",
            dtype=str(dtype)[6:],
            ours=partial(patchify, pixels, dtype=dtype, threads=context.threads),
            peers={"torch": partial(patchify_reference, pixels, dtype=dtype)},
            ceilings=ceilings.copy(pixels.nbytes + out.nbytes, context),
            check=_same,
            bar=None if context.quick else 4.0,
        )


def resizing(context: Context) -> Iterator[Comparison]:
    """An image's bytes to those of its patch grid, on one thread: Pillow has no more."""
    from PIL import Image

    settings = ImageSettings()
    sizes = [(320, 240)] if context.quick else [(640, 480), (1600, 1200), (4000, 3000)]
    for width, height in sizes:
        picture = Image.open(io.BytesIO(photograph(width, height)))
        picture.load()
        pixels = torch.from_numpy(np.array(picture))[None]
        to = settings.resized(height, width)

        def theirs(picture: Any = picture, to: tuple[int, int] = to) -> Any:
            return picture.resize(to[::-1], Image.Resampling.BICUBIC)

        yield Comparison(
            op="resize, 1 thread",
            shape=f"{width}x{height} to {to[1]}x{to[0]}",
            dtype="uint8",
            ours=partial(resize, pixels, *to),
            peers={"Pillow": theirs},
            check=lambda theirs, ours: _same(np.array(theirs)[None], ours),
            bar=None if context.quick else 4.0,
        )


def image(context: Context) -> Iterator[Comparison]:
    """To patch rows: a decoded PIL image, and a JPEG file's bytes."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = ImageSettings()
    reference = Qwen2VLImageProcessorPil(
        min_pixels=settings.min_pixels, max_pixels=settings.max_pixels
    )
    sizes = [(320, 240)] if context.quick else [(640, 480), (1600, 1200)]
    for width, height in sizes:
        data = photograph(width, height)
        part, sample = FileRange("photo.jpg", data=data), Sample("photo", (), (), "bench")
        decoded = load_image(part, sample, "photo.jpg")

        def ours(picture: Any = None, part: FileRange = part, sample: Sample = sample) -> Any:
            picture = picture or load_image(part, sample, "photo.jpg")
            return patch_rows(resize_image(picture, settings)[None], settings)

        def theirs(picture: Any = None, data: bytes = data) -> Any:
            picture = picture or Image.open(io.BytesIO(data))
            return reference(images=[picture])["pixel_values"]

        peer = "transformers' PIL processor"
        yield Comparison(
            op="resize, patchify",
            shape=f"{width}x{height} decoded image",
            dtype="float32",
            ours=partial(ours, decoded),
            peers={peer: partial(theirs, decoded)},
            check=_same,
            bar=None if context.quick else 3.0,
        )
        yield Comparison(
            op="decode, resize, patchify",
            shape=f"{width}x{height} JPEG",
            dtype="float32",
            ours=ours,
            peers={peer: theirs},
            check=_same,
        )


def plan(context: Context) -> Iterator[Comparison]:
    lengths, costs = mix(released_spec("qwen2_5_vl-7b"), 1000 if context.quick else 10_000)
    for policy in ("balanced", "best_fit"):
        yield Comparison(
            op=f"plan_epoch, {policy}",
            shape=f"{len(lengths)} samples",
            dtype="int64",
            ours=partial(plan_epoch, lengths, PACK, 0, 0, "bench", costs=costs, policy=policy),
            peers={},
        )


def rows(context: Context) -> Iterator[Row]:
    if context.device == "cuda":
        return
    for part in (kernel, resizing, image, plan):
        for comparison in part(context):
            yield compare(comparison, context)
    yield from loader.rows(context)


def main() -> None:
    print("| family, policy | fill | DP8 | DP32 | DP256 | costliest microbatch, sample, DP32 |")
    print("|---|---|---|---|---|---|")
    for family in ("qwen2_vl", "qwen2_5_vl"):
        for policy in POLICIES:
            found = [balance(family, policy, ranks) for ranks in (8, 32, 256)]
            cells = [f"{found[0][3]:.3f}", *(f"{ranks[0]:.3f}" for ranks in found)]
            cells.append(f"{found[1][1]:.2f}, {found[1][2]:.2f}")
            print(f"| {family}, {policy} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
