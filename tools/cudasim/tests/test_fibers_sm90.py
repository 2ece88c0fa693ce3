"""Hopper's instructions in the emulator: conformance, and a pipeline with one thing wrong."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from ..fibers.build import Library
from ..fibers.device import Device
from ..floats import from_float, to_float
from ..ptx.ptxtypes import SimError
from .conformance import (
    COLUMN_PRODUCTS,
    ROW_PRODUCTS,
    Simulator,
    check_box,
    check_column_product,
    check_row_product,
)

#: In the order of hopper_errors.cu; None runs clean.
ERRORS: list[tuple[str, str | None]] = [
    ("right", None),
    ("full buffer not awaited", "never written|tensor copy to it is under way|did not wait for"),
    ("awaited by one lane", "by a warpgroup of which a thread did not wait"),
    ("wrong phase", "never written|tensor copy to it is under way|deadlock"),
    ("empty buffer not awaited", "which a wgmma .* reads|too many at|under way"),
    ("freed before the wait", "tensor copy of byte .* which a wgmma of warpgroup 0 reads"),
    # By the schedule the read comes before the copy, or while it is under way.
    ("freed before a read", "read by thread .* without a barrier|tensor copy to it is under way"),
    ("never freed", "deadlock: .*phase . lacks 4 of 4 arrivals"),
    ("too many bytes", "deadlock: .*lacks 0 of 1 arrivals and 16 bytes"),
    ("too few bytes", "deadlock: .*lacks 0 of 1 arrivals and -16 bytes"),
    ("announced twice", "an arrival too many at the mbarrier"),
    ("no barrier", "is no initialised mbarrier"),
    ("initialised twice", "is initialised twice"),
    ("misaligned barrier", "mbarrier at byte 16388 is misaligned"),
    ("no barrier between", "is no initialised mbarrier|an mbarrier at byte .* without a barrier"),
    ("no fence of barriers", "before a fence_barrier_init of thread 0"),
    ("barrier written", "st.shared of byte .* which belongs to an mbarrier"),
    ("copy nobody awaits", "ends with 1 tensor copies under way"),
    ("misaligned copy", "no multiple of 128"),
    ("copy past the end", "tensor copy of byte .*mbarrier|out of bounds: tensor copy"),
    ("no map", "that cuTensorMapEncodeTiled did not write"),
    ("accumulators changed", "accumulators of a wgmma under way were changed"),
    ("operands changed", "registers that a wgmma under way reads were changed"),
    (
        "one group too few",
        "reads that the thread is not|ends with wgmmas under way|without a wgmma",
    ),
    ("never committed", "reads that the thread is not|ends with wgmmas under way"),
    ("no fence", "a wgmma without a wgmma_fence"),
    ("fenced once", "a wgmma without a wgmma_fence"),
    ("a warp missing", "a lane is at .* while others|deadlock"),
    ("two descriptors", "descriptors or the predicate of a wgmma differ"),
    ("middle of a pattern", "in the middle of 8 rows of 128 bytes"),
    ("matrix past the end", "out of bounds: wgmma"),
    ("plain write", "wgmma of byte 0 .* thread 0 wrote without a fence_async_proxy"),
    ("fenced by another", "wgmma of byte 0 .* thread 0 wrote without a fence_async_proxy"),
    ("plain write, no barrier", "race: wgmma of byte 0 .*written by thread 0 without a barrier"),
    ("write while read", "st.shared of byte .*, which a wgmma of warpgroup 0 reads"),
    ("registers not given", "deadlock: .*128 at setmaxnreg.inc, for registers"),
    ("odd registers", "setmaxnreg to 236: multiples of 8"),
    ("given where taken", "setmaxnreg.inc to 40 of a warpgroup that has 168"),
]


def _simulator(library: Library, rng: np.random.Generator) -> Simulator:
    return Device(library, int(rng.integers(1 << 62)), capability=90), library.function


@pytest.mark.parametrize("which", range(len(ERRORS)), ids=[name for name, _ in ERRORS])
def test_pipeline(which: int, library: Library, rng: np.random.Generator) -> None:
    """Whatever the schedule and the order of copies: 5 of them."""
    message = ERRORS[which][1]
    for _ in range(5):
        device, function = _simulator(library, rng)
        rows = from_float(rng.standard_normal((256, 64)), "bfloat16")
        addresses = device.memory.upload("x", rows), device.memory.reserve("out", (64, 64), "f4")
        arguments = (which, *(ctypes.c_void_p(a) for a in addresses))
        if message is not None:
            with pytest.raises(SimError, match=message) as caught:
                device.call(function("hopper_error"), *arguments)
            print(caught.value)
            continue
        assert device.call(function("hopper_error"), *arguments) == 0
        x = to_float(rows, "bfloat16").astype(np.float64).reshape(4, 64, 64)
        exact = np.einsum("tik,tjk->ij", x, x) + x[:, :16].sum((0, 1))
        terms = np.einsum("tik,tjk->ij", abs(x), abs(x)) + abs(x[:, :16]).sum((0, 1))
        error = np.abs(device.memory.array("out") - exact) / terms
        assert error.max() < 20 * 2.0**-24  # 20 products, each rounded once


def test_every_error_is_run(library: Library) -> None:
    assert library.function("hopper_errors")() == len(ERRORS)


@pytest.mark.parametrize("chunk", [64, 32, 16])
def test_boxes(chunk: int, library: Library, rng: np.random.Generator) -> None:
    for _ in range(6):
        check_box(_simulator(library, rng), rng, chunk)


@pytest.mark.parametrize("case", ROW_PRODUCTS, ids=str)
def test_row_products(
    case: tuple[int, int, int, str], library: Library, rng: np.random.Generator
) -> None:
    check_row_product(_simulator(library, rng), rng, *case)


@pytest.mark.parametrize("case", COLUMN_PRODUCTS, ids=str)
def test_column_products(
    case: tuple[int, int, int, str], library: Library, rng: np.random.Generator
) -> None:
    check_column_product(_simulator(library, rng), rng, *case)
