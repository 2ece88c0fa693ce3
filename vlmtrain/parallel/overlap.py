"""Activations exchanged over tensor-parallel ranks during computation (`parallel.tensor_overlap`).

In the backward pass Megatron's linears start the exchange of their input's gradient, then compute
the weight's. A GPU runs the two at the same time only if kernels start in the order of their
launch, which CUDA promises with a single hardware queue: CUDA_DEVICE_MAX_CONNECTIONS=1. The forward
pass has nothing to hide its exchange behind; for that transformer-engine cuts the products in
pieces, in layers of its own.
"""

from __future__ import annotations

from collections.abc import MutableMapping

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
