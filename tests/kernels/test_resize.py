"""resize against Pillow itself, to the bit, on every instruction set of this machine."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.numeric import ISAS, assert_bitwise
from vlmkernels import _native, resize
from vlmkernels.image.resize import installed_pillow, resize_reference


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa("")


def picture(shape: tuple[int, ...], contrast: bool, seed: int) -> torch.Tensor:
    """Noise; with contrast only 0 and 255, which overshoot most."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return (pixels > 127).to(torch.uint8) * 255 if contrast else pixels


side = st.one_of(st.integers(1, 5), st.integers(1, 40), st.integers(1, 260))


@given(
    st.integers(1, 2),
    side,
    side,
    side,
    side,
    st.sampled_from([3, 4]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_equals_pillow_to_the_bit(
    frames: int,
    in_height: int,
    in_width: int,
    height: int,
    width: int,
    channels: int,
    contrast: bool,
    threads: int,
    seed: int,
) -> None:
    pixels = picture((frames, in_height, in_width, channels), contrast, seed)
    expected = resize_reference(pixels, height, width)
    try:
        for name in ISAS:
            _native.set_isa(name)
            got = resize(pixels, height, width, threads=threads)
            assert_bitwise(name, got.short(), expected.short())
    finally:
        _native.set_isa("")


@pytest.mark.parametrize(
    ("size", "to"),
    [
        ((1, 1), (28, 28)),
        ((1, 900), (28, 280)),
        ((900, 1), (280, 28)),
        ((1, 1), (1, 1)),
        ((64, 64), (64, 64)),
        ((3, 20000), (28, 112)),  # 714 weights an output
        ((20000, 3), (112, 28)),
        ((700, 500), (1, 1)),
        ((480, 640), (476, 644)),  # what a VGA photograph becomes
        ((2, 3), (700, 500)),
        ((129, 257), (128, 257)),
        ((129, 257), (129, 256)),
        ((90, 60), (70, 50)),  # on the border between the two orders of passes, and beyond it
        ((90, 60), (69, 50)),
    ],
)
def test_extremes(isa: str, size: tuple[int, int], to: tuple[int, int], seed: int) -> None:
    for channels in (3, 4):
        for contrast in (False, True):
            pixels = picture((1, *size, channels), contrast, seed)
            assert_bitwise(isa, resize(pixels, *to).short(), resize_reference(pixels, *to).short())


def in_integers(pixels: np.ndarray, size: int, axis: int) -> np.ndarray:
    """One pass by the definition: weights in 22 bits, sums in int64."""
    rows = np.moveaxis(pixels.astype(np.int64), axis, 0)
    scale = len(rows) / size
    reach = 2 * max(scale, 1.0)
    out = []
    for i in range(size):
        center = (i + 0.5) * scale
        taps = range(max(int(center - reach + 0.5), 0), min(int(center + reach + 0.5), len(rows)))
        x = np.abs((np.array(taps) - center + 0.5) / max(scale, 1.0))
        near, far = (1.5 * x - 2.5) * x * x + 1, -0.5 * (((x - 5) * x + 8) * x - 4)
        weights = np.where(x < 1, near, np.where(x < 2, far, 0))
        fixed = np.rint(weights / weights.sum() * 2**22).astype(np.int64)
        total = (rows[taps.start : taps.stop] * fixed[:, None, None]).sum(0)
        out.append(np.clip((total + 2**21) >> 22, 0, 255))
    return np.moveaxis(np.stack(out), 0, axis).astype(np.uint8)


@pytest.mark.parametrize(
    ("size", "to"),
    [
        ((90, 60), (33, 61)),
        ((90, 60), (33, 20)),
        ((701, 7), (50, 19)),
        ((700, 7), (50, 19)),
        ((701, 7), (702, 19)),
    ],
)
def test_the_order_of_passes_of_each_pillow(size: tuple[int, int], to: tuple[int, int]) -> None:
    """Width first before 12.2; then height first for images 100 times as high as wide, from 13 on
    where it shrinks by twice as many pixels."""
    pixels = picture((1, *size, 3), True, 5)
    width_first = in_integers(in_integers(pixels[0].numpy(), to[1], 1), to[0], 0)
    height_first = in_integers(in_integers(pixels[0].numpy(), to[0], 0), to[1], 1)
    assert (width_first != height_first).any()
    shrinks = to[0] < size[0]
    tall, turned = size[0] > 100 * size[1], 2 * (size[1] - to[1]) < size[0] - to[0]
    for version, turns in ((10, False), ("12.1", False), ("12.2", tall), (12, tall), (13, turned)):
        first = shrinks and turns
        expected = height_first if first else width_first
        np.testing.assert_array_equal(resize(pixels, *to, pillow=version)[0].numpy(), expected)
    assert installed_pillow() == importlib.metadata.version("pillow")
    with pytest.raises(ValueError, match="pillow is 'new'; it must be a version"):
        resize(pixels, *to, pillow="new")


def test_without_pillow_its_version_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = torch.zeros(1, 4, 4, 3, dtype=torch.uint8)
    installed_pillow.cache_clear()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match="install pillow, or say .* pillow=.13"):
        resize(frames, 2, 2)
    assert resize(frames, 2, 2, pillow=12).shape == (1, 2, 2, 3)


def test_writes_into_out_and_reads_only_frames(isa: str) -> None:
    """Guard bytes around both; the fourth byte of a pixel is not looked at."""
    for size, to in [((7, 5), (9, 21)), ((40, 30), (9, 29))]:  # each order of passes
        pixels = picture((1, *size, 4), False, 1)
        other = pixels.clone()
        other[..., 3] = 255 - pixels[..., 3]
        assert torch.equal(resize(pixels, *to), resize(other, *to))
        room = torch.full((3, *to, 3), 7, dtype=torch.uint8)
        assert resize(pixels, *to, out=room[1:2]).data_ptr() == room[1].data_ptr()
        assert torch.equal(room[1:2], resize_reference(pixels, *to))
        assert (room[0] == 7).all() and (room[2] == 7).all()
        strided = pixels[..., :3].transpose(1, 2)  # of the frames
        assert torch.equal(resize(strided, *to), resize_reference(strided.contiguous(), *to))


def test_threads_may_call_at_once() -> None:
    pixels = picture((2, 300, 400, 3), False, 2)
    expected, results = resize_reference(pixels, 84, 112), []
    workers = [
        threading.Thread(target=lambda: results.append(resize(pixels, 84, 112, threads=2)))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4 and all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": torch.zeros(1, 8, 8, 3)}, r"frames is float32 \[1, 8, 8, 3\] on cpu; it must"),
        ({"frames": torch.zeros(8, 8, 3, dtype=torch.uint8)}, "it must be uint8"),
        ({"frames": torch.zeros(1, 8, 0, 3, dtype=torch.uint8)}, "none of them 0"),
        ({"frames": torch.zeros(1, 8, 8, 2, dtype=torch.uint8)}, r"or \[T, H, W, 4\]"),
        ({"height": 0}, "height is 0; it must be at least 1"),
        ({"width": 2**24}, "a side of the result has 16777216 pixels"),
        ({"threads": 0}, "threads is 0; it must be at least 1"),
        ({"threads": 1.5}, "threads is 1.5; it must be a whole number"),
        ({"height": 3.5}, "height is 3.5; it must be a whole number"),
        ({"width": True}, "width is True; it must be a whole number"),
        ({"out": torch.zeros(1, 4, 5, 3, dtype=torch.uint8)}, r"it must be \[1, 4, 4, 3\]"),
        ({"out": torch.zeros(1, 4, 3, 4, dtype=torch.uint8).mT}, "and contiguous"),
    ],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    arguments = {
        "frames": torch.zeros(1, 8, 8, 3, dtype=torch.uint8),
        "height": 4,
        "width": 4,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        resize(**arguments)


def test_without_torch() -> None:
    """Decoder processes call it through the native module alone."""
    script = """
import sys
import numpy as np
from PIL import Image
from vlmtrain.data.media.native import resize
pixels = np.random.default_rng(3).integers(0, 256, (50, 70, 3), dtype=np.uint8)
expected = np.asarray(Image.fromarray(pixels).resize((84, 28), Image.Resampling.BICUBIC))
assert (resize(pixels, 28, 84) == expected).all()
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
