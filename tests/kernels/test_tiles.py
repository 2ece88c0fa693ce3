"""Attention on AMX tiles, compiled for this test: the stand-in of the tile instructions against
exact arithmetic; the real instructions against the stand-in, where the processor has none by traps;
every mutant of both sources.

The tests of attention and products run these kernels too, as the instruction sets amx_emulated and
amx_bf16.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda.mutants.mutant import Mutant, plant
from tests.cuda.params import fill, params_struct
from tests.kernels import (
    test_attention,
    test_product,
    test_qkv_attention,
    test_vision_attention,
)
from tests.kernels.numeric import assert_bitwise, isa, poisoned
from tests.kernels.tile_mutants import MUTANTS
from vlmkernels import _native, varlen_attention, vision_attention
from vlmkernels import product as products
from vlmkernels.attention.api import qkv_attention

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
AVX512 = "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl".split()
AMX = ["-mavx512bf16", "-mamx-tile", "-mamx-bf16"]
#: Set -> its name in dispatch.h.
SETS = {"amx_emulated": "kAmxEmulated", "amx_bf16": "kAmxBf16"}
SOURCES = [
    CSRC / "cpu" / name
    for name in (
        "scratch.cpp",
        "attention/launch.cpp",
        "attention/kernel.cpp",
        "product/tile_kernel.cpp",
    )
]

pytestmark = pytest.mark.skipif(
    "amx_emulated" not in _native.available_isas(), reason="this machine has no AVX-512"
)


def compiled(
    folder: Path, name: str, *sources: Path, csrc: Path = CSRC, include: Path | None = None
) -> ctypes.CDLL:
    """tiles.cpp and sources, for one instruction set."""
    compiler = shutil.which("g++") or pytest.skip("g++ is not installed")
    library = folder / f"{name}.so"
    command = [
        *(compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-w"),
        *(f"-DVLMK_ISA={name}", f"-DVLMK_TEST_ISA={SETS[name]}", "-DVLMK_TILES", f"-I{csrc}"),
        *(f"-DVLMKERNELS_HAVE_{name.upper()}", "-DVLMKERNELS_HAVE_AVX512", *AVX512),
        *(AMX if name == "amx_bf16" else []),
        *(["-DVLMK_WITH_KERNELS"] if sources else []),
        *(["-include", str(include)] if include else []),
        *("-o", str(library), str(HERE / "tiles.cpp"), *map(str, sources)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


# ---- the instructions ----------------------------------------------------------------------------


def fp32(x: Fraction) -> Fraction:
    """To nearest, ties to even; 0 where the result is too small to be normal."""
    if x == 0:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    rounded = round(x / Fraction(2) ** (exponent - 23)) * Fraction(2) ** (exponent - 23)
    return rounded if abs(rounded) >= Fraction(2) ** -126 else Fraction(0)


def exact_product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """TDPBF16PS and TDPFP16PS as Intel's manual has them. a [16, 32], b [16 pairs, 16, 2], c
    [16, 16]."""

    def operand(x: Any) -> Fraction:  # no number of fp16 is smaller
        return Fraction(float(x)) if abs(float(x)) >= 2.0**-126 else Fraction(0)

    left, right = (np.vectorize(operand, otypes=[object])(x) for x in (a, b))
    out = np.empty((16, 16))
    for i, n in np.ndindex(16, 16):
        chains = [Fraction(0), Fraction(0)]
        for k, half in np.ndindex(16, 2):
            chains[half] = fp32(chains[half] + left[i, 2 * k + half] * right[k, n, half])
        out[i, n] = fp32(operand(c[i, n]) + fp32(chains[0] + chains[1]))
    return out


#: Magnitudes of a, b and c, powers of two: usual ones; products and sums about the smallest normal
#: number; a's elements about it.
MAGNITUDES = {
    "bf16": [(0, 0, 0), (-65, -65, -128), (-126, 112, -14)],
    "fp16": [(0, 0, 0), (-18, -18, -128), (-14, 8, -6)],
}


def operands(
    rng: np.random.Generator, kind: str, magnitudes: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
    """a and b of a 16-bit type, c in fp32; 4 powers of two up and down."""
    shapes = ((16, 32), (16, 32), (16, 16))
    a, b, c = (
        rng.standard_normal(shape) * 2.0 ** (m + rng.integers(-4, 4, shape))
        for shape, m in zip(shapes, magnitudes, strict=True)
    )
    if kind == "fp16":
        return a.astype(np.float16), b.astype(np.float16), c.astype(np.float32)
    bits = [x.astype(np.float32).view(np.uint32) & 0xFFFF0000 for x in (a, b)]
    return bits[0].view(np.float32), bits[1].view(np.float32), c.astype(np.float32)


def product(library: ctypes.CDLL, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The library's, on rows with other things between them. a and b: fp16, or bf16 as floats."""
    fp16 = a.dtype == np.float16
    spaced = [np.full((16, 40), 0x7FC0, np.uint16) for _ in "ab"]  # NaN
    for to, x in zip(spaced, (a, b), strict=True):
        to[:, :32] = x.view(np.uint16) if fp16 else x.view(np.uint32) >> 16
    out = np.full((16, 24), np.nan, np.float32)
    out[:, :16] = c
    mode = library.tile_product(
        *(ctypes.c_void_p(spaced[0].ctypes.data), ctypes.c_ssize_t(80)),
        *(ctypes.c_void_p(spaced[1].ctypes.data), ctypes.c_ssize_t(80)),
        *(ctypes.c_void_p(out.ctypes.data), ctypes.c_ssize_t(96)),
        *(ctypes.c_bool(not c.any()), ctypes.c_bool(fp16)),
    )
    assert mode & 0xFFC0 == 0x1F80, "MXCSR is not as it was"
    assert np.isnan(out[:, 16:]).all(), "written behind the tile"
    return out[:, :16]


def check_instructions(library: ctypes.CDLL, rng: np.random.Generator) -> None:
    for kind, magnitudes in ((kind, m) for kind, all_ in MAGNITUDES.items() for m in all_):
        a, b, c = operands(rng, kind, magnitudes)
        for start in (c, np.zeros_like(c)):
            ours = product(library, a, b, start)
            exact = exact_product(a, b.reshape(16, 16, 2), start)
            np.testing.assert_array_equal(ours, exact, f"{kind} {magnitudes}")


def test_the_stand_in_multiplies_as_intels_manual_has_it(tmp_path, seed):
    check_instructions(compiled(tmp_path, "amx_emulated"), np.random.default_rng(seed))


# ---- attention -----------------------------------------------------------------------------------


class OnTiles:
    """The native module, attention and products from a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.native, self.library = _native._C, library

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def poison_scratch(self, on: bool) -> None:
        self.library.poison_scratch(ctypes.c_bool(on))

    def params(self, **values: Any) -> ctypes.Structure:
        stats = values.pop("row_stats")
        values |= {name: fill("HeadsView", **view(values[name])) for name in ("q", "k", "v", "out")}
        defaults: dict[str, Any] = {"causal": False, "max_seqlen": 0, "q_group_gap": 0}
        pointers = ("order", "rotary", "probabilities", "tiles", "rotated_k", "rotated_q")
        defaults |= dict.fromkeys(pointers)
        values["row_max"] = stats
        values["row_sum"] = stats + 4 * values["heads"] * values["tokens"]
        return fill("AttentionParams", **{**defaults, **values})

    def attention_forward(self, **values: Any) -> None:
        self.library.attention_forward(ctypes.byref(self.params(**values)))

    def attention_backward(self, **values: Any) -> None:
        own = ("dout", "dq", "dk", "dv")
        views = {name: fill("HeadsView", **view(values.pop(name))) for name in own}
        values.pop("lse_delta", None)
        unused = dict(lse_delta=None, dkv_parts=None, group_parts=1, dq_sum=None, done=None)
        params = fill("AttentionGradParams", forward=self.params(**values), **unused, **views)
        self.library.attention_backward(ctypes.byref(params))

    def matrix_product(self, *values: Any) -> None:
        fields = [name for name, _ in params_struct("ProductParams")._fields_]
        params = fill("ProductParams", **dict(zip(fields, values, strict=True)))
        self.library.matrix_product(ctypes.byref(params))


def view(x: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("data", "token_stride", "head_stride"), x, strict=True))


def cases() -> Iterator[tuple[Any, dict[str, Any]]]:
    """A module of tests, arguments of its check and outputs."""
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    for lengths, heads, kv_heads, dim, causal, dtype in (
        ([64, 17, 130], 2, 2, 80, False, bf16),
        ([1, 100], 4, 2, 72, True, bf16),
        ([1, 100], 4, 2, 72, True, fp16),
        ([600], 2, 1, 16, False, bf16),  # keys dealt out to two items
        ([48, 64], 2, 2, 32, False, bf16),  # read where they are
        ([64] * 128, 16, 16, 64, False, bf16),  # 16 MB of results: past the caches
        ([64, 17, 200], 2, 2, 80, False, fp32),
        ([1, 200], 4, 2, 72, True, fp32),
        ([600], 2, 1, 16, False, fp32),
    ):
        q, k, v, dout = test_attention.make(lengths, heads, kv_heads, dim, dtype)
        cu = test_attention.offsets(lengths)
        yield test_attention, {"q": q, "k": k, "v": v, "dout": dout, "cu": cu, "causal": causal}
    for grid, window, dtype in (
        ([[1, 12, 20]], False, bf16),  # whole
        ([[1, 12, 20]], False, fp32),
        ([[1, 16, 24]], True, bf16),  # windows of 64
        ([[1, 16, 24]], True, fp16),
    ):
        layout, qkv, dout = test_vision_attention.make(grid, 2, 80, dtype)
        yield test_vision_attention, {"layout": layout, "qkv": qkv, "dout": dout, "window": window}
    for dtype in (fp32, bf16):  # two query heads for a rotated key
        qkv, table, cu, dout = test_qkv_attention.make([64, 48], 1, 2, 32, dtype)
        arguments = {"qkv": qkv, "table": table, "cu": cu, "dout": dout, "causal": False}
        yield test_qkv_attention, arguments


def check_attention() -> None:
    with poisoned():
        for module, arguments in cases():
            module.check(**arguments)
        # Has gradients too small to be normal, which AVX-512 BF16 rounds to 0 and the stand-in not.
        test_attention.check(**test_attention.rising(torch.bfloat16))


def check_products() -> None:
    """Every orientation, several panels of either dtype; and that a number is all of its parts."""
    with poisoned():
        for dtype in (torch.float32, torch.bfloat16):
            for turned in itertools.product((False, True), repeat=2):
                for kind in test_product.KINDS:
                    test_product.check(*test_product.make(67, 45, 150, turned, dtype), kind)
            deep = test_product.make(40, 70, 2500, (False, True), dtype)
            for kind in test_product.KINDS:
                test_product.check(*deep, kind)
            test_product.check_past_the_caches(2091, dtype)
        test_product.check_all_of_a_number()


def results(module: Any, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    if module is test_attention:
        positional = [arguments[name] for name in ("q", "k", "v", "dout", "cu")]
        return module.outputs(varlen_attention, *positional, causal=arguments["causal"])
    if module is test_qkv_attention:
        positional = [arguments[name] for name in ("qkv", "dout", "table", "cu")]
        return module.outputs(qkv_attention, *positional, causal=arguments["causal"])
    positional = [arguments[name] for name in ("qkv", "dout", "layout")]
    return module.outputs(vision_attention, *positional, window=arguments["window"])


@contextmanager
def trapped(folder: Path, has_tiles: bool) -> Iterator[None]:
    """Tile instructions that the processor lacks by the signal handler of tile_traps.cpp."""
    library = folder / "tile_traps.so"
    flags = "-std=c++17 -O2 -mfma -mf16c -ffp-contract=off -fPIC -shared".split()
    command = ["g++", *flags, str(HERE / "tile_traps.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    traps = ctypes.CDLL(str(library))
    traps.trap_tile_instructions(ctypes.c_bool(True), ctypes.c_bool(has_tiles))
    try:
        yield
    finally:
        traps.trap_tile_instructions(ctypes.c_bool(False), ctypes.c_bool(has_tiles))


@pytest.mark.slow
def test_the_instructions_give_the_bits_of_the_stand_in(tmp_path, seed, monkeypatch):
    """The machine code for AMX itself: configuration, operands, strides."""
    if "avx512_bf16" not in _native.available_isas():
        pytest.skip("this machine has no AVX-512 BF16, which the kernels for AMX use too")
    library = compiled(tmp_path, "amx_bf16", *SOURCES)
    real = not _native._C.why_no_amx()
    fp16 = real and _native._C.tiles_multiply_fp16()
    print("real tiles" if real else "no tiles here: each instruction is trapped and carried out")
    print("real products of fp16" if fp16 else "no AMX-FP16 here: its product is trapped")
    with nullcontext() if fp16 else trapped(tmp_path, has_tiles=real):
        check_instructions(library, np.random.default_rng(seed))
        for module, arguments in cases():
            with isa("amx_emulated"):
                expected = results(module, arguments)
            with monkeypatch.context() as patch, poisoned():
                patch.setattr(_native, "_C", OnTiles(library))
                ours = results(module, arguments)
            for name in expected:
                assert_bitwise(name, ours[name], expected[name])


# ---- mutants -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every mutant behind a switch."""
    csrc = tmp_path_factory.mktemp("tiles") / "csrc"
    planted = [(f"::mutant == {i}", m) for i, m in enumerate(MUTANTS, 1)]
    for folder in ("common", "cpu"):
        shutil.copytree(CSRC / folder, csrc / folder)
    for path in [*csrc.rglob("*.h"), *csrc.rglob("*.inl"), *csrc.rglob("*.cpp")]:
        path.write_text(plant(path.read_text(), planted))
    declared = csrc / "mutant.h"
    declared.write_text('extern "C" int mutant;\n')
    sources = [csrc / source.relative_to(CSRC) for source in SOURCES]
    return compiled(csrc, "amx_emulated", *sources, csrc=csrc, include=declared)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [None, *MUTANTS], ids=str)
def test_mutant_is_noticed(
    mutant: Mutant | None, mutants: ctypes.CDLL, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_native, products):
        monkeypatch.setattr(module, "_C", OnTiles(mutants))

    def check() -> None:
        if mutant is None or mutant.family == "instructions":
            check_instructions(mutants, np.random.default_rng(seed))
        if mutant is None or mutant.family == "attention":
            check_attention()
        if mutant is None or mutant.family == "product":
            check_products()

    number = ctypes.c_int.in_dll(mutants, "mutant")
    number.value = 0 if mutant is None else 1 + MUTANTS.index(mutant)
    try:
        if mutant is None:
            return check()
        with pytest.raises(AssertionError):
            check()
    finally:
        number.value = 0
