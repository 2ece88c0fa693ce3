"""One of two ranks, see test_hybrid.py. Their gradients change after the backward pass without a
new version: bits must be those of CPUAdam on the same gradients. CPUAdam steps the shards of FSDP2
as torch's AdamW does; HybridDeviceOptimizer refuses them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.kernels.numeric import assert_bitwise
from vlmkernels import CPUAdam, HybridDeviceOptimizer
from vlmtrain.core import launch


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


def sharded(seed: int) -> nn.Module:
    """By FSDP2, with shards of different sizes and one without elements."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2,))
    return fully_shard(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)), mesh=mesh)


def train_shards(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 6), rank + step + 1.0)).square().sum().backward()
        optimizer.step()


def shards_are_stepped(rank: int) -> None:
    for moments in (torch.float32, torch.bfloat16):
        models = [sharded(2) for _ in range(3)]
        ours = CPUAdam(models[0].parameters(), lr=0.1, moments=moments)
        theirs = torch.optim.AdamW(models[1].parameters(), lr=0.1, fused=True)
        train_shards(models[0], ours, rank)
        train_shards(models[1], theirs, rank)
        weights, state = copy.deepcopy(get_state_dict(models[0], ours))
        # The whole state is on its way through files, and comes back in another optimizer.
        fresh = CPUAdam(models[2].parameters(), lr=0.1, moments=moments)
        set_state_dict(models[2], fresh, model_state_dict=weights, optim_state_dict=state)
        for model, optimizer in ((models[0], ours), (models[1], theirs), (models[2], fresh)):
            train_shards(model, optimizer, rank)
        everything = zip(*(model.parameters() for model in models), strict=True)
        for param, peer, resumed in everything:
            assert_bitwise("resumed", resumed.to_local().detach(), param.to_local().detach())
            if moments == torch.float32:
                assert_bitwise("shard", param.to_local().detach(), peer.to_local().detach())
                for key in ("exp_avg", "exp_avg_sq"):
                    moment, expected = ours.state[param][key], theirs.state[peer][key]
                    assert moment.placements == expected.placements and moment.shape == param.shape
                    assert_bitwise(key, moment.to_local(), expected.to_local())


def whole_gradients_are_spread() -> None:
    """As transformers' tensor parallelism leaves an embedding's, against Adam on one rank."""
    ours = sharded(4)
    whole = nn.Parameter(ours[0].weight.full_tensor().detach().clone())
    grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(7))
    optimizers = (
        CPUAdam(ours.parameters(), lr=0.1),
        torch.optim.AdamW([whole], lr=0.1, fused=True),
    )
    for _ in range(2):
        ours[0].weight.grad = distribute_tensor(grad, ours[0].weight.device_mesh, [Replicate()])
        whole.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    assert_bitwise("spread", ours[0].weight.full_tensor().detach(), whole.detach())


def refused(call: Any, *words: str) -> None:
    try:
        call()
    except ValueError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"not refused: {words}")


def what_shards_are_refused() -> None:
    model = sharded(3)
    for make in (
        HybridDeviceOptimizer,
        lambda params: HybridDeviceOptimizer(params, offload_fraction=0.0),
    ):
        refused(lambda make=make: make(model.parameters()), "a parameter is a DTensor", "to_local")
    for settings in ({"moments": torch.uint8}, {"nonfinite": "skip"}):
        refused(lambda x=settings: CPUAdam(model.parameters(), **x), "a parameter is a DTensor")
    optimizer = CPUAdam(model.parameters())
    refused(lambda: optimizer.set_low_precision(model[0].bias, torch.zeros(1)), "is a DTensor")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    refused(optimizer.grad_norm, "parameters are DTensors")
    optimizer.step()
    state = optimizer.state[model[0].weight]
    state["exp_avg"] = state["exp_avg"].redistribute(placements=[Replicate()])
    refused(optimizer.step, "exp_avg of a parameter is spread as (Replicate()", "redistribute")
    del optimizer.state[model[0].weight]
    weight = model[0].weight
    for placement in (Partial(), Shard(1)):
        weight.grad = DTensor.from_local(
            torch.ones(5, 3) if placement == Shard(1) else torch.ones(5, 6),
            weight.device_mesh,
            [placement],
        )
        refused(optimizer.step, f"a gradient is spread as ({placement!r}", "redistribute")
    weight.grad = distribute_tensor(torch.ones(5, 6), init_device_mesh("cpu", (1, 2)))
    refused(optimizer.step, "a gradient is spread as (Replicate()", "redistribute")
    plain = nn.Parameter(torch.zeros(6))
    plain.decoupled_grad = distribute_tensor(  # type: ignore[attr-defined]
        torch.ones(6), model[0].weight.device_mesh
    )
    for use in (CPUAdam([plain]).step, CPUAdam([plain]).grad_norm):
        refused(use, "a gradient is a DTensor")


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
    shards_are_stepped(rank)
    whole_gradients_are_spread()
    what_shards_are_refused()
    dist.destroy_process_group()
    launch.leave(0)


if __name__ == "__main__":
    main()
