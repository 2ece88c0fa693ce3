"""The machine's ceilings as contestants of a comparison: multiply-adds, memory streams.

On the CPU they are a small C++ file compiled for this very machine when first asked for; on a GPU
torch's own matrix product and copy stand for the machine.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch  # first: the compiled file then shares torch's OpenMP runtime

from benchmarks.harness import ROOT, Ceiling, Context, say
from vlmkernels import _native

SOURCE = Path(__file__).with_name("ceilings.cpp")
#: Of the streams of Adam: (floats ahead, level of the cache that they are brought to).
PREFETCHES = {
    "": (0, 1),
    ", 2 KB ahead into the first level": (512, 1),
    ", 1 KB ahead into the second level": (256, 2),
}


@functools.cache
def library() -> Any:
    """The compiled ceilings.cpp, or None (said once) where no compiler is found."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        say("no C++ compiler: no ceilings (set CXX)")
        return None
    command = [compiler, "-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared"]
    digest = hashlib.sha256(SOURCE.read_bytes() + _cpu_flags() + " ".join(command).encode())
    target = ROOT / "build" / "benchmarks" / f"ceilings-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            [*command, str(SOURCE), "-o", str(part)], capture_output=True, text=True
        )
        if done.returncode != 0:
            say(f"no ceilings: {compiler} failed on {SOURCE.name}:\n{done.stderr}")
            return None
        part.replace(target)
    lib = ctypes.CDLL(str(target))
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for peak in (lib.fma_peak, lib.bf16_peak, lib.parts_peak):
        peak.argtypes, peak.restype = [size, number], ctypes.c_double
    lib.core_distance.argtypes, lib.core_distance.restype = [size], ctypes.c_double
    lib.adam_stream.argtypes = [pointer] * 4 + [size, size, number, number]
    lib.copy_stream.argtypes = [pointer, pointer, size, number, number]
    lib.adam_stream.restype = lib.copy_stream.restype = None
    return lib


def _cpu_flags() -> bytes:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def core_distance(context: Context) -> float | None:
    """Nanoseconds that a word takes between the cores of two threads, the best of three looks of
    about a millisecond; None on a GPU and of one thread. Where they share no cache it is about
    five times as long; a virtual machine's change from one minute to the next."""
    if context.device == "cuda" or context.threads < 2 or (lib := library()) is None:
        return None
    return min(lib.core_distance(3000) for _ in range(3)) or None


def on_amx() -> bool:
    """Whether bf16 is multiplied on AMX tiles, by us and by torch."""
    return bool(_native._C.isa() == "amx_bf16")


def arithmetic(flops: float, dtype: torch.dtype, context: Context) -> dict[str, Ceiling]:
    """The peak of multiply-adds at `dtype` for `flops`; of bf16 on AMX, a large product's rate."""
    if context.device == "cuda" or (dtype == torch.bfloat16 and on_amx()):
        size = 4096 if context.device == "cuda" else 2048
        a = torch.randn(size, size, device=context.device).to(dtype)
        work = 2.0 * size**3
        matmul = functools.partial(torch.matmul, a, a)
        return {f"{size}^3 matmul": Ceiling(matmul, flops / work, work * 1e-9, "GFLOP/s")}
    if (lib := library()) is None:
        return {}
    peaks = {"fp32 multiply-adds": lib.fma_peak}
    if dtype == torch.bfloat16 and lib.bf16_peak(1, 1) > 0:
        peaks["bf16 dot products"] = lib.bf16_peak  # slower than fp32 on some processors
    if dtype == torch.float32 and on_amx() and lib.parts_peak(1, 1) > 0:
        peaks["fp32 by parts on tiles"] = lib.parts_peak
    rounds = 2_000_000  # 10 ms or more
    found = {}
    for name, peak in peaks.items():
        work = peak(1, 1) * rounds * context.threads
        run = functools.partial(peak, rounds, context.threads)
        found[name] = Ceiling(run, flops / work, work * 1e-9, "GFLOP/s")
    return found


def copy(bytes_moved: float, context: Context) -> dict[str, Ceiling]:
    """Copies between two buffers that lie ready, counting reads and writes."""
    size = int(min(max(bytes_moved / 2, 2**20), 2**28 if context.device == "cpu" else 2**32))
    from_, to = (torch.ones(size, dtype=torch.int8, device=context.device) for _ in range(2))
    scale, work = bytes_moved / (2 * size), 2e-9 * size
    if context.device == "cuda":
        return {"copy": Ceiling(lambda: to.copy_(from_), scale, work, "GB/s")}
    if (lib := library()) is None:
        return {}

    def run(nontemporal: int) -> None:
        lib.copy_stream(to.data_ptr(), from_.data_ptr(), size, nontemporal, context.threads)

    return {
        "copy": Ceiling(lambda: run(0), scale, work, "GB/s"),
        "copy past the caches": Ceiling(lambda: run(1), scale, work, "GB/s"),
    }


def adam(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    bytes_moved: float,
    context: Context,
) -> dict[str, Ceiling]:
    """4 reads and 3 writes in place over param, grad, exp_avg, exp_avg_sq (float32, 1-D, equal
    sizes), which keep their values; plain, and prefetched in two ways."""
    if (lib := library()) is None:
        return {}
    size = tensors[0].numel()

    def run(ahead: int, level: int) -> None:  # keeps the tensors alive
        lib.adam_stream(*(t.data_ptr() for t in tensors), size, ahead, level, context.threads)

    scale, work = bytes_moved / (28 * size), 28e-9 * size
    return {
        f"4R3W stream{name}": Ceiling(functools.partial(run, *how), scale, work, "GB/s")
        for name, how in PREFETCHES.items()
    }
