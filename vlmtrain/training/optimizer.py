"""The Megatron optimizer of a run: distributed AdamW shards and our CPU Adam."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from vlmkernels import CPUAdam
from vlmkernels.integrations.megatron import offload
from vlmtrain.checkpoint.training.optimizer_state import create_state, distributed_parts
from vlmtrain.core.config import OptimizerSection, offload_fractions


def build_optimizer(
    section: OptimizerSection,
    chunks: list[Any],
    dtype: torch.dtype,
    groups: ProcessGroupCollection | None = None,
) -> MegatronOptimizer:
    """AdamW over the chunks' gradient buffers, its state sharded over data-parallel ranks.

    Make it after the weights are loaded: the float32 master copies are taken here. `groups`
    replaces Megatron's global process groups for chunks that are spread otherwise.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.eps,
        clip_grad=section.clip,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(
        config, chunks, pg_collection=groups, use_gloo_process_groups=groups is None
    )
    for part in distributed_parts(optimizer):
        _use_our_adam(part)
        create_state(part)
    offload(optimizer, section.offload_fraction, early=True)
    return optimizer


class _HostAdam(CPUAdam):
    """CPUAdam out of reach of device.py's shim, which costs about 2 us a call."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return super().step(*args, **kwargs)


def _use_our_adam(part: DistributedOptimizer) -> None:
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


def offload_fraction(section: OptimizerSection, step: int) -> float:
    """Share of the state to be in host memory at 0-based `step`."""
    found = offload_fractions(section)
    return found[max(first for first in found if first <= step + 1)]


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Learning rate of 0-based `step`: linear warm-up to lr, then a half cosine to min_lr."""
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    span = max(1, total_steps - section.warmup_steps)
    progress = min(1.0, (step - section.warmup_steps) / span)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.min_lr + (section.lr - section.min_lr) * cosine


def set_learning_rate(optimizer: MegatronOptimizer, section: OptimizerSection, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = section.weight_decay * group.get("wd_mult", 1.0)
