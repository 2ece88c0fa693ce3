"""The Megatron optimizer of a run: distributed AdamW shards and our CPU Adam."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from vlmkernels.integrations.megatron import offload
from vlmtrain.checkpoint.training.optimizer_state import create_state, distributed_parts
from vlmtrain.core.config import OptimizerSection, offload_fractions
from vlmtrain.core.spec import ModelSpec
from vlmtrain.cpu.adam import use_cpu_adam
from vlmtrain.training.learning_rate import lr_overrides


def build_optimizer(
    section: OptimizerSection,
    spec: ModelSpec,
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
    overrides = get_standard_config_overrides(config)
    overrides.update(lr_overrides(section, spec, [chunk.module for chunk in chunks]))
    optimizer = get_megatron_optimizer(
        config, chunks, overrides, pg_collection=groups, use_gloo_process_groups=groups is None
    )
    for part in distributed_parts(optimizer):
        use_cpu_adam(part)
        if not any(offload_fractions(section).values()):
            use_fused_adam(part)
        create_state(part)
    offload(optimizer, section.offload_fraction, early=True)
    return optimizer


def use_fused_adam(part: DistributedOptimizer, device: str = "cuda") -> None:
    """torch's AdamW, which Megatron takes without transformer-engine and apex, as one kernel. As a
    loop over lists it is some twenty passes, and holds more float32 numbers a parameter meanwhile.
    """
    inner = part.optimizer
    parameters = [p for group in inner.param_groups for p in group["params"]]
    if isinstance(inner, torch.optim.Adam) and {p.device.type for p in parameters} == {device}:
        for group in inner.param_groups:
            group.update(fused=True, foreach=False)


def offload_fraction(section: OptimizerSection, step: int) -> float:
    """Share of the state to be in host memory at 0-based `step`."""
    fractions = offload_fractions(section)
    return fractions[max(first for first in fractions if first <= step + 1)]


def set_learning_rate(optimizer: MegatronOptimizer, section: OptimizerSection, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
        group["weight_decay"] = section.weight_decay * group["wd_mult"]
