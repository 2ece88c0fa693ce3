"""Every instance of both ways for sm_90a: `make test-flash`, minutes.

test_ptx_sm90.py, in make test, runs one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.cudasim.floats import same_bits

from .cases.tiled import check_flash, hopper_grad_suite, hopper_suite, run_flash
from .cases.window import Case
from .interpreted import Interpreted, copy_csrc, tiled

DIM = 80
DIMS = (64, 72, 80, 96, 128)


@pytest.fixture(scope="session", params=DIMS)
def instance(
    request: pytest.FixtureRequest, fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Interpreted, int]:
    folder = tmp_path_factory.mktemp("hopper")
    csrc = copy_csrc(folder, dim=request.param)
    return tiled(csrc, folder, fake_runtime, "90a"), request.param


@pytest.mark.parametrize("name", hopper_suite(DIM))
def test_accuracy(name: str, instance: tuple[Interpreted, int], rng: np.random.Generator) -> None:
    kernels, dim = instance
    hopper_suite(dim)[name](kernels, rng)


@pytest.mark.parametrize("name", hopper_grad_suite(DIM))
def test_accuracy_of_gradients(
    name: str, instance: tuple[Interpreted, int], rng: np.random.Generator
) -> None:
    kernels, dim = instance
    hopper_grad_suite(dim)[name](kernels, rng)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_random_shapes(
    causal: bool, instance: tuple[Interpreted, int], rng: np.random.Generator
) -> None:
    kernels, dim = instance
    for dtype in ("bfloat16", "float16"):
        kv_heads = int(rng.integers(1, 3))
        lengths = [*rng.choice([0, 1, 63, 64, 65, 127, 128, 129, 190, 300, 513], 3).tolist(), 2]
        heads = kv_heads * int(rng.integers(1, 4))
        scale = float(rng.choice([0.05, 0.125, -0.2]))
        print(lengths, heads, kv_heads, dim, dtype, causal, scale)
        case = Case(rng, lengths, heads, kv_heads, dim, dtype, causal, scale)
        found = check_flash(kernels, case)
        _, again = run_flash(kernels, case)
        for name in ("out", "dq", "dk", "dv"):
            same_bits(again[name], found[name], f"{name}, again")


def test_gradients_from_its_statistics(
    fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """mma.sync's backward, which follows either forward."""
    csrc = copy_csrc(tmp_path, dim=DIM, types=("Bf16Math",))
    kernels = tiled(csrc, tmp_path, fake_runtime, "90a", backward="80")
    check_flash(kernels, Case(rng, [140, 20], 2, 1, DIM, causal=True, scale=-0.3))
