"""Fixtures: random inputs, and embedding.cu built once for the session."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .embedding_cases import Kernels
from .toolchain import (
    ARCHITECTURES,
    CSRC,
    Build,
    build_fake_runtime,
    build_kernels,
    missing_tool,
)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Random inputs from the test's printed seed (tests/conftest.py)."""
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def fake_runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := missing_tool():
        pytest.skip(f"CUDA kernels were not run: {reason}")
    return build_fake_runtime(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="session")
def embedding_build(fake_runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("embedding") / "build"
    return build_kernels(CSRC / "cuda" / "embedding.cu", folder, ARCHITECTURES)


@pytest.fixture(params=ARCHITECTURES, ids=lambda a: f"sm_{a}")
def kernels(request: pytest.FixtureRequest, embedding_build: Build, fake_runtime: Path) -> Kernels:
    return Kernels(embedding_build, fake_runtime, request.param)
