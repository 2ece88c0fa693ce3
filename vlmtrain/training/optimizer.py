"""The Megatron optimizer of a run: distributed AdamW shards and our CPU Adam."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from vlmkernels.integrations.megatron import offload
from vlmtrain.checkpoint.training.optimizer_state import create_state, distributed_parts
from vlmtrain.core.config import OptimizerSection, offload_fractions
from vlmtrain.cpu.adam import use_cpu_adam


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
        use_cpu_adam(part)
        create_state(part)
    offload(optimizer, section.offload_fraction, early=True)
    return optimizer


def offload_fraction(section: OptimizerSection, step: int) -> float:
    """Share of the state to be in host memory at 0-based `step`."""
    fractions = offload_fractions(section)
    return fractions[max(first for first in fractions if first <= step + 1)]


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
