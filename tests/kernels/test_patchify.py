"""patchify against the image processor's own arithmetic, and a brute-force gather."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.numeric import assert_bitwise
from vlmkernels import patchify
from vlmkernels.image.patchify import patchify_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(DTYPES),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_equals_the_reference_to_the_bit(
    frames: int,
    rows: int,
    columns: int,
    patch: int,
    temporal: int,
    merge: int,
    dtype: torch.dtype,
    threads: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (frames, rows * patch * merge, columns * patch * merge, 3)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    options = {"patch_size": patch, "temporal_patch_size": temporal, "merge_size": merge}
    got = patchify(pixels, dtype=dtype, threads=threads, **options)
    assert_bitwise("rows", got, patchify_reference(pixels, dtype=dtype, **options))


def test_every_byte_of_every_channel() -> None:
    """All 768 values, from the formula in exact order: float64 rescale, float32 normalise."""
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3, 1).T.reshape(1, 16, 16, 3)
    rows = patchify(pixels, patch_size=16, merge_size=1, temporal_patch_size=1).view(3, 256)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
    for byte in range(256):
        value = torch.tensor(byte * (1 / 255), dtype=torch.float64).float()
        assert_bitwise("rows", rows[:, byte], (value - mean) / std)


def test_the_place_of_each_pixel_by_hand() -> None:
    """Row, channel, frame, y, x computed one pixel at a time."""
    t, h, w, patch, merge = 3, 8, 12, 2, 2
    pixels = torch.randint(0, 256, (t, h, w, 3), dtype=torch.uint8)
    rows = patchify(pixels, mean=(0, 0, 0), std=(1, 1, 1), rescale_factor=1, patch_size=patch)
    rows = rows.view(-1, 3, 2, patch, patch)
    per_slice, across = (h // patch) * (w // patch), w // patch // merge
    for slice_ in range(2):
        for y in range(h):
            for x in range(w):
                py, px = y // patch, x // patch
                group = (py // merge) * across + px // merge
                row = slice_ * per_slice + group * merge**2 + py % merge * merge + px % merge
                for step in range(2):
                    frame = min(2 * slice_ + step, t - 1)
                    expected = pixels[frame, y, x].float()
                    assert torch.equal(rows[row, :, step, y % patch, x % patch], expected)


def test_writes_into_out_and_only_there() -> None:
    pixels = torch.randint(0, 256, (1, 28, 56, 3), dtype=torch.uint8)
    room = torch.full((12, 1176), 7.0, dtype=torch.bfloat16)
    out = room[2:10]
    assert patchify(pixels, out=out).data_ptr() == out.data_ptr()
    assert_bitwise("rows", out, patchify_reference(pixels, dtype=torch.bfloat16))
    assert (room[:2] == 7).all() and (room[10:] == 7).all()
    strided = pixels.transpose(1, 2)  # strided frames
    assert_bitwise("rows", patchify(strided), patchify_reference(strided.contiguous()))


def test_threads_may_call_at_once() -> None:
    pixels = torch.randint(0, 256, (2, 280, 280, 3), dtype=torch.uint8)
    expected, results = patchify_reference(pixels), []
    workers = [
        threading.Thread(target=lambda: results.append(patchify(pixels, threads=2)))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4
    for result in results:
        assert_bitwise("rows", result, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"frames": torch.zeros(1, 28, 28, 3)},
            r"frames is float32 \[1, 28, 28, 3\] on cpu; it mu",
        ),
        ({"frames": torch.zeros(28, 28, 3, dtype=torch.uint8)}, "frames is uint8 .*4|frames is"),
        ({"frames": torch.zeros(1, 28, 30, 3, dtype=torch.uint8)}, "W multiples of 28"),
        ({"frames": torch.zeros(1, 28, 28, 4, dtype=torch.uint8)}, r"must be \[T, H, W, 3\]"),
        ({"frames": torch.zeros(0, 28, 28, 3, dtype=torch.uint8)}, "T at least 1"),
        ({"patch_size": 0}, "patch_size is 0; it must be at least 1"),
        ({"threads": 0}, "threads is 0; it must be at least 1"),
        ({"threads": 1.5}, "threads is 1.5; it must be a whole number"),
        ({"patch_size": 14.0}, "patch_size is 14.0; it must be a whole number"),
        ({"mean": 0.5}, "mean is 0.5, std .*; mean and std must be three numbers"),
        ({"rescale_factor": "a"}, "and rescale_factor a; .* rescale_factor a number"),
        ({"std": (1, 0, 1)}, "std not 0"),
        ({"mean": (1, 0)}, "mean and std must be three numbers"),
        ({"dtype": torch.int32}, "dtype is torch.int32; it must be float32"),
        ({"out": torch.zeros(3, 1176)}, r"out has shape \[3, 1176\] .* it must be \[4, 1176\]"),
        ({"out": torch.zeros(1176, 4).T}, "and contiguous"),
    ],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    arguments = {"frames": torch.zeros(1, 28, 28, 3, dtype=torch.uint8), **change}
    with pytest.raises(ValueError, match=message):
        patchify(arguments.pop("frames"), **arguments)


def test_defaults_of_torch_change_nothing() -> None:
    """Neither a default device nor a default dtype, nor FakeTensorMode, then or afterwards."""
    pixels = torch.randint(0, 256, (2, 28, 28, 3), dtype=torch.uint8)
    for number, options in enumerate(
        (
            torch.device("meta"),
            FakeTensorMode(),
            DefaultDtype(torch.bfloat16),
        )
    ):
        factor = 1 / (255 + number)  # a table that nobody has asked for
        want = patchify_reference(pixels, rescale_factor=factor)
        with options:
            if isinstance(options, FakeTensorMode):
                patchify(options.from_tensor(pixels), rescale_factor=factor)
            else:
                inside = patchify(pixels, rescale_factor=factor)
                assert_bitwise("inside", inside, want)
        assert_bitwise("afterwards", patchify(pixels, rescale_factor=factor), want)


class DefaultDtype:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(torch.float32)


def test_more_threads_than_rows() -> None:
    pixels = torch.randint(0, 256, (1, 56, 56, 3), dtype=torch.uint8)
    assert_bitwise("rows", patchify(pixels, threads=10**10), patchify(pixels))
