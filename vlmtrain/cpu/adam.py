"""Megatron's DistributedOptimizer where all of its shards are on the host: stepped by CPUAdam.

Megatron clips gradients in a pass of its own and rounds the masters in another. CPUAdam does both
in its pass: gradients are multiplied by the clip factor as they are read, and rounded weights are
written beside the masters. The bits are those of three passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from vlmkernels import CPUAdam
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
        self._steps = False
        for master, weights in self._shards():
            if weights.dtype == torch.bfloat16:
                self.optimizer.set_low_precision(master, weights)

    def _shards(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's float32 masters, and their weights in the model's buffers."""
        models = chain(*self.model_fp32_groups, *self.model_float16_groups)
        masters = chain(*self.shard_fp32_groups, *self.shard_fp32_from_float16_groups)
        for model, master in zip(models, masters, strict=True):
            part = self._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            number, _, bucket = self.model_param_gbuf_map[model]
            weights = self.buffers[number].buckets[bucket].param_data.view(-1)
            yield master, weights[part.start : part.end]

    def _copy_model_grads_to_main_grads(self) -> None:
        super()._copy_model_grads_to_main_grads()
        self._probe.grad = torch.ones(1)

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """Megatron's choice."""
        group = getattr(self, "tp_group", None)
        return [
            p.grad
            for p in super().get_parameters()
            if p.grad is not None
            and param_is_not_shared(p)
            and tensor_parallel.param_is_not_tensor_parallel_duplicate(p, group)
        ]

    def get_parameters(self) -> list[Any]:
        """What Megatron clips."""
        return [self._probe]

    def step_with_ready_grads(self) -> bool:
        assert self._probe.grad is not None
        self.optimizer.grad_scale, self._steps = float(self._probe.grad), True
        try:
            return bool(super().step_with_ready_grads())
        finally:
            self.optimizer.grad_scale, self._steps = 1.0, False

    def _copy_main_params_to_model_params(self) -> None:
        if not self._steps:  # CPUAdam has written them; masters in float32 are the weights
            super()._copy_main_params_to_model_params()


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
