"""Offloaded DistributedOptimizer on four processes, gradients copied during the backward pass; part
of `make test-layouts`, see test_megatron.py."""

from __future__ import annotations

from typing import Any

from tests.checkpoint.test_resharding import same
from tests.optim.test_megatron import BOTH, SEED, STEPS, run
from tests.parity import reference as ref

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 tp2 sp": dict(tensor=2, sequence=True),
    "dp2 pp2": dict(pipeline=2),
    "dp2 pp2 vpp2": dict(pipeline=2, virtual_pipeline=2),
    "pp2 multiplexed": dict(pipeline=2, multiplexed=True),
}


def test_bits_of_the_plain_optimizer_on_four(tmp_path):
    print(f"seed {SEED}")
    model = ref.make_model("qwen2_5_vl", vision_heads=4, tied=True, seed=SEED)
    common = dict(
        model=ref.save_model(model, tmp_path / "m"),
        steps=STEPS,
        overlap=BOTH,
        bucket_size=50_000,
    )
    cases = []
    for layout in LAYOUTS.values():
        plain = dict(common, layout=layout)
        cases += [plain, dict(plain, delayed=True, fractions=[1.0] * 3)]
    results = run(cases, tmp_path, 4)
    for name, expected, actual in zip(LAYOUTS, results[::2], results[1::2], strict=True):
        same(actual["state"], expected["state"], name)
        assert actual["losses"] == expected["losses"], name
