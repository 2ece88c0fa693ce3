"""Fixtures: random inputs, and the kernels built once for the session, for either engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.cudasim import CSRC
from tools.cudasim.fibers.build import Library, build, compiler
from tools.cudasim.ptx.toolchain import (
    ARCHITECTURES,
    Build,
    build_kernels,
    fake_runtime,
    missing_tool,
)

from .instances import INSTANCES, edits
from .interpreted import SINGLE, Interpreted, of_build
from .mutants import ON_FIBERS


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Random inputs from the test's printed seed (tests/conftest.py)."""
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """All kernels on fibers, every mutant behind a switch."""
    if compiler() is None:
        pytest.skip("CUDA kernels were not emulated: no g++ (CXX names another)")
    folder = tmp_path_factory.mktemp("fibers")
    sources = sorted((CSRC / "cuda").rglob("*.cu"))
    return build(folder / "build", sources, "checked", edits(INSTANCES, ON_FIBERS))


@pytest.fixture(scope="session", name="fake_runtime")
def make_fake_runtime() -> Path:
    if reason := missing_tool():
        pytest.skip(f"CUDA kernels were not run: {reason}")
    return fake_runtime()


@pytest.fixture(scope="session")
def embedding_build(fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("embedding") / "build"
    return build_kernels(CSRC / SINGLE["embedding"][0], folder, ARCHITECTURES)


@pytest.fixture(params=ARCHITECTURES, ids=lambda a: f"sm_{a}")
def kernels(
    request: pytest.FixtureRequest, embedding_build: Build, fake_runtime: Path
) -> Interpreted:
    """Visual embedding on the interpreter."""
    return of_build(embedding_build, "embedding_{}_cuda", fake_runtime, request.param)
