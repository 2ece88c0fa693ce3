"""Every instance of tiled attention: `make test-flash`, minutes.

test_ptx_sm80.py, in make test, runs one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.cudasim.floats import same_bits
from tools.cudasim.ptx.toolchain import ARCHITECTURES

from .cases.tiled import check_flash, run_flash, small_suite
from .cases.vision import check_tiled, tiled_suite
from .cases.window import Case
from .interpreted import Interpreted, copy_csrc, single, tiled

DIMS = (64, 72, 80, 96, 128)


@pytest.fixture(scope="session", params=[(d, a) for d in DIMS for a in ARCHITECTURES], ids=str)
def instance(
    request: pytest.FixtureRequest, fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Interpreted, int]:
    dim, architecture = request.param
    folder = tmp_path_factory.mktemp("flash")
    return tiled(copy_csrc(folder, dim=dim), folder, fake_runtime, architecture), dim


@pytest.mark.parametrize("name", small_suite(80))
def test_accuracy(name: str, instance: tuple[Interpreted, int], rng: np.random.Generator) -> None:
    kernels, dim = instance
    small_suite(dim)[name](kernels, rng)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_random_shapes(
    causal: bool, instance: tuple[Interpreted, int], rng: np.random.Generator
) -> None:
    kernels, dim = instance
    for dtype in ("bfloat16", "float16"):
        kv_heads = int(rng.integers(1, 3))
        lengths = [*rng.choice([0, 1, 63, 64, 65, 127, 128, 129, 190, 300], 2).tolist(), 2]
        heads = kv_heads * int(rng.integers(1, 4))
        scale = float(rng.choice([0.05, 0.125, -0.2]))
        print(lengths, heads, kv_heads, dim, dtype, causal, scale)
        case = Case(rng, lengths, heads, kv_heads, dim, dtype, causal, scale)
        found = check_flash(kernels, case)
        _, again = run_flash(kernels, case)
        for name in ("out", "dq", "dk", "dv"):
            same_bits(again[name], found[name], f"{name}, again")


# ---- vision_attention


@pytest.fixture(scope="session", params=[(d, a) for d in DIMS for a in ARCHITECTURES], ids=str)
def vision_instance(
    request: pytest.FixtureRequest, fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Interpreted, int]:
    dim, architecture = request.param
    folder = tmp_path_factory.mktemp("vision")
    csrc = copy_csrc(folder, dim=dim)
    return single("sm80-vision", csrc, folder, fake_runtime, architecture), dim


@pytest.mark.parametrize("name", tiled_suite())
def test_vision_accuracy(
    name: str, vision_instance: tuple[Interpreted, int], rng: np.random.Generator
) -> None:
    kernels, dim = vision_instance
    tiled_suite(dim)[name](kernels, rng)


def test_vision_random_shapes(
    vision_instance: tuple[Interpreted, int], rng: np.random.Generator
) -> None:
    kernels, dim = vision_instance
    for dtype in ("bfloat16", "float16"):
        lengths = [2, *rng.choice([0, 1, 63, 65, 127, 128, 129, 190, 300], 2).tolist()]
        heads, megatron = int(rng.integers(1, 4)), bool(rng.random() < 0.5)
        scale = float(rng.choice([0.05, 0.125, -0.2]))
        print(lengths, heads, dim, dtype, megatron, scale)
        check_tiled(kernels, rng, lengths, heads, dim, dtype, megatron=megatron, scale=scale)
