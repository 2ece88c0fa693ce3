"""Frames of bytes to normalised patch rows: rescale, normalise, cast and gather in one pass.

T = frames, H, W = pixels, P = patch rows, t, h, w = patches in time, height, width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import get_interpreter_stack

from vlmkernels._native import (
    DTYPES,
    check,
    check_apart,
    check_tensor,
    check_whole,
    define,
    describe,
    launch,
    pointer,
)

_CPU = torch.device("cpu")
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


# ---- plain-torch reference: the documented meaning -----------------------------------------------


def patchify_reference(
    frames: Tensor,
    *,
    mean: Sequence[float] = CLIP_MEAN,
    std: Sequence[float] = CLIP_STD,
    rescale_factor: float = 1 / 255,
    patch_size: int = 14,
    temporal_patch_size: int = 2,
    merge_size: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`patchify` as transformers' Qwen2-VL image processor (PIL) computes it."""
    missing = -len(frames) % temporal_patch_size
    frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    values = (frames.double() * rescale_factor).float()
    values = (values - torch.tensor(mean)) / torch.tensor(std)
    t, h, w = (
        n // size
        for n, size in zip(frames.shape, (temporal_patch_size,) + (patch_size,) * 2, strict=False)
    )
    values = values.permute(0, 3, 1, 2).reshape(
        t,
        temporal_patch_size,
        3,
        h // merge_size,
        merge_size,
        patch_size,
        w // merge_size,
        merge_size,
        patch_size,
    )
    return values.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1).to(dtype)


# ---- launcher and registration -------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _table(
    mean: tuple[float, ...], std: tuple[float, ...], factor: float, dtype: torch.dtype
) -> Tensor:
    """[3, 256]: the normalised value of each byte. The reference rescales in float64, rounds to
    float32 and normalises in float32."""
    values = (torch.arange(256, dtype=torch.float64, device=_CPU) * factor).float()
    means, stds = (torch.tensor(x, dtype=torch.float32, device=_CPU) for x in (mean, std))
    return ((values - means[:, None]) / stds[:, None]).to(dtype).contiguous()


def _shape(
    frames: Tensor, patch_size: int, temporal_patch_size: int, merge_size: int
) -> tuple[int, int]:
    """Of the rows. Raises ValueError where frames can't be cut into such patches."""
    check_tensor("frames", frames, dtypes=[torch.uint8], shape="[T, H, W, 3]", dim=4, device=_CPU)
    for name, size in (
        ("patch_size", patch_size),
        ("temporal_patch_size", temporal_patch_size),
        ("merge_size", merge_size),
    ):
        check(size >= 1, f"{name} is {size}; it must be at least 1")
    count, height, width, channels = frames.shape
    factor = patch_size * merge_size
    check(
        count >= 1 and channels == 3 and height % factor == 0 and width % factor == 0,
        f"frames has shape {list(frames.shape)}; it must be [T, H, W, 3] with T at least 1, and H "
        f"and W multiples of {factor}",
    )
    slices = -(-count // temporal_patch_size)
    return (
        slices * (height // patch_size) * (width // patch_size),
        3 * temporal_patch_size * patch_size**2,
    )


def _run(
    frames: Tensor, table: Tensor, out: Tensor, patch: int, temporal: int, merge: int, threads: int
) -> None:
    shape = _shape(frames, patch, temporal, merge)
    check_tensor("out", out, dtypes=DTYPES, shape="[P, values]", dim=2, device=_CPU)
    if out.shape != shape or not out.is_contiguous():
        raise ValueError(
            f"out has shape {list(out.shape)} and strides {tuple(out.stride())}; it must be "
            f"{list(shape)} and contiguous"
        )
    check_tensor("table", table, dtypes=[out.dtype], shape="[3, 256]", dim=2, device=_CPU)
    check(table.shape == (3, 256), f"table is {describe(table)}; it must be [3, 256]")
    check(threads >= 1, f"threads is {threads}; it must be at least 1")
    check_apart("frames", frames, "out", out)
    table = table.contiguous()
    frames = frames.contiguous()
    launch(
        "patchify",
        frames,
        pointer(frames),
        pointer(table),
        pointer(out),
        *frames.shape[:3],
        patch,
        temporal,
        merge,
        threads,
        DTYPES[out.dtype],
    )


_patchify = define(
    "patchify(Tensor frames, Tensor table, Tensor(a!) out, int patch, int temporal, int merge,"
    " int threads) -> ()",
    _run,
    devices=["CPU"],
    fake=lambda *_: None,
)


# ---- public function -----------------------------------------------------------------------------


def patchify(
    frames: Tensor,
    *,
    mean: Sequence[float] = CLIP_MEAN,
    std: Sequence[float] = CLIP_STD,
    rescale_factor: float = 1 / 255,
    patch_size: int = 14,
    temporal_patch_size: int = 2,
    merge_size: int = 2,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    """Patch rows of an image (T = 1) or of a video's frames, on the CPU.

    Args:
        frames: uint8 [T, H, W, 3], H and W multiples of patch_size * merge_size. Where T is no
            multiple of temporal_patch_size the last frame is repeated.
        mean, std, rescale_factor: a value is (pixel * rescale_factor - mean) / std.
        dtype: float32, bfloat16 or float16, rounded once, from float32.
        out: [P, 3 * temporal_patch_size * patch_size^2] contiguous, to write into; its dtype
            holds then.
        threads: of this call; several threads may call at once, the GIL is released. In a process
            that was forked (a DataLoader's worker) 1, as for every OpenMP code of libgomp's.

    Returns:
        [P, 3 * temporal_patch_size * patch_size^2], P = t * h * w: rows in the order (t,
        h / merge, w / merge, merge, merge), inside a row (channel, frame, y, x).

    Raises:
        TypeError: frames or out is no tensor.
        ValueError: another wrong argument, named.
    """
    check_whole(patch_size=patch_size, temporal_patch_size=temporal_patch_size)
    check_whole(merge_size=merge_size, threads=threads)
    shape = _shape(frames, patch_size, temporal_patch_size, merge_size)
    try:
        means, stds, factor = (*map(float, mean),), (*map(float, std),), float(rescale_factor)
    except (TypeError, ValueError):
        means = stds = ()
    if len(means) != 3 or len(stds) != 3 or not all(stds):
        raise ValueError(
            f"mean is {mean}, std {std} and rescale_factor {rescale_factor}; mean and std must be "
            "three numbers, std not 0, and rescale_factor a number"
        )
    if out is None:
        check(dtype in DTYPES, f"dtype is {dtype}; it must be float32, bfloat16 or float16")
        out = torch.empty(shape, dtype=dtype, device=_CPU)
    # Under FakeTensorMode or functionalize the table is of their kind, and for this call only.
    of_mode = torch._C._len_torch_dispatch_stack() or get_interpreter_stack()
    table_of = _table.__wrapped__ if of_mode else _table
    table = table_of(means, stds, factor, out.dtype)
    _patchify(frames, table, out, patch_size, temporal_patch_size, merge_size, threads)
    return out
