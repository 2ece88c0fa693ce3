"""One of two ranks whose gradients change after the backward pass without a new version, see
test_hybrid.py: bits must be those of CPUAdam on the same gradients."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
