"""torch's fused AdamW in Megatron's optimizer: the results of the plain one, steps where it reads
them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.kernels.numeric import assert_accurate
from vlmtrain.checkpoint.training.optimizer_state import create_state
from vlmtrain.training.optimizer import use_fused_adam


def part_of(parameters: list[torch.nn.Parameter]) -> Any:
    """What Megatron's DistributedOptimizer is here: one that has torch's."""
    options: Any = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return SimpleNamespace(optimizer=torch.optim.AdamW(parameters, **options))


def test_same_results() -> None:
    check("cpu")


def check(device: str) -> None:
    start = [torch.randn(n) for n in (1, 40, 1000)]
    grads = [[torch.randn_like(x) for x in start] for _ in range(5)]
    found = {}
    for kind in ("fused", "plain", "exact"):
        wide = torch.float64 if kind == "exact" else torch.float32
        parameters = [torch.nn.Parameter(x.to(device, wide, copy=True)) for x in start]
        part = part_of(parameters)
        if kind == "fused":
            use_fused_adam(part, device)
            assert part.optimizer.param_groups[0]["fused"]
        create_state(part)
        steps = [entry["step"] for entry in part.optimizer.state.values()]
        for of_step in grads:
            for parameter, grad in zip(parameters, of_step, strict=True):
                parameter.grad = grad.to(device, wide)
            part.optimizer.step()
        assert [float(step) for step in steps] == [5.0] * 3, "counted in the state's own tensors"
        where = device if kind == "fused" else "cpu"
        assert all(step.device.type == where for step in steps)
        found[kind] = parameters
    for ours, plain, exact in zip(*(found[k] for k in ("fused", "plain", "exact")), strict=True):
        noise = exact.detach().abs() * 2**-23
        assert_accurate("weights", ours.detach(), plain.detach(), exact.detach(), noise)


def test_not_where_other_devices_hold_a_part() -> None:
    part = part_of([torch.nn.Parameter(torch.ones(3))])
    use_fused_adam(part)
    assert not part.optimizer.param_groups[0].get("fused")
