"""One of two ranks, see test_hybrid.py. Their gradients change after the backward pass without a
new version: bits must be those of CPUAdam on the same gradients. DTensors are refused."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.kernels.numeric import assert_bitwise  # noqa: E402
from vlmkernels import CPUAdam, HybridDeviceOptimizer  # noqa: E402


def added_up(model: nn.Module, rank: int, optimizer: Any) -> None:
    """The mean of gradients over ranks, by the script itself."""
    model(torch.full((2, 6), rank + 1.0)).square().sum().backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)


def bucket_views(model: nn.Module, rank: int, optimizer: Any) -> None:
    """DistributedDataParallel reduces memory that the gradients are views of."""
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        parallel(torch.full((2, 6), rank + 1.0)).square().sum().backward()


def shards_are_refused() -> None:
    """DTensors, as FSDP2 makes parameters, have no memory of their own."""
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(nn.Linear(6, 4), mesh=mesh)
    for make in (
        CPUAdam,
        HybridDeviceOptimizer,
        lambda params: HybridDeviceOptimizer(params, offload_fraction=0.0),
    ):
        try:
            make(model.parameters())
        except ValueError as error:
            assert "a parameter is a DTensor" in str(error) and "to_local()" in str(error), error
        else:
            raise AssertionError("a DTensor was taken")
    param = nn.Parameter(torch.zeros(6))
    optimizer = CPUAdam([param])
    param.decoupled_grad = distribute_tensor(torch.ones(6), mesh)  # type: ignore[attr-defined]
    for use in (optimizer.step, optimizer.grad_norm):
        try:
            use()
        except ValueError as error:
            assert "a gradient is a DTensor" in str(error), error
        else:
            raise AssertionError("a DTensor was taken")


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for train in (added_up, bucket_views):
        torch.manual_seed(1)
        ours = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        theirs = copy.deepcopy(ours)
        optimizers = HybridDeviceOptimizer(ours.parameters()), CPUAdam(theirs.parameters())
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            for _ in range(2):
                train(model, rank, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_bitwise(train.__name__, a.detach(), b.detach())
    shards_are_refused()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
