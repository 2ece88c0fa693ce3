"""The Megatron optimizer of a run: distributed AdamW shards, our CPU Adam, and load fixes.

megatron-core 0.16.1 without transformer-engine or apex has three faults in restoring a
distributed optimizer; `load_state` works around them, each where it is named.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from vlmkernels import CPUAdam
from vlmtrain.config import OptimizerSection


def build_optimizer(
    section: OptimizerSection, chunks: list[Any], dtype: torch.dtype
) -> MegatronOptimizer:
    """AdamW over the chunks' gradient buffers, its state sharded over data-parallel ranks.

    Make it after the weights are loaded: the float32 master copies are taken here.
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
    optimizer = get_megatron_optimizer(config, chunks)
    for part in distributed_parts(optimizer):
        _use_our_adam(part)
        _create_state(part)
    return optimizer


def distributed_parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The optimizers of this rank that have parameters (a wholly frozen stage has none)."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not part.is_stub_optimizer]


def _use_our_adam(part: DistributedOptimizer) -> None:
    """Host shards are stepped by CPUAdam: one native call instead of a loop over tensors."""
    inner = part.optimizer
    groups = [g for g in inner.param_groups if g["params"]]
    if not groups or any(p.is_cuda for g in groups for p in g["params"]):
        return
    first = groups[0]
    ours = CPUAdam(
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


def _create_state(part: DistributedOptimizer) -> None:
    """Zero moments from the start: megatron-core asserts when it saves or loads without them."""
    inner = part.optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            if not inner.state[parameter]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0, dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def load_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, exact."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # It copies every key of the inner state, but 'step' is not among the saved tensors.
        if "step" not in tensors:
            group, order = self.model_param_group_index_map[model_param]
            inner = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
            tensors = {**tensors, "step": inner["step"]}
        original(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    try:
        optimizer.load_state_dict(state)
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original
    for part in distributed_parts(optimizer):
        for entry in part.optimizer.state.values():
            # After a load all parameters share one tensor, which each step would then advance
            # once per parameter.
            entry["step"] = entry["step"].detach().clone()


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
