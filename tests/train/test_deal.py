"""The gradient of a global batch does not depend on how it is packed, dealt or divided."""

from __future__ import annotations

import json

import pytest

from tests.parity.test_parity import check_gradients
from tests.ranks import run_cases


@pytest.mark.slow
def test_the_gradient_does_not_depend_on_the_deal(model, conversations, tmp_path):
    """On two ranks: full packs dealt by cost, packs in order, and a sample a pack. The samples have
    from one to many target tokens, so that a mean of means would show."""
    samples = json.loads(conversations.read_text())
    for number, sample in enumerate(samples):
        sample["conversations"][-1]["value"] = " ".join(["red cup"] * (1 + number * number // 4))
    data = tmp_path / "c.json"
    data.write_text(json.dumps(samples))
    policies = ["none", "balanced", "in_order"]
    case = {"model": model, "data": data, "pack_length": 320, "policies": policies}
    results = run_cases("tests.train.deal_worker", case, 2, tmp_path)
    want = results["none"]
    shares = set()
    for name, got in results.items():
        everything = [id_ for rank in got["places"] for pack in rank for id_ in pack]
        assert sorted(everything) == sorted(sample["id"] for sample in samples), name
        shares.add(frozenset(id_ for pack in got["places"][0] for id_ in pack))
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-6), name
        check_gradients(got["gradients"], want["gradients"], 1e-5, name)
    assert len(shares) >= 2  # the first rank had other samples
    assert len(results["balanced"]["places"][0]) < len(want["places"][0])  # shared packs
