"""A small model folder and a few photographs with questions, as a user would have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmtrain.demo import photographs


@pytest.fixture(scope="session")
def model(tiny_folder) -> Path:
    return tiny_folder


@pytest.fixture(scope="session")
def conversations(tmp_path_factory) -> Path:
    """Twelve of the demo's samples, one without an image among them."""
    path = photographs.export(tmp_path_factory.mktemp("photographs"))
    samples = json.loads(path.read_text(encoding="utf-8"))
    text_only = [s for s in samples if "image" not in s]
    chosen = [s for s in samples if "image" in s][:11] + text_only[:1]
    assert len(chosen) == 12
    for sample in chosen:
        if "image" in sample:  # so that a copy of the file finds them from anywhere
            names = photographs.image_names(sample)
            sample["image"] = [str(path.parent / name) for name in names]
    path.write_text(json.dumps(chosen), encoding="utf-8")
    return path


OPTIONS = (
    "--train.pack_length=160 --train.global_batch_packs=4 --train.precision=fp32 "
    "--optimizer.lr=1e-3 --train.seed=3 --train.no_rehearse"
).split()


def options(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    """Arguments of a short run."""
    paths = [f"--model={model}", f"--data={data}", f"--output={output}"]
    return ["train", *paths, *OPTIONS, *more]


def losses(output: Path) -> list[float]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]
