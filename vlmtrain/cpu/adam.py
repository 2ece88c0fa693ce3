"""Megatron's DistributedOptimizer where all of its shards are on the host: stepped by CPUAdam.

Megatron clips gradients in a pass of its own and rounds the masters in another. CPUAdam does both
in its pass: gradients are multiplied by the clip factor as they are read, and rounded weights are
written beside the masters. The bits are those of three passes.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from vlmkernels import CPUAdam
from vlmkernels.integrations.megatron.optimizer import counts_for_norm, weights_of
from vlmtrain.cpu.shim import without_shim


class _HostAdam(CPUAdam):
    """CPUAdam out of reach of the shim, which costs about 2 us a call."""

    grad_scale = 1.0  # of the next step

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with without_shim():
            return super().step(*args, grad_scale=self.grad_scale, **kwargs)


class HostOptimizer(DistributedOptimizer):
    """A DistributedOptimizer becomes one by `use_cpu_adam`, until `offload` makes another of it."""

    optimizer: _HostAdam

    def begin(self) -> None:
        # The gradient that Megatron clips in place of all others: 1, so that it learns the factor.
        self._probe = torch.nn.Parameter(torch.zeros(1))
        models = chain(*self.model_float16_groups)
        masters = chain(*self.shard_fp32_from_float16_groups)
        for model, master in zip(models, masters, strict=True):
            self.optimizer.set_low_precision(master, weights_of(self, model))

    def _copy_model_grads_to_main_grads(self) -> None:
        super()._copy_model_grads_to_main_grads()
        self._probe.grad = torch.ones(1)

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        with without_shim():
            return [
                p.grad
                for p in super().get_parameters()
                if p.grad is not None and counts_for_norm(self, p)
            ]

    def get_parameters(self) -> list[Any]:
        """What Megatron clips."""
        return [self._probe]

    def step_with_ready_grads(self) -> bool:
        assert self._probe.grad is not None
        self.optimizer.grad_scale = float(self._probe.grad)
        try:
            return bool(super().step_with_ready_grads())
        finally:
            self.optimizer.grad_scale = 1.0

    def _copy_main_params_to_model_params(self) -> None:
        """Part of the step, which has written them; masters of float32 weights are the weights."""


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
    part.__class__ = HostOptimizer
    part.begin()
