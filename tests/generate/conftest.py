"""A small model that says what depends on what it sees, and things to show it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.data.helpers import save_image
from vlmtrain.demo import tiny_model
from vlmtrain.generate.model import Answerer


@pytest.fixture(
    scope="session",
    params=[
        "qwen2_5_vl",
        pytest.param("qwen3_vl", marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", marks=pytest.mark.slow),
    ],
)
def folder(
    request: pytest.FixtureRequest,
    tiny_folders: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The demo's model with weights so large that what it says depends on what it sees. It never
    says a special token: neither an end, which would come at random, nor a placeholder."""
    folder = tmp_path_factory.mktemp("loud") / "model"
    shutil.copytree(tiny_folders(request.param), folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)
    for tensor in weights.values():
        if tensor.dim() > 1:
            tensor.normal_(0.0, 0.09, generator=generator)
    weights["lm_head.weight"][-len(tiny_model.SPECIAL_TOKENS) :] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("pictures")
    save_image(target / "a.jpg", 150, 100, 1)
    save_image(target / "b.png", 70, 130, 2)
    frames = target / "film"
    frames.mkdir()
    for number in range(12):
        save_image(frames / f"{number:02}.png", 60, 60, 10 + number)
    return target


@pytest.fixture(scope="session")
def answerer(folder: Path) -> Answerer:
    return Answerer(folder)
