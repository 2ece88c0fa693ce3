"""The machine a run is on, as the planner sees GPUs: a built-in kind by its name, or this CPU with
a measured peak."""

from __future__ import annotations

import time

import psutil
import torch
import torch.distributed as dist

from vlmtrain.core.device import Backend
from vlmtrain.plan.hardware import BUILT_IN, Gpu, Peak

# What the driver calls them; other variants (PCIe, NVL) have other peaks and are not guessed at.
_NAMES = {
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
_SIDE = 512  # of the matrices that a CPU's peak is measured with
_TRIES = 6


def known_gpu(name: str) -> Gpu | None:
    """The built-in kind of a device name of the driver, None for one in no table."""
    return BUILT_IN[_NAMES[name]] if name in _NAMES else None


def find_machine(backend: Backend, dtype: torch.dtype) -> tuple[Gpu | None, Peak]:
    """This process's device for the planner, and what utilization is measured against.

    Collective on a CPU: all processes multiply matrices at once, because they share the cores.
    """
    if backend.is_cuda:
        name = torch.cuda.get_device_name(backend.device)
        gpu = known_gpu(name)
        if gpu is None:
            return None, Peak(None, f"{name} is in no table of peaks: no MFU, no plan")
        return gpu, Peak(gpu.peak, f"{gpu.peak_tflops:,.0f} TFLOP/s, dense bf16 of {gpu.name}")
    rate = _matmul_rate(dtype)
    world = dist.get_world_size()
    rates = torch.tensor([rate], dtype=torch.float64)
    dist.all_reduce(rates)
    rate = float(rates) / world
    kind = "bf16" if dtype == torch.bfloat16 else "fp32"
    threads = torch.get_num_threads()
    source = (
        f"{rate / 1e9:,.0f} GFLOP/s a process: {kind} products of {_SIDE} x {_SIDE} matrices, "
        f"measured at the start, {world} process{'es' if world > 1 else ''} at once with {threads} "
        f"thread{'s' if threads > 1 else ''} each"
    )
    gpu = Gpu(
        name="cpu",
        peak_tflops=rate / 1e12,
        memory_gb=psutil.virtual_memory().total / 1e9 / world,
        memory_gbs=10.0,
        nvlink_gbs=1.0,  # gloo through the loopback device
        network_gbs=1.0,
        host_gbs=10.0,
        gpus_per_node=world,
        reserved_gb=0.5,
        latency_us=200.0,
    )
    return gpu, Peak(rate, source)


def _matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s, the best of a few products."""
    # A generator of its own: a resumed run's random state has been set by now.
    a, b = torch.randn(2, _SIDE, _SIDE, generator=torch.Generator()).to(dtype)
    best = float("inf")
    dist.barrier()
    for _ in range(_TRIES):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * _SIDE**3 / best
