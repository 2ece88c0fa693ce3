"""Fixtures: the kernels built once for the session, with every mutant behind a switch."""

from __future__ import annotations

import numpy as np
import pytest

from .build import CSRC, HERE, Library, build, compiler
from .instances import EDIT, SOURCES
from .test_mutants import MUTANTS


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Random inputs from the test's printed seed (tests/conftest.py)."""
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    if compiler() is None:
        pytest.skip("CUDA kernels were not emulated: no g++ (CXX names another)")
    sources = [CSRC / "cuda" / name for name in SOURCES]
    folder = tmp_path_factory.mktemp("emulation")
    sources += [HERE / f"{name}.cu" for name in ("programs", "hopper_programs", "hopper_errors")]
    return build(folder / "build", sources, "checked", MUTANTS, EDIT)
