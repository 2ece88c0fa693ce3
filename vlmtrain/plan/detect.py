"""The machine a run is on, as the planner sees GPUs: a built-in kind by its name, or this CPU with
a measured peak."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist

from vlmkernels.product import mm
from vlmtrain.core.device import Backend
from vlmtrain.core.spec import ModelSpec
from vlmtrain.plan.hardware import BUILT_IN, Gpu, Peak

# What the driver calls them; other variants (H100 PCIe, NVL) have other peaks and are not guessed
# at.
_NAMES = {
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",  # with slower links
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
#: Rows, depth and columns of a product of matrices.
Product = tuple[int, int, int]

_SIDES = (512, 1024, 2048, 4096)  # of square matrices; the first is measured for every model
_TRIES = 3


def known_gpu(name: str) -> Gpu | None:
    """The built-in kind of a device name of the driver, None for one in no table."""
    return BUILT_IN[_NAMES[name]] if name in _NAMES else None


def find_machine(
    backend: Backend, dtype: torch.dtype, spec: ModelSpec, pack_length: int, tensor: int
) -> tuple[Gpu | None, Peak]:
    """This process's device for the planner, and what utilization is measured against.

    Collective on a CPU: all processes multiply matrices at once, because they share the cores.

    Args:
        tensor: tensor-parallel size.
    """
    if backend.is_cuda:
        name = torch.cuda.get_device_name(backend.device)
        gpu = known_gpu(name)
        if gpu is None:
            return None, Peak(None, f"{name} is in no table of peaks: no MFU, no plan")
        return gpu, Peak(gpu.peak, f"{gpu.peak_tflops:,.0f} TFLOP/s, dense bf16 of {gpu.name}")
    measured = products(spec, pack_length, tensor)
    dist.barrier()
    rate, at = best_rate(measured, dtype)
    world = dist.get_world_size()
    rates = torch.tensor([rate], dtype=torch.float64)
    dist.all_reduce(rates)
    rate = float(rates) / world
    kind = "bf16" if dtype == torch.bfloat16 else "fp32"
    threads = torch.get_num_threads()
    source = (
        f"{rate / 1e9:,.0f} GFLOP/s a process: {kind} products of {' x '.join(map(str, at))}, the "
        f"best of {len(measured)} sizes up to the model's, measured at the start, {world} "
        f"process{'es' if world > 1 else ''} at once with {threads} "
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


def products(spec: ModelSpec, pack_length: int, tensor: int) -> list[Product]:
    """What a CPU's peak is measured with: those of both towers' MLPs for a pack, of fewer rows
    where they would take long, and squares up to their size. Matrix units reach their rate in large
    products only."""
    own = []
    for tower in (spec, spec.vision):
        depth, columns = tower.hidden_size, tower.intermediate_size // tensor
        if tower is spec and spec.num_experts:
            columns = spec.moe_intermediate_size
        own.append((min(pack_length, max(1, _SIDES[-1] ** 3 // (depth * columns))), depth, columns))
    largest = max(math.prod(product) for product in own)
    squares = [(side, side, side) for side in _SIDES if side == _SIDES[0] or side**3 <= largest]
    return [*squares, *own]


def best_rate(
    measured: list[Product],
    dtype: torch.dtype,
    seconds: Callable[[Product, torch.dtype], float] | None = None,
) -> tuple[float, Product]:
    """The highest FLOP/s of the products, and whose it is; seconds: how long one takes."""
    rates = [2.0 * math.prod(x) / (seconds or _seconds)(x, dtype) for x in measured]
    rate = max(rates)
    return rate, measured[rates.index(rate)]


def _seconds(product: Product, dtype: torch.dtype) -> float:
    """Of the fastest of a few tries."""
    rows, depth, columns = product
    generator = torch.Generator()  # of its own: a resumed run's random state has been set by now
    a = torch.randn(rows, depth, generator=generator).to(dtype)
    b = torch.randn(columns, depth, generator=generator).to(dtype).t()  # as a Linear holds it
    best = float("inf")
    for _ in range(_TRIES):
        start = time.perf_counter()
        mm(a, b)
        best = min(best, time.perf_counter() - start)
    return best
