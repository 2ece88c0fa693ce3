"""CPUAdam in place of the torch optimizer inside Megatron's, where all shards are on the host."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from vlmkernels import CPUAdam
from vlmtrain.cpu.shim import without_shim


class _HostAdam(CPUAdam):
    """CPUAdam out of reach of the shim, which costs about 2 us a call."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with without_shim():
            return super().step(*args, **kwargs)


def use_cpu_adam(part: DistributedOptimizer) -> None:
    """Host shards are stepped by CPUAdam: one native call instead of a loop over tensors."""
    inner = part.optimizer
    groups = [g for g in inner.param_groups if g["params"]]
    if not groups or any(p.is_cuda for g in groups for p in g["params"]):
        return
    first = groups[0]
    ours = _HostAdam(
        [torch.nn.Parameter(torch.zeros(1))],
        lr=first["lr"],
        betas=first["betas"],
        eps=first["eps"],
        weight_decay=first["weight_decay"],
    )
    # The shards are views of Megatron's buffers, which an optimizer's constructor refuses; its
    # step does not mind. The group dicts stay the same objects: Megatron holds on to them.
    for group in inner.param_groups:
        for key, value in ours.defaults.items():
            group.setdefault(key, value)
    ours.param_groups = inner.param_groups
    part.optimizer = ours
