"""Tiled attention for sm_90a as nvcc compiled it, against float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tools.cudasim.floats import same_bits

from .cases.tiled import check_flash, run_flash
from .cases.window import Case
from .checks import CASES
from .interpreted import Interpreted, copy_csrc, tiled
from .mutants import canary_cases

DIM = 80
#: make test-flash runs every instance and all cases.
QUICK = ("ragged", "neighbours", "stale")
QUICK_GRADIENTS = ("causal, negative scale, groups", "groups, scores far below zero")


@pytest.fixture(scope="session")
def sm90(fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Interpreted:
    folder = tmp_path_factory.mktemp("sm90")
    return tiled(copy_csrc(folder, dim=DIM), folder, fake_runtime, "90a")


@pytest.mark.parametrize("name", sorted({*QUICK, *canary_cases("sm90-forward")}))
def test_accuracy(name: str, sm90: Interpreted, rng: np.random.Generator) -> None:
    CASES["sm90-forward"][name](sm90, rng)


@pytest.mark.parametrize("name", sorted({*QUICK_GRADIENTS, *canary_cases("sm90-backward")}))
def test_accuracy_of_gradients(name: str, sm90: Interpreted, rng: np.random.Generator) -> None:
    CASES["sm90-backward"][name](sm90, rng)


def test_a_correction_of_nothing_is_1(sm90: Interpreted) -> None:
    """Or the sums of long rows would shrink or grow block by block."""
    exponents = sm90.exponents()
    assert exponents and not any(fusible for _, fusible in exponents), exponents


@pytest.mark.slow
def test_one_backward_kernel(fake_runtime: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    """Its blocks run together, and their sums of dq are the same bits in any order of running."""
    csrc = copy_csrc(tmp_path, dim=DIM, types=("Bf16Math",))
    kernels = tiled(csrc, tmp_path, fake_runtime, "90a", backward="fused")
    CASES["sm90-fused"]["causal groups"](kernels, rng)
    case = Case(rng, [270], 1, 1, DIM, fused=True)
    actual = check_flash(kernels, case)
    _, again = run_flash(kernels, case)
    same_bits(again["dq"], actual["dq"], "dq, again")


@pytest.mark.slow
def test_each_device_by_its_own_size(sm90: Interpreted, rng: np.random.Generator) -> None:
    """A block for each multiprocessor of the current device, shared memory asked for there, and
    the stream that was given: the second device has 5, the first 3."""
    for number, processors in ((0, 3), (1, 5), (0, 3)):
        there = replace(sm90, device_number=number, stream=70 + number)
        device, _ = run_flash(there, Case(rng, [20] * 3, 2, 2, DIM))
        grids = {dims[0] for name, dims in device.launches if "sm90" in name}
        assert grids == {processors}
        assert set(device.streams) == {70 + number} and len(device.streams) == 5


def test_no_token(sm90: Interpreted, rng: np.random.Generator) -> None:
    """No tensor map describes a tensor without elements."""
    for lengths in ([], [0, 0]):
        _, actual = run_flash(sm90, Case(rng, lengths, 1, 1, DIM, max_seqlen=0))
        assert actual["out"].size == actual["dq"].size == 0
