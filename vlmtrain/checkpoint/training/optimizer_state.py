"""The optimizer's state in and out of checkpoints, exact on every layout.

Megatron's distributed optimizer keeps float32 weights and moments as flat slices of gradient
buffers. A checkpoint holds them by parameter, shaped like it, so that any layout can read them:
the keys and shapes of megatron-core's
`fully_reshardable` form. What of megatron-core 0.16.1 (without transformer-engine
or apex) must not be trusted on the way is worked around here and only here; each has a test in
tests/checkpoint/test_workarounds.py that also notices when it is no longer needed:

1. Saving or loading before the first step asserts or loses moments: they exist from the start
   (`create_state`).
2. Its loader asks each parameter's saved tensors for a 'step', which is not among them (KeyError):
   it is given one (`load`).
3. Its `load_state_dict` leaves one step tensor shared by all parameters, which every update then
   advances once per parameter: it is not called; each parameter has its own (`load`).
4. It saves step and parameter groups as rank 0 has them; a rank without trainable parameters has
   none. The step is agreed on by all ranks; groups are made from the configuration at each start.
5. Its gathering closes the gaps between buckets but goes on to use positions that count them:
   where a bucket's size is no multiple of 128, and a tied embedding alone makes two buckets, what
   lies behind is mixed up and its end is lost, with no more than a warning ("which can lead to
   data corruption"). The slices are gathered here (`_gathered`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from vlmtrain.checkpoint.megatron.source import STATES


def distributed_parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The optimizers of this rank that have parameters (a wholly frozen stage has none)."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not part.is_stub_optimizer]


def create_state(part: DistributedOptimizer) -> None:
    """Zero moments from the start (workaround 1)."""
    inner = part.optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            if not inner.state[parameter]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0, dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def sharded(optimizer: MegatronOptimizer, model: dict[str, Any]) -> list[ShardedBase]:
    """Sharded tensors of the state, to be saved by this rank. Collective.

    The state is gathered on each data-parallel group's first rank, in host memory: 12 bytes for
    each of that rank's parameters; other ranks get nothing. `model` is the sharded state of all
    parts of the model.
    """
    places = _places(model)
    return [
        _like(places[parameter], key, tensor)
        for part in distributed_parts(optimizer)
        for parameter, key, tensor in _gathered(part)
    ]


@torch.no_grad()
def load(
    optimizer: MegatronOptimizer,
    model: dict[str, Any],
    fill: Callable[[ShardedBase], None],
    step: int,
) -> None:
    """Restore the state: `fill` reads each parameter's tensors, one after the other.

    Of each it keeps the slice that this rank holds. `finish_load` must follow on all ranks.
    """
    places = _places(model)
    for part in distributed_parts(optimizer):
        for parameter, ranges in _slices(part):
            start, stop = ranges["param"].start, ranges["param"].end
            tensors = {"step": torch.tensor(float(step))}  # workaround 2
            for key in STATES:
                whole = torch.zeros(parameter.shape, dtype=torch.float32)
                fill(_like(places[parameter], key, whole))
                tensors[key] = whole.view(-1)[start:stop]
            part._set_main_param_and_optimizer_states(parameter, tensors)
        for entry in part.optimizer.state.values():
            entry["step"] = torch.full_like(entry["step"], float(step))  # workaround 3
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = step


def finish_load(optimizer: MegatronOptimizer) -> None:
    """In float32 the slices that were loaded are the model's own; give all ranks all of them.
    Collective."""
    for part in distributed_parts(optimizer):
        for chunk in part.model_chunks:
            chunk.start_param_sync(force_sync=True)


def _places(model: dict[str, Any]) -> dict[Tensor, ShardedBase]:
    """Where each parameter lies in a checkpoint."""
    kinds = (ShardedTensor, ShardedTensorFactory)
    return {place.data: place for place in nested_values(model) if isinstance(place, kinds)}


def _like(place: ShardedBase, key: str, tensor: Tensor) -> ShardedBase:
    """The same place for a tensor of the optimizer's."""
    changes: dict[str, Any] = dict(key=f"optimizer.state.{key}.{place.key}", data=tensor)
    if isinstance(place, ShardedTensor):
        changes["dtype"] = tensor.dtype
    return dataclasses.replace(place, **changes)


def _slices(part: DistributedOptimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Parameters of which this rank holds a slice, and the ranges that say which."""
    for ranges in part.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                yield from bucket["param_map"].items()


def _gathered(part: DistributedOptimizer) -> Iterator[tuple[Tensor, str, Tensor]]:
    """(parameter, key, float32 tensor shaped like it) on the data-parallel group's first rank.

    Workaround 5. One gather a bucket and key, in host memory.
    """
    # Without a gloo group of its own the default one carries host memory over gloo as well.
    group = part.data_parallel_group_gloo or part.data_parallel_group
    first, size = dist.get_global_rank(group, 0), dist.get_world_size(group)
    for buffer, ranges in zip(part.buffers, part.gbuf_ranges, strict=True):
        for buckets in ranges.values():
            for bucket, mine in zip(buffer.buckets, buckets, strict=True):
                length = bucket.grad_data.numel() // size
                for key in STATES:
                    shard = torch.zeros(length, dtype=torch.float32)
                    for parameter, held in mine["param_map"].items():
                        tensor = part._get_main_param_and_optimizer_states(parameter)[key]
                        place = held["gbuf_local"]
                        shard[place.start : place.end].copy_(tensor.detach())
                    if dist.get_rank() != first:
                        dist.gather(shard, None, dst=first, group=group)
                        continue
                    whole = torch.empty(length * size, dtype=torch.float32)
                    dist.gather(shard, list(whole.chunk(size)), dst=first, group=group)
                    for parameter in bucket.params_list:
                        start = buffer.param_index_map[parameter][0] - bucket.offset
                        tensor = whole[start : start + parameter.numel()]
                        yield parameter, key, tensor.view(parameter.shape)


def steps_taken(optimizer: MegatronOptimizer) -> int:
    """Updates that the moments have seen, the same on all ranks (workaround 4). Collective.

    Raises:
        RuntimeError: parameters disagree; the state is not one that training can have left.
    """
    mine = {
        int(entry["step"])
        for part in distributed_parts(optimizer)
        for entry in part.optimizer.state.values()
        if "step" in entry
    }
    every: list[set[int]] = [set()] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    steps = set().union(*every)
    if len(steps) > 1:
        raise RuntimeError(f"parameters have taken different numbers of steps: {sorted(steps)}")
    return steps.pop() if steps else 0
