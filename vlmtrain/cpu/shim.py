"""torch.cuda's answers on a machine without CUDA, so that megatron-core runs unchanged on gloo.

megatron-core asks `torch.cuda` for the current device, streams, events and random state in many
places. `install` answers those calls with their CPU meaning.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_mode: _CudaMeansCpu | None = None


def without_shim() -> contextlib.AbstractContextManager[Any]:
    """A region of our own model code, where nobody asks for CUDA by name: the shim's look at every
    torch call is 5% of a small model's step."""
    return contextlib.nullcontext() if _mode is None else torch._C.DisableTorchFunction()


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Redirects requests for CUDA tensors and pinned memory to CPU tensors (about 2 us a call)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = dict(kwargs, device=_CPU)
        if kwargs.get("pin_memory"):
            kwargs = dict(kwargs, pin_memory=False)
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        elif func is torch.Tensor.record_stream:
            return None
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron keys its gradient buckets by strings such as 'torch.cuda.FloatTensor'.
            name = func(*args)
            caller = sys._getframe(1).f_code.co_filename
            return name.replace("torch.", "torch.cuda.", 1) if "megatron" in caller else name
        return func(*args, **kwargs)


class _NullStream:
    """A CUDA stream on a machine where everything runs in program order."""

    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any = None) -> _NullEvent:
        return _NullEvent()

    def query(self) -> bool:
        return True


class _NullEvent:
    """A CUDA event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def install() -> None:
    """Patch torch.cuda and megatron-core; again is a no-op."""
    global _mode
    if _mode is not None:
        return
    stream = _NullStream()
    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "synchronize": lambda *a, **k: None,
        "current_stream": lambda *a, **k: stream,
        "default_stream": lambda *a, **k: stream,
        "stream": lambda s: contextlib.nullcontext(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "set_device": lambda device: None,
        "memory_allocated": lambda *a: 0,
        "max_memory_allocated": lambda *a: 0,
        "Stream": _NullStream,
        "Event": _NullEvent,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)

    # Megatron's own setters go through torch.cuda's lazy queue, which never runs without CUDA.
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    # It warns that the CPU generator changed inside a "GPU" region: here they are the same one.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)

    from megatron.core.optimizer import clip_grads

    clip_grads.to_local_if_dtensor = lambda gradient: gradient  # there are none

    # Backward passes run what `without_shim` ran forward.
    from megatron.core.pipeline_parallel import schedules

    if not hasattr(schedules.backward_step, "__wrapped__"):
        schedules.backward_step = _shimless(schedules.backward_step)

    # And what an optimizer's step asks each parameter, in loops that name no device.
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for name in (
        "zero_grad",
        "get_main_grads_for_grad_norm",
        "_copy_model_grads_to_main_grads",
        "_copy_main_params_to_model_params",
    ):
        if not hasattr(getattr(DistributedOptimizer, name), "__wrapped__"):
            setattr(DistributedOptimizer, name, _shimless(getattr(DistributedOptimizer, name)))

    _mode = _CudaMeansCpu()
    _mode.__enter__()


def _shimless(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with without_shim():
            return function(*args, **kwargs)

    return call


def suspend() -> None:
    """Stop the look at every torch call until the next `install`: torch.compile, for one, does not
    trace through it. What `install` set in torch.cuda stays."""
    global _mode
    if _mode is not None:
        _mode.__exit__(None, None, None)
        _mode = None
