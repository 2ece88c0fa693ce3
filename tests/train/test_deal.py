"""The gradient of a global batch does not depend on how it is packed, dealt or divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.test_parity import check_gradients
from tests.ranks import run_ranks


def gradients(case: dict[str, Any], size: int, folder: Path) -> dict[str, Any]:
    path = folder / f"case{size}.pt"
    torch.save(case, path)
    ranks = run_ranks(["tests/train/deal_worker.py", str(path)], size)
    assert all(rank.code == 0 for rank in ranks), "\n".join(r.output[-3000:] for r in ranks)
    return torch.load(path.with_suffix(".out"), weights_only=False)


def test_the_gradient_does_not_depend_on_the_deal(model, conversations, tmp_path):
    """Full packs dealt by cost, and a sample a pack, on one rank and on two. The samples have from
    one to many target tokens, so that a mean of means would show."""
    samples = json.loads(conversations.read_text())
    for number, sample in enumerate(samples):
        sample["conversations"][-1]["value"] = " ".join(["red cup"] * (1 + number * number // 4))
        if "image" in sample:
            names = sample["image"] if isinstance(sample["image"], list) else [sample["image"]]
            sample["image"] = [str(conversations.parent / name) for name in names]
    data = tmp_path / "c.json"
    data.write_text(json.dumps(samples))
    case = {"model": model, "data": data, "pack_length": 192}
    alone = gradients({**case, "policies": ["balanced", "none"]}, 1, tmp_path)
    both = gradients({**case, "policies": ["none"]}, 2, tmp_path)
    want = alone["none"]
    dealt = {id_ for pack in both["none"]["places"][0] for id_ in pack}
    assert 0 < len(dealt) < len(samples)  # each rank has its own
    assert len(alone["balanced"]["places"][0]) < len(samples)  # several samples share a pack
    for name, got in (("balanced", alone["balanced"]), ("two ranks", both["none"])):
        everything = [id_ for rank in got["places"] for pack in rank for id_ in pack]
        assert sorted(everything) == sorted(sample["id"] for sample in samples), name
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-6), name
        check_gradients(got["gradients"], want["gradients"], 1e-5, name)
