"""The recipes of examples/recipes: read by the parser, laid out, counted by the planner."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.ranks import ROOT
from tests.released import released_spec
from vlmtrain.core.config import RecomputeSection, TrainConfig, from_toml
from vlmtrain.models.lora_costs import check_lora
from vlmtrain.plan.hardware import find_gpu
from vlmtrain.plan.peak import PeakModel
from vlmtrain.training.setup import run_layout

FOLDER = ROOT / "examples" / "recipes"
# The released models that the first line of each names.
MODELS = {
    "2b-full-1gpu": "qwen2_vl-2b qwen3_vl-2b",
    "3b-full-8gpu": "qwen2_5_vl-3b qwen3_vl-4b",
    "7b-lora-1gpu": "qwen2_vl-7b qwen2_5_vl-3b qwen2_5_vl-7b qwen3_vl-4b qwen3_vl-8b",
    "7b-full-8gpu": "qwen2_vl-7b qwen2_5_vl-7b qwen3_vl-8b",
    "7b-video-8gpu": "qwen2_vl-7b qwen2_5_vl-7b",
    "32b-full-8gpu": "qwen2_5_vl-32b qwen3_vl-32b",
    "32b-full-64gpu": "qwen2_5_vl-32b qwen3_vl-32b",
    "72b-lora-8gpu": "qwen2_vl-72b qwen2_5_vl-32b qwen2_5_vl-72b qwen3_vl-32b",
    "72b-full-64gpu": "qwen2_vl-72b qwen2_5_vl-72b",
}


def peak_bytes(config: TrainConfig, model: str, gpus: int) -> float:
    """Of the fullest pipeline rank in a step whose packs are full of image tokens."""
    spec, train = released_spec(model), config.train
    layout = run_layout(
        spec,
        config.parallel,
        gpus,
        global_batch=train.global_batch_packs,
        option="--train.global_batch_packs",
    )
    check_lora(config.lora, config.freeze, spec)
    patches = train.pack_length * spec.vision.merge_unit
    microbatches = train.global_batch_packs // layout.data
    tokens, patches_of = (
        np.full((1, microbatches), float(count)) for count in (train.pack_length, patches)
    )
    step = tokens, patches_of, np.array([patches / 2])  # a medium: half a pack
    models = (PeakModel(config, spec, layout, rank, cuda=True) for rank in range(layout.pipeline))
    return max(float(model.peaks(*step)[0]) for model in models)


def test_every_recipe_is_tested():
    assert {path.stem for path in FOLDER.iterdir()} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_recipe_is_read_runs_and_fits_in_80_gb(name):
    path = FOLDER / f"{name}.toml"
    blank = TrainConfig(model=Path(), data="d", output=Path("o"))
    config = from_toml(path, blank)
    config.validate()
    gpus = int(re.search(r"(\d+)gpu", name)[1])
    assert config.nproc == (gpus if gpus <= 8 else 0)  # several nodes have a launcher
    assert bool(config.lora.rank) == ("lora" in name)
    text = path.read_text(encoding="utf-8")
    assert f"--config examples/recipes/{name}.toml" in text
    peaks = {model: peak_bytes(config, model, gpus) for model in MODELS[name].split()}
    fullest = max(peaks.values())
    assert fullest < 0.97 * find_gpu("a100-80").usable_bytes, peaks
    assert f"# Memory: up to {fullest / 1e9:.0f} GB a GPU" in text, f"{name}: {fullest / 1e9:.1f}"
    plain = replace(config, recompute=RecomputeSection())
    if config != plain:  # nothing is computed again that could be kept
        without = max(peak_bytes(plain, model, gpus) for model in peaks)
        assert without > 0.97 * find_gpu("a100-80").usable_bytes
