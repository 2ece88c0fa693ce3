"""Softmax cross entropy as nvcc compiled it, against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.cudasim import CSRC
from tools.cudasim.ptx.toolchain import build_kernels

from .cases.loss import Chunk, run_loss
from .checks import CASES
from .interpreted import SINGLE, Interpreted, of_build

#: No instruction is of one architecture alone.
SLOW_TOO = ["80", pytest.param("90a", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SLOW_TOO, ids=lambda a: f"sm_{a}")
def kernels(
    request: pytest.FixtureRequest, fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory
) -> Interpreted:
    source, name = SINGLE["loss"]
    folder = tmp_path_factory.mktemp("loss") / "build"
    build = build_kernels(CSRC / source, folder, [request.param])
    return of_build(build, name, fake_runtime, request.param)


@pytest.mark.parametrize("name", CASES["loss"])
def test_accuracy(name: str, kernels: Interpreted, rng: np.random.Generator) -> None:
    CASES["loss"][name](kernels, rng)


def test_launch(kernels: Interpreted, rng: np.random.Generator) -> None:
    """A block a row; of as many threads as have four units of 16 bytes each, 128 to 512."""
    for columns, threads in ((1, 128), (8191, 128), (8192, 256), (16384, 512)):
        device = kernels.device()
        run_loss(kernels, Chunk(rng, 1, [columns]), True, device)
        assert [launch[1] for launch in device.launches] == [(1, 1, 1, threads, 1, 1)]
