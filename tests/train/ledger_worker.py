"""Real engines with delays in known places, as one of two ranks (`ranks.run_cases`), and each
step's waterfall.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.plan.megatron_worker import make_batch
from tests.worker import serve
from vlmtrain.core import device
from vlmtrain.core.config import OptimizerSection
from vlmtrain.core.spec import ModelSpec
from vlmtrain.models.family import read_spec
from vlmtrain.parallel.layout import make_layout
from vlmtrain.plan.hardware import Peak
from vlmtrain.telemetry.ledger import Ledger
from vlmtrain.training.engine import Engine

DELAY = 0.15
PACKS = 3  # per replica
CASES: dict[str, dict[str, Any]] = {
    "quiet replicas": {"layout": {}},
    "a slow replica": {"layout": {}, "slow_forward": 1},
    "a slow stage": {"layout": {"pipeline": 2}, "slow_forward": 1},
    "slow reduction": {"layout": {"pipeline": 2}, "slow_reduction": True},
    "a slow optimizer": {"layout": {}, "slow_optimizer": True},
    "slow multiplexed vision": {
        "layout": {"pipeline": 2, "multiplexed": True},
        "slow_vision": True,
    },
    "waiting for data": {"layout": {}, "slow_data": True},
    "saving": {"layout": {}, "slow_checkpoint": True},
}


def delayed(function: Any) -> Any:
    def run(*arguments: Any, **options: Any) -> Any:
        time.sleep(DELAY)
        return function(*arguments, **options)

    return run


def run(case: dict[str, Any], spec: ModelSpec, backend: device.Backend) -> dict[str, Any]:
    from megatron.core import parallel_state

    rank = dist.get_rank()
    layout = make_layout(spec, world_size=2, **case["layout"])
    engine = Engine(spec, layout, backend, dtype=torch.float32, timeout=20)
    group = parallel_state.get_tensor_model_parallel_group()._get_backend(torch.device("cpu"))
    assert group.options._timeout == timedelta(minutes=40)  # as launch.connect gives to all
    engine.prepare(OptimizerSection())
    if case.get("slow_forward") == rank:
        engine.stages[0].forward = delayed(engine.stages[0].forward)
    if case.get("slow_reduction"):
        engine.chunks[0].finish_grad_sync = delayed(engine.chunks[0].finish_grad_sync)
    if case.get("slow_optimizer"):
        engine.optimizer.step = delayed(engine.optimizer.step)
    if case.get("slow_vision"):
        engine.replica.forward = delayed(engine.replica.forward)
    ledger = Ledger(spec, layout, Peak(1e9, "a made-up device"))
    packs = [make_batch(spec, 40, [[1, 8, 8]]).padded_to(50) for _ in range(PACKS)]
    rows = []
    start = time.perf_counter()
    for _ in range(3):
        before = time.perf_counter()
        if case.get("slow_data"):
            time.sleep(DELAY)
        result = engine.step(packs, 1e-3, time.perf_counter() - before)
        saving = time.perf_counter()
        if case.get("slow_checkpoint"):
            time.sleep(DELAY)
        dist.barrier()
        end = time.perf_counter()
        rows.append({"seconds": end - start, **ledger.row(result, end - start, end - saving)})
        start = end
    parallel_state.destroy_model_parallel()
    return {"rows": rows[1:]}


def run_all(model: Path, backend: device.Backend) -> dict[str, Any]:
    spec = read_spec(model)
    return {name: run(case, spec, backend) for name, case in CASES.items()}


if __name__ == "__main__":
    serve(run_all)
