"""Fixtures: random inputs, and the small programs built once for the session."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.conftest import seed  # noqa: F401  a fixture

from ..fibers.build import Library, build, compiler
from ..ptx.toolchain import fake_runtime, missing_tool

HERE = Path(__file__).resolve().parent


@pytest.fixture
def rng(seed: int) -> np.random.Generator:  # noqa: F811
    """Random inputs from the test's printed seed."""
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    if compiler() is None:
        pytest.skip("programs were not emulated: no g++ (CXX names another)")
    sources = [HERE / f"{name}.cu" for name in ("programs", "sm90_programs", "sm90_errors")]
    return build(tmp_path_factory.mktemp("fibers") / "build", sources)


@pytest.fixture(scope="session", name="fake_runtime")
def make_fake_runtime() -> Path:
    if reason := missing_tool():
        pytest.skip(f"programs were not interpreted: {reason}")
    return fake_runtime()
