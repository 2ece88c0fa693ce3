"""A tiny model and a few pictures, shared by the data tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import save_image, write_model_folder
from vlmtrain.core.spec import ModelSpec
from vlmtrain.data.processor import Processor
from vlmtrain.models.family import read_spec


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def spec(model_folder: Path) -> ModelSpec:
    return read_spec(model_folder)


@pytest.fixture(scope="session")
def processor(model_folder: Path, spec: ModelSpec) -> Processor:
    return Processor.from_folder(model_folder, spec)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures of several sizes and formats."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, (width, height) in enumerate([(80, 60), (57, 131), (200, 90), (28, 28)]):
        save_image(folder / f"p{number}.jpg", width, height, number)
    save_image(folder / "p4.png", 100, 100, 4)
    return folder
