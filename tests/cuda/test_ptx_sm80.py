"""Tiled attention as nvcc compiled it, against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.cudasim.floats import same_bits
from tools.cudasim.ptx.ptxtypes import SimError

from .cases.tiled import check_flash, run_flash, small_suite
from .cases.vision import check_tiled
from .cases.window import Case
from .checks import CASES
from .interpreted import Interpreted, copy_csrc, single, tiled
from .mutants import canary_cases

DIM = 80  # the instance that is built here: make test-flash runs them all


@pytest.fixture(scope="session")
def flash(fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Interpreted:
    folder = tmp_path_factory.mktemp("flash")
    return tiled(copy_csrc(folder, dim=DIM), folder, fake_runtime, "80")


@pytest.mark.parametrize("name", sorted({"gap", "stale", *small_suite(DIM), *canary_cases("sm80")}))
def test_accuracy(name: str, flash: Interpreted, rng: np.random.Generator) -> None:
    CASES["sm80"][name](flash, rng)


def test_a_correction_of_nothing_is_1(flash: Interpreted) -> None:
    """Or the sums of long rows would shrink or grow block by block."""
    exponents = flash.exponents()
    assert exponents and not any(fusible for _, fusible in exponents), exponents


@pytest.mark.slow
def test_vision_at_head_dim_72(
    fake_runtime: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Half of its row is 4.5 units of 16 bytes: rotated 4 columns at a time. Five heads:
    rotate_rows takes four."""
    csrc = copy_csrc(tmp_path, dim=72, types=("Fp16Math",))
    kernels = single("sm80-vision", csrc, tmp_path, fake_runtime)
    check_tiled(kernels, rng, [0, 20, 1], 5, 72, "float16", megatron=True, scale=-0.3)
    with pytest.raises(SimError, match="vision_attention: segment 0 is tokens 0 to 6 of 6, and"):
        check_tiled(kernels, rng, [6], 1, 72, "float16", max_seqlen=5)


@pytest.mark.slow
def test_same_bits_whatever_else_is_in_the_batch(
    flash: Interpreted, rng: np.random.Generator
) -> None:
    """A segment's results don't depend on its place in the list of tiles."""
    case = Case(rng, [135], 2, 1, DIM, "float16")
    _, alone = run_flash(flash, case)
    batch = Case(rng, [140, 135, 3], 2, 1, DIM, "float16")
    for name in ("q", "k", "v", "dout"):
        getattr(batch, name)[140:275] = getattr(case, name)
    _, among = run_flash(flash, batch)
    for name in ("out", "dq", "dk", "dv"):
        same_bits(among[name][140:275], alone[name], f"{name}, in a batch")


def test_list_of_many_tiles(flash: Interpreted, rng: np.random.Generator) -> None:
    """More segments than the list's kernel has threads, most of them empty."""
    lengths = np.where(rng.random(300) < 0.02, rng.integers(1, 20, 300), 0)
    lengths[[7, 290]] = 129, 257
    check_flash(flash, Case(rng, lengths.tolist(), 1, 1, DIM), backward=False)


def test_a_too_long_segment_is_trapped(flash: Interpreted, rng: np.random.Generator) -> None:
    with pytest.raises(SimError, match="segment 1 is tokens 3 to 13 of 13, and max_seqlen is 5"):
        run_flash(flash, Case(rng, [3, 10], 1, 1, DIM, max_seqlen=5))


def test_no_segment(flash: Interpreted, rng: np.random.Generator) -> None:
    device, _ = run_flash(flash, Case(rng, [], 1, 1, DIM, max_seqlen=0), backward=False)
    assert device.launches == []
    device, actual = run_flash(flash, Case(rng, [0, 0], 1, 1, DIM))
    assert actual["out"].size == 0
