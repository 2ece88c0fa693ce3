"""One rank of an offloaded Megatron run: cases as in tests/checkpoint/worker.py, which does the
work, and in addition `fractions`, one a step, `delayed`, `gradients` (a type), and `loss_scale`,
with which the second step gets an infinite gradient on the last rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.checkpoint import worker  # noqa: E402
from tests.optim.delayed import DelayedTransfers  # noqa: E402
from vlmtrain import device  # noqa: E402

plain_build = worker.build


def parts(engine: Any) -> list[Any]:
    found = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    return [part for part in found if not part.is_stub_optimizer]


def check_share(engine: Any, fraction: float) -> None:
    """As much as was asked for is in host memory: the shards are small enough to come near."""
    for part in parts(engine):
        every = [p for group in part.optimizer.param_groups for p in group["params"]]
        share = sum(p.numel() for p in getattr(part, "_shards", {}))
        total = sum(p.numel() for p in every)
        assert 0.95 * fraction * total <= share <= fraction * total, (share, total, fraction)


def spoil(engine: Any, scale: float) -> None:
    """A constant loss scale, and an infinity in the second step."""
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    steps = 0
    for part in parts(engine):
        part.grad_scaler, part.found_inf = ConstantGradScaler(scale), torch.zeros(1)
    plain = engine.optimizer.step

    def step() -> Any:
        nonlocal steps
        steps += 1
        if steps == 2 and dist.get_rank() == dist.get_world_size() - 1:
            buffer = parts(engine)[0].buffers[0].grad_data
            buffer[-buffer.numel() // 4] = float("inf")  # in this rank's shard
        result = plain()
        assert result[0] is (steps != 2)
        return result

    engine.optimizer.step = step


def build(case: dict[str, Any], backend: device.Backend) -> tuple[Any, int]:
    from vlmkernels.integrations.megatron_optimizer import check_masters, offload

    engine, length = plain_build(case, backend)
    fractions = list(case.get("fractions", []))
    transfers = DelayedTransfers() if case.get("delayed") else None
    options = dict(gradients=case.get("gradients"), bucket_bytes=20_000, transfers=transfers)
    if case.get("load") and fractions:  # the state goes where it will be
        offload(engine.optimizer, fractions[0], **options)
    plain_step = engine.step

    def step(packs: list[Any], lr: float) -> Any:
        if fractions:
            offload(engine.optimizer, fractions[0], **options)
            check_share(engine, fractions.pop(0))
        check_masters(engine.optimizer)
        result = plain_step(packs, lr)
        check_masters(engine.optimizer)
        return result

    engine.step = step
    if case.get("loss_scale"):
        spoil(engine, case["loss_scale"])
    return engine, length


if __name__ == "__main__":
    worker.build = build
    worker.main()
