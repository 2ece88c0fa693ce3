"""Every instance of tiled attention: `make test-flash`, minutes.

test_ptx_sm80.py and test_ptx_sm90.py, in make test, run one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.cudasim.floats import same_bits
from tools.cudasim.ptx.toolchain import ARCHITECTURES

from .cases.tiled import (
    Check,
    check_flash,
    run_flash,
    sm90_grad_suite,
    sm90_suite,
    small_suite,
)
from .cases.vision import check_tiled, tiled_suite
from .cases.window import Case
from .interpreted import Interpreted, copy_csrc, single, tiled

DIMS = (64, 72, 80, 96, 128)
INSTANCES = [(dim, architecture) for dim in DIMS for architecture in ARCHITECTURES]
LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 190, 300, 513]
Built = tuple[Interpreted, int]  # and head_dim


@pytest.fixture(scope="session", params=INSTANCES, ids=str)
def instance(
    request: pytest.FixtureRequest, fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory
) -> Built:
    dim, architecture = request.param
    folder = tmp_path_factory.mktemp("flash")
    return tiled(copy_csrc(folder, dim=dim), folder, fake_runtime, architecture), dim


@pytest.fixture(scope="session", params=INSTANCES, ids=str)
def vision_instance(
    request: pytest.FixtureRequest, fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory
) -> Built:
    dim, architecture = request.param
    folder = tmp_path_factory.mktemp("vision")
    csrc = copy_csrc(folder, dim=dim)
    return single("sm80-vision", csrc, folder, fake_runtime, architecture), dim


def suite(architecture: str, dim: int = 80) -> dict[str, Check]:
    checks = small_suite(dim)
    if architecture == "90a":
        checks |= {f"forward, {name}": check for name, check in sm90_suite(dim).items()}
        checks |= {f"backward, {name}": check for name, check in sm90_grad_suite(dim).items()}
    return checks


@pytest.mark.parametrize(
    ("instance", "name"),
    [((dim, a), name) for dim, a in INSTANCES for name in suite(a)],
    indirect=["instance"],
    ids=str,
)
def test_accuracy(name: str, instance: Built, rng: np.random.Generator) -> None:
    kernels, dim = instance
    suite(kernels.architecture, dim)[name](kernels, rng)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_random_shapes(causal: bool, instance: Built, rng: np.random.Generator) -> None:
    kernels, dim = instance
    for dtype in ("bfloat16", "float16"):
        kv_heads = int(rng.integers(1, 3))
        lengths = [*rng.choice(LENGTHS, 3).tolist(), 2]
        heads = kv_heads * int(rng.integers(1, 4))
        scale = float(rng.choice([0.05, 0.125, -0.2]))
        print(lengths, heads, kv_heads, dim, dtype, causal, scale)
        case = Case(rng, lengths, heads, kv_heads, dim, dtype, causal, scale)
        actual = check_flash(kernels, case)
        _, again = run_flash(kernels, case)
        for name in ("out", "dq", "dk", "dv"):
            same_bits(again[name], actual[name], f"{name}, again")


def test_gradients_from_statistics_of_sm90(
    fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """mma.sync's backward, which follows either forward."""
    csrc = copy_csrc(tmp_path, types=("Bf16Math",))
    kernels = tiled(csrc, tmp_path, fake_runtime, "90a", backward="80")
    check_flash(kernels, Case(rng, [140, 20], 2, 1, 80, causal=True, scale=-0.3))


@pytest.mark.parametrize("dim", DIMS)
def test_one_backward_kernel(
    dim: int, fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    csrc = copy_csrc(tmp_path, dim=dim)
    kernels = tiled(csrc, tmp_path, fake_runtime, "90a", backward="fused")
    for check in sm90_grad_suite(dim, fused=True).values():
        check(kernels, rng)


# ---- vision_attention


@pytest.mark.parametrize("name", tiled_suite())
def test_vision_accuracy(name: str, vision_instance: Built, rng: np.random.Generator) -> None:
    kernels, dim = vision_instance
    tiled_suite(dim)[name](kernels, rng)


def test_vision_random_shapes(vision_instance: Built, rng: np.random.Generator) -> None:
    kernels, dim = vision_instance
    for dtype in ("bfloat16", "float16"):
        lengths = [2, *rng.choice(LENGTHS[:-1], 1).tolist(), 33]
        heads, megatron = int(rng.integers(1, 4)), bool(rng.random() < 0.5)
        scale = float(rng.choice([0.05, 0.125, -0.2]))
        print(lengths, heads, dim, dtype, megatron, scale)
        check_tiled(kernels, rng, lengths, heads, dim, dtype, megatron=megatron, scale=scale)
