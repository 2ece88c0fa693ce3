"""Bicubic resize of RGB bytes, bit for bit what Pillow's `Image.resize` gives.

T = frames, H, W = pixels.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vlmkernels._native import (
    check,
    check_apart,
    check_tensor,
    check_whole,
    define,
    launch,
    pointer,
)

_CPU = torch.device("cpu")


# ---- reference: the documented meaning -----------------------------------------------------------


def resize_reference(frames: Tensor, height: int, width: int) -> Tensor:
    """`resize` by Pillow itself."""
    import numpy as np
    from PIL import Image

    resized = [
        Image.fromarray(frame[..., :3].numpy()).resize((width, height), Image.Resampling.BICUBIC)
        for frame in frames
    ]
    return torch.from_numpy(np.stack([np.asarray(image) for image in resized]))


# ---- launcher and registration -------------------------------------------------------------------


@functools.lru_cache
def installed_pillow() -> str:
    """The installed Pillow's version, whose order of passes is followed."""
    try:
        import PIL
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "resize gives the bytes of the Pillow that is installed, and there is none: install "
            'pillow, or say of which version they shall be, pillow="13"',
            name=error.name,
        ) from None

    return str(PIL.__version__)


def _version(pillow: str | int) -> int:
    """100 times the major version and the minor one; of a major version alone, its last."""
    major, minor = (*str(pillow).split("."), "99")[:2]
    check(
        major.isdigit() and minor.isdigit(),
        f'pillow is {pillow!r}; it must be a version, such as "12.2"',
    )
    return 100 * int(major) + int(minor)


def _check_frames(frames: Tensor) -> None:
    check_tensor("frames", frames, dtypes=[torch.uint8], shape="[T, H, W, 3]", dim=4, device=_CPU)
    check(
        min(frames.shape) >= 1 and frames.shape[3] in (3, 4),
        f"frames has shape {list(frames.shape)}; it must be [T, H, W, 3] or [T, H, W, 4], none of "
        "them 0",
    )
    side = max(frames.shape[1:3])
    check(side < 2**24, f"a side of frames has {side} pixels; at most {2**24 - 1} are taken")


def _run(frames: Tensor, out: Tensor, pillow: int, threads: int) -> None:
    _check_frames(frames)
    check_tensor("out", out, dtypes=[torch.uint8], shape="[T, H, W, 3]", dim=4, device=_CPU)
    shape = (len(frames), *out.shape[1:3], 3)
    if out.shape != shape or min(shape) < 1 or not out.is_contiguous():
        raise ValueError(
            f"out has shape {list(out.shape)} and strides {tuple(out.stride())}; it must be "
            f"{list(shape)}, nowhere 0, and contiguous"
        )
    side = max(shape[1:3])
    check(side < 2**24, f"a side of the result has {side} pixels; at most {2**24 - 1} are taken")
    check(threads >= 1, f"threads is {threads}; it must be at least 1")
    check_apart("frames", frames, "out", out)
    frames = frames.contiguous()
    sizes = (*frames.shape, *out.shape[1:3], pillow, threads)
    launch("resize", frames, pointer(frames), pointer(out), *sizes)


_resize = define(
    "resize(Tensor frames, Tensor(a!) out, int pillow, int threads) -> ()",
    _run,
    devices=["CPU"],
    fake=lambda *_: None,
)


# ---- public function -----------------------------------------------------------------------------


def resize(
    frames: Tensor,
    height: int,
    width: int,
    *,
    pillow: str | int | None = None,
    out: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    """Resize an image (T = 1) or a video's frames, on the CPU.

    Args:
        frames: uint8 [T, H, W, 3], or [T, H, W, 4], whose fourth byte is not looked at.
        height, width: of the result.
        pillow: the version of Pillow to agree with, "12.2" or 12, the last of its minor versions;
            default: the installed one. 12.2 and 13.0 changed the order of the passes, and with it
            bytes, for some sizes.
        out: uint8 [T, height, width, 3] contiguous, to write into.
        threads: of this call; several threads may call at once, the GIL is released. In a process
            that was forked (a DataLoader's worker) 1, as for every OpenMP code of libgomp's.

    Returns:
        uint8 [T, height, width, 3].

    Raises:
        TypeError: frames or out is no tensor.
        ValueError: another wrong argument, named.
    """
    _check_frames(frames)
    check_whole(height=height, width=width, threads=threads)
    for name, size in (("height", height), ("width", width)):
        check(size >= 1, f"{name} is {size}; it must be at least 1")
    if out is None:
        out = torch.empty((len(frames), height, width, 3), dtype=torch.uint8, device=_CPU)
    check_tensor("out", out, dtypes=[torch.uint8], shape="[T, H, W, 3]", dim=4, device=_CPU)
    check(
        out.shape[1:3] == (height, width),
        f"out has shape {list(out.shape)}; it must be {[len(frames), height, width, 3]}",
    )
    _resize(frames, out, _version(installed_pillow() if pillow is None else pillow), threads)
    return out
