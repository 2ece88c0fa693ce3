"""Every instance of both ways for sm_90a and every planted bug: `make test-flash`, minutes.

test_flash_hopper_ptx.py, in make test, runs one instance and a part of the bugs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .attention_cases import Case
from .embedding_cases import same_bits
from .flash_build import HOPPER_GRAD_SOURCES, HOPPER_SOURCES, SOURCES, build_flash
from .flash_cases import FlashKernels, check_flash, hopper_grad_suite, hopper_suite, run_flash
from .flash_hopper_grad_mutants import CHECKS as GRAD_CHECKS
from .flash_hopper_grad_mutants import MUTANTS as GRAD_MUTANTS
from .flash_hopper_grad_mutants import HopperGradMutant
from .flash_hopper_mutants import CHECKS, DIM, MUTANTS, HopperMutant

DIMS = (64, 72, 80, 96, 128)


@pytest.fixture(scope="session", params=DIMS)
def instance(
    request: pytest.FixtureRequest, fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FlashKernels, int]:
    folder = tmp_path_factory.mktemp("hopper")
    kernels = build_flash(folder, fake_runtime, request.param, "90a", sources=HOPPER_GRAD_SOURCES)
    return kernels, request.param


@pytest.fixture(scope="session")
def gradients(fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> FlashKernels:
    folder, types = tmp_path_factory.mktemp("gradients"), ("Bf16Math",)
    return build_flash(folder, fake_runtime, DIM, "90a", types, sources=HOPPER_GRAD_SOURCES)


@pytest.mark.parametrize("name", hopper_suite(DIM))
def test_accuracy(name: str, instance: tuple[FlashKernels, int], rng: np.random.Generator) -> None:
    kernels, dim = instance
    hopper_suite(dim)[name](kernels, rng)


@pytest.mark.parametrize("name", hopper_grad_suite(DIM))
def test_accuracy_of_gradients(
    name: str, instance: tuple[FlashKernels, int], rng: np.random.Generator
) -> None:
    kernels, dim = instance
    hopper_grad_suite(dim)[name](kernels, rng)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_random_shapes(
    causal: bool, instance: tuple[FlashKernels, int], rng: np.random.Generator
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
    sources = SOURCES | HOPPER_SOURCES
    kernels = build_flash(tmp_path, fake_runtime, DIM, "90a", ("Bf16Math",), sources=sources)
    check_flash(kernels, Case(rng, [140, 20], 2, 1, DIM, causal=True, scale=-0.3))


@pytest.mark.parametrize("name", CHECKS)
def test_checks_of_the_planted_bugs_pass(
    name: str, fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Without a bug they do."""
    kernels = build_flash(tmp_path, fake_runtime, DIM, "90a", ("Bf16Math",), sources=HOPPER_SOURCES)
    CHECKS[name](kernels, rng)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_killed(
    mutant: HopperMutant, fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    mutant.must_be_noticed(fake_runtime, tmp_path, rng)


@pytest.mark.parametrize("name", GRAD_CHECKS)
def test_checks_of_planted_bugs_in_gradients_pass(
    name: str, gradients: FlashKernels, rng: np.random.Generator
) -> None:
    GRAD_CHECKS[name](gradients, rng)


@pytest.mark.parametrize("mutant", GRAD_MUTANTS, ids=lambda m: m.name)
def test_mutant_of_gradients_is_killed(
    mutant: HopperGradMutant, gradients: FlashKernels, tmp_path: Path, rng: np.random.Generator
) -> None:
    mutant.must_be_noticed(gradients, tmp_path, rng)
