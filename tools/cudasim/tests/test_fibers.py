"""The emulator's own checks fire, and do not fire without cause; its products are right."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest

from .. import CSRC
from ..fibers.build import HERE, Library
from ..fibers.device import Device
from ..floats import from_float, to_float
from ..ptx.ptxtypes import SimError

#: In the order of programs.cu; None runs clean.
PROGRAMS: list[tuple[str, str | None]] = [
    ("clean", None),
    ("no barrier", "race: .* (written|read) by thread .* without a barrier|never written"),
    ("no barrier in the warp", "race: read .*without a barrier between"),
    ("write after read", "race: (write of .*, read|read of .*, written) by thread"),
    ("unwritten", "read of byte .* which was never written"),
    ("copy not waited for", "while cp.async of thread .* is under way"),
    ("one group too few", "while cp.async of thread .* is under way"),
    ("waited, no barrier", "(while cp.async of thread|written by thread|was never written)"),
    ("never waited", "ends with cp.async under way"),
    ("divergent barrier", "deadlock: 32 at barrier 0; 32 of 64 threads have left"),
    ("divergent shuffle", "deadlock: .* at shfl.sync; .* threads have left"),
    ("mixed instructions", "a lane is at .* while others of its warp are at"),
    ("shared bounds", "out of bounds: write of 4 bytes at byte 512 of 512 of shared"),
    ("global bounds", "out of bounds: read of 4 bytes at byte 512 of 'data' .512 bytes."),
    ("race in global memory", "race: .*'data' that another thread of the block"),
    ("race of blocks", "race: .*'data' that another (block|thread of the block)"),
    ("constant that is written", "ld.global.nc of bytes of 'data' that this launch writes"),
    ("misaligned", "misaligned write of 8 bytes of global memory"),
    ("wild", "wild read of 4 bytes"),
    ("named barriers", None),
    ("count of a named barrier", "barrier 2 is for (32|64) threads and for|deadlock"),
]


def _program(library: Library, rng: np.random.Generator, which: int) -> Device:
    device = Device(library, int(rng.integers(1 << 62)))
    data = rng.standard_normal(128).astype(np.float32)
    arguments = (device.memory.upload("data", data), device.memory.reserve("out", (64,), "f4"))
    launcher = library.function("emulated_program")
    assert device.call(launcher, which, *map(ctypes.c_void_p, arguments)) == 0
    out = device.memory.array("out")
    if which == 0:
        np.testing.assert_array_equal(out, np.roll(data[:64], 32))
    return device


@pytest.mark.parametrize(("name", "message"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_programs(name: str, message: str | None, library: Library, rng) -> None:
    """Whatever the schedule: 5 of them."""
    which = [n for n, _ in PROGRAMS].index(name)
    for _ in range(5):
        if message is None:
            _program(library, rng, which)
            continue
        with pytest.raises(SimError, match=message) as caught:
            _program(library, rng, which)
        print(caught.value)
        assert "programs.cu:" in str(caught.value), "the error names no line"


def test_every_program_is_run(library: Library) -> None:
    assert library.function("emulated_programs")() == len(PROGRAMS)


@pytest.mark.parametrize(
    ("header", "some"),
    [
        ("sm80.cuh", {"load_once", "copy_async", "multiply_add", "trap"}),
        ("sm90.cuh", {"barrier_wait", "load_box", "give_registers", "rows", "columns"}),
    ],
)
def test_every_primitive_has_a_twin(header: str, some: set[str]) -> None:
    """Names that kernels may use with nvcc; the converse holds once both are written. Products of
    two tiles in shared memory get their names, rows and deep, as a macro's first argument."""
    pattern = r"(?:__forceinline__ [^=;{]*?\b(?=\w+\()|VLMK_WGMMA_SHARED\((?!name))(\w+)"
    real, twins = (
        set(re.findall(pattern, path.read_text())) - {"name"}
        for path in (CSRC / "cuda" / "ptx" / header, HERE / "include" / "cuda" / "ptx" / header)
    )
    assert some <= real
    assert real <= twins, f"no twin of {sorted(real - twins)}"


def test_shared_memory_must_be_asked_for(library: Library) -> None:
    device = Device(library, 1)
    with pytest.raises(SimError, match="launch refused: 1 blocks of 32 threads with 65536 bytes"):
        device.call(library.function("emulated_large_block"))


@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products(dtype: str, depth: int, library: Library, rng: np.random.Generator) -> None:
    """ldmatrix and mma against numpy in float64, rounded once."""
    a, b = (from_float(rng.standard_normal(s), dtype) for s in ((16, depth), (depth, 8)))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    device = Device(library, int(rng.integers(1 << 62)))
    upload = device.memory.upload
    addresses = (upload("a", a), upload("b", b), upload("c", c))
    launcher = library.function("emulated_product")
    bf16 = ctypes.c_bool(dtype == "bfloat16")
    assert device.call(launcher, bf16, depth, *map(ctypes.c_void_p, addresses)) == 0
    exact = c + to_float(a, dtype).astype(np.float64) @ to_float(b, dtype).astype(np.float64)
    error = np.abs(device.memory.array("c") - exact).max()
    assert error <= 2.0**-23 * np.abs(exact).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_conversions(dtype: str, library: Library, rng: np.random.Generator) -> None:
    """Every finite half, the midpoints between them, and any float, as numpy rounds."""
    name = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    narrow, widen = library.function(f"to_{name}"), library.function(f"from_{name}")
    narrow.argtypes, narrow.restype = [ctypes.c_float], ctypes.c_uint16
    widen.argtypes, widen.restype = [ctypes.c_uint16], ctypes.c_float
    largest = 0x7F80 if dtype == "bfloat16" else 0x7C00
    bits = np.arange(largest, dtype=np.uint16)
    halves = to_float(bits if dtype == "bfloat16" else bits.view(np.float16), dtype)
    assert [widen(int(b)) for b in bits[::7]] == halves[::7].tolist()
    middles = (halves[:-1].astype(np.float64) + halves[1:]) / 2
    random = rng.integers(0, 0x7F800000, 2000, dtype=np.uint32).view(np.float32)
    for values in (halves[::5], middles[::5].astype(np.float32), random, -random, -halves[:2]):
        expected = from_float(values, dtype).view(np.uint16)
        assert [narrow(float(x)) for x in values] == expected.tolist()
