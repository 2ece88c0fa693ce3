"""Communication beside computation: what megatron-core's own machinery needs from us.

Gradients over data-parallel ranks (`parallel.overlap_grad_reduce`). Megatron reduces a bucket
of gradients as soon as, in a step's last microbatch, each of its parameters has been through the
backward pass. A vision tower without images, or a rank to which multiplexed vision dealt none, has
no backward pass: its gradients are what they are, and all that is missing is the word that they are
ready. Without it the other ranks of the data-parallel group would wait in the collective for ever.

Activations over tensor-parallel ranks (`parallel.tensor_overlap`). In the backward pass Megatron's
linears start the exchange of their input's gradient, then compute the weight's. A GPU runs the two
side by side only if kernels start in the order of their launch, which CUDA promises with a single
hardware queue: CUDA_DEVICE_MAX_CONNECTIONS=1. The forward pass has nothing to hide its exchange
behind; for that transformer-engine cuts the products in pieces, in layers of its own.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from megatron.core.distributed import DistributedDataParallel
from torch.nn import Module

from vlmtrain.core.config import ParallelSection
from vlmtrain.core.errors import UserError

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def check_tensor_overlap(section: ParallelSection, environment: MutableMapping[str, str]) -> None:
    """Raise UserError where `parallel.tensor_overlap` is asked for and can't be had."""
    if not section.tensor_overlap:
        return
    if section.tensor < 2:
        raise UserError(
            f"--parallel.tensor_overlap needs --parallel.tensor of at least 2, it is "
            f"{section.tensor}: there is no tensor-parallel communication to overlap; turn it off"
        )
    if environment.get(_QUEUES, "1") != "1":
        raise UserError(
            f"--parallel.tensor_overlap needs {_QUEUES}=1 and the environment sets it to "
            f"{environment[_QUEUES]}; unset it or turn the option off"
        )


def prepare_tensor_overlap(section: ParallelSection, environment: MutableMapping[str, str]) -> None:
    """Ask CUDA for the single queue. Before anything touches the GPU."""
    if section.tensor_overlap:
        environment[_QUEUES] = "1"


def parameters_ready(chunk: DistributedDataParallel, module: Module) -> None:
    """Say for every parameter of `module`, wrapped in `chunk`, what its backward hook would say.

    Buckets must start in the same order on all ranks of the group. A backward pass fills them in
    the reverse order of registration as long as a bucket holds at least the parameters of one
    layer of `module`: Megatron's buckets of 40 million hold two of the released models' towers.
    """
    for parameter in reversed(list(module.parameters())):
        if parameter.requires_grad:
            chunk.param_to_bucket_group[parameter].register_grad_ready(parameter)
