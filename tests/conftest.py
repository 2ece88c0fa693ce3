"""Seeds and threads for every test.

Random inputs are fresh each run: the run's seed stands in pytest's header, a test's own seed is
printed with its failure. VLMKERNELS_TEST_SEED=<the run's seed> repeats a run.
"""

from __future__ import annotations

import os

# Before torch starts its threads: tests run side by side on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy
import pytest
import torch

from vlmtrain.cpu import shim

# In the environment: the workers of pytest-xdist share it.
os.environ.setdefault("VLMKERNELS_TEST_SEED", str(random.SystemRandom().randrange(2**31)))
RUN_SEED = int(os.environ["VLMKERNELS_TEST_SEED"])

hypothesis.settings.register_profile(
    "vlmkernels",
    deadline=None,  # shared machines stall
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("vlmkernels")
hypothesis.core.global_force_seed = RUN_SEED


#: Folders of tests that start processes or compile. They come first: dealt over the cores, none is
#: left with a long one at the end.
LONG = ("train", "checkpoint", "optim", "parity", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, otherwise in order."""
    items.sort(
        key=lambda item: LONG.index(n) if (n := item.path.parent.name) in LONG else len(LONG)
    )


@pytest.fixture(scope="module", autouse=True)
def no_shim() -> Iterator[None]:
    """Training in a test's process installs vlmtrain's CPU shim: other modules run without it."""
    yield
    shim.suspend()


def pytest_report_header() -> str:
    return f"VLMKERNELS_TEST_SEED={RUN_SEED} OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The demo's model folder of a family, random weights; not to be written to."""
    from vlmtrain.demo import command, tiny_model

    @functools.cache
    def folder(family: Any) -> Path:
        path = tmp_path_factory.mktemp("tiny") / "model"
        return tiny_model.write_folder(path, command.training_texts(), family=family)

    return folder


@pytest.fixture(scope="session")
def tiny_folder(tiny_folders: Callable[[str], Path]) -> Path:
    return tiny_folders("qwen2_5_vl")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """Seeds torch, numpy and random with a number that depends on the run's seed and the test."""
    value = (RUN_SEED + zlib.crc32(request.node.nodeid.encode())) % 2**31
    print(f"seed {value} of VLMKERNELS_TEST_SEED={RUN_SEED}")
    torch.manual_seed(value)
    numpy.random.seed(value)
    random.seed(value)
    threads = torch.get_num_threads()
    yield value
    torch.set_num_threads(threads)
