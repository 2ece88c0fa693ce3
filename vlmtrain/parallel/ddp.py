"""Megatron's gradient buffers around a part of the model, and when they are reduced.

Megatron reduces a bucket of gradients over the data-parallel ranks as soon as, in a step's last
microbatch, each of its parameters has been through the backward pass (`overlap_grad_reduce`). A
vision tower without images, or a rank to which multiplexed vision gave none, has no backward pass:
its gradients are what they are, and only the call that says they are ready is missing. Without it
the other ranks of the group would wait in the collective for ever: `parameters_ready` makes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.nn import Module


def wrap(
    module: Any,
    *,
    overlap_grad_reduce: bool,
    overlap_param_gather: bool,
    bucket_size: int | None,
    disable_bucketing: bool = False,
    groups: ProcessGroupCollection | None = None,
) -> DistributedDataParallel:
    """`module` with float32 gradient buffers, sharded for Megatron's distributed optimizer.

    Args:
        bucket_size: numbers in a bucket; None: Megatron's 40 million.
        groups: those over which the module is spread, if not Megatron's global ones.
    """
    wrapped = DistributedDataParallel(
        module.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            check_for_nan_in_grad=False,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
            bucket_size=bucket_size,
        ),
        module,
        disable_bucketing=disable_bucketing,
        pg_collection=groups,
    )
    for parameter in module.parameters():
        # Behind autograd waits a hook that starts the reduction, or that has nothing to do: then
        # ops add to main_grad and leave autograd out (models/common/elementwise.py, past_autograd).
        parameter.skips_autograd = not overlap_grad_reduce
    for group in wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups:
        # With one data-parallel rank gloo's reduce-scatter of gradients and all-gather of weights
        # copy whole buffers onto themselves, several times. (NCCL returns at once.)
        if group.intra_distributed_optimizer_instance_size == 1:
            group.start_grad_sync = group.finish_grad_sync = _nothing
            group.start_param_sync = group.finish_param_sync = _nothing
    return wrapped


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def parameters_ready(chunk: DistributedDataParallel, parts: Iterable[Module]) -> None:
    """Register every gradient of `parts`, wrapped in `chunk`, as its backward hook would.

    Buckets must start in the same order on all ranks of the group. A backward pass fills them in
    the reverse order of `parts`, that of the forward pass, as long as a bucket holds at least the
    parameters of one layer: Megatron's buckets of 40 million hold two of the released models'
    towers.
    """
    for parameter in reversed([p for part in parts for p in part.parameters()]):
        if parameter.requires_grad:
            chunk.param_to_bucket_group[parameter].register_grad_ready(parameter)
