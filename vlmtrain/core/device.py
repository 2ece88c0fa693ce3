"""Where a run computes: CUDA with NCCL, or CPU with gloo. The one place where the two differ.

Without CUDA `setup` installs `vlmtrain.cpu.shim` and `vlmtrain.cpu.gloo`; where CUDA is present
nothing is patched but what Megatron clips gradients with (`vlmtrain.core.clipping`).
"""

from __future__ import annotations

import resource
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from vlmtrain.core.errors import UserError
from vlmtrain.core.files import is_file
from vlmtrain.cpu import gloo, shim


@dataclass(frozen=True)
class Backend:
    """The device of this process and the torch.distributed backend that joins the processes."""

    device: torch.device
    process_group: str

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int:
        """Since the last reset: peak device memory on CUDA; peak resident set of this process on
        CPU."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def reset_peak_memory(self) -> bool:
        """False on a CPU where the system doesn't let a process do so: Linux does, most containers
        too."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's word for it
        except OSError:
            return False
        return True

    def memory_bytes(self) -> int:
        """In use now, as `peak_memory_bytes` counts."""
        if self.is_cuda:
            return torch.cuda.memory_allocated(self.device)
        return psutil.Process().memory_info().rss

    def capacity_bytes(self, processes: int) -> int:
        """What there is for this process: of the device what other programs leave; of a machine's
        memory, or the control group's, the share of one of `processes`."""
        if self.is_cuda:
            free, _ = torch.cuda.mem_get_info(self.device)
            return free + torch.cuda.memory_reserved(self.device)
        total = psutil.virtual_memory().total
        limit = Path("/sys/fs/cgroup/memory.max")
        text = limit.read_text().strip() if is_file(limit) else "max"
        return min(total, int(text) if text.isdigit() else total) // processes


def model_code() -> AbstractContextManager[object]:
    """A region of our own model code, which asks for CUDA by name nowhere: a CPU's shim is off."""
    return shim.without_shim()


def setup(local_rank: int | None = 0) -> Backend:
    """Choose the backend of this process; install what stands in for CUDA where there is none.

    Args:
        local_rank: of this process among those of its machine, by which it chooses a GPU where it
            sees several. None: its launcher doesn't say.

    Raises:
        UserError: which GPU is meant isn't known, or there is none left.
    """
    if torch.cuda.is_available():
        count, index = torch.cuda.device_count(), 0  # of one, another one on each rank perhaps
        if count > 1:
            if local_rank is None:
                raise UserError(
                    "the launcher doesn't set LOCAL_RANK, by which a rank chooses one of the "
                    f"{count} GPUs of this machine; set it, or show each rank one GPU by "
                    "CUDA_VISIBLE_DEVICES"
                )
            if local_rank >= count:
                raise UserError(
                    f"LOCAL_RANK is {local_rank} and this rank sees {count} GPUs; start no more "
                    "ranks on a machine than it has GPUs"
                )
            index = local_rank
        torch.cuda.set_device(index)
        backend = Backend(torch.device("cuda", torch.cuda.current_device()), "cpu:gloo,cuda:nccl")
    else:
        shim.install()
        gloo.install()
        backend = Backend(torch.device("cpu"), "gloo")
    from vlmtrain.core import clipping  # imports Megatron, which needs the shim

    clipping.install()
    return backend
