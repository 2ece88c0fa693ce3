"""Model and hardware FLOPs against what torch counts in real megatron-core stages: freezing,
adapters, recomputation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.reference import make_model
from tests.plan.worker import results
from vlmtrain.core.config import FreezeSection, LoraSection, RecomputeSection
from vlmtrain.models import flops
from vlmtrain.models.family import parse_spec
from vlmtrain.parallel.layout import make_layout
from vlmtrain.plan.hardware import Peak
from vlmtrain.telemetry.ledger import Ledger

TOKENS, GRIDS = 96, [[1, 8, 12], [2, 4, 6]]
ALL = {"rank": 4, "vision": True}
CASES: list[dict[str, Any]] = [
    {},
    {"family": "qwen2_vl"},
    {"recompute": ["full", "selective"]},
    {"family": "qwen2_vl", "recompute": ["selective", "full"]},
    {"freeze": {"vision": True}, "recompute": ["full", "full"]},
    {"freeze": {"vision": True, "merger": True}},
    {"freeze": {"language": True}, "recompute": ["none", "selective"]},
    {"lora": ALL},
    {"family": "qwen2_vl", "lora": {**ALL, "targets": ["qkv", "fc2", "o_proj", "up_proj"]}},
    {"lora": {"rank": 3}},
    {"lora": {"rank": 3, "targets": ["down_proj"]}},
    {"lora": {"rank": 3, "targets": ["o_proj", "q_proj"]}},
    {"lora": ALL, "recompute": ["selective", "selective"]},
    {"lora": ALL, "recompute": ["full", "full"]},
    {"lora": {"rank": 3}, "recompute": ["none", "selective"]},
    {"lora": {"rank": 3}, "recompute": ["none", "full"]},
]
CASES = [
    {"family": "qwen2_5_vl", "tokens": TOKENS, "targets": 7 + i, "grids": GRIDS, **case}
    for i, case in enumerate(CASES)
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results("flops_worker", CASES, tmp_path_factory.mktemp("flops"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_hardware_flops_to_the_last_multiply(number: int, measured: list[dict[str, Any]]) -> None:
    case, real = CASES[number], measured[number]
    spec = parse_spec(make_model(case["family"], vision_heads=4).config.to_dict())
    lora = LoraSection(**case.get("lora", {}))
    work = flops.Work.of([TOKENS], GRIDS, spec.vision, targets=case["targets"])
    ledger = Ledger(
        spec,
        make_layout(spec, world_size=1),
        Peak(None, ""),
        FreezeSection(**case.get("freeze", {})),
        lora,
        RecomputeSection(*case.get("recompute", ("none", "none"))),
    )
    assert ledger.executed(work) == real["flops"]
    assert real["grads"] == real["learning"], "a parameter that learns got no gradient"
