"""Host memory in slabs, page-locked where a GPU copies to and from it.

torch's pinned allocator rounds each tensor up to a power of two: one of 129.5 MB takes 256 MB. A
slab holds many tensors back to back at 64-byte borders, and one larger than a slab gets its own of
exactly its size.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: a cache line
_PAGE = 4096


def _unregister(memory: Tensor, device: torch.device, process: int) -> None:
    """When no copy is under way any more. What is freed without this can't be page-locked again
    where the system gives it out anew. A forked child leaves what its parent registered alone."""
    if os.getpid() != process:
        return
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):  # fails after a trap
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class _Slab:
    """One piece of memory; `free` holds its (offset, bytes) holes, in order, no two adjacent."""

    def __init__(self, size: int, device: torch.device) -> None:
        size = -(-size // _PAGE) * _PAGE
        memory = torch.empty(size + _PAGE, dtype=torch.uint8, device="cpu")
        first = -memory.data_ptr() % _PAGE  # whole pages, which no other slab shares
        self.memory = memory[first : first + size]
        self.free = [(0, size)]
        if device.type != "cuda":
            return
        with torch.cuda.device(device):
            error = int(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), size, 0))
        if error:
            with contextlib.suppress(RuntimeError):  # reported anew by the next launch, then gone
                torch.ones(1, device=device)
            raise RuntimeError(
                f"{size} bytes of host memory can't be page-locked (CUDA error {error}); "
                "raise `ulimit -l` or offload less"
            )
        # Keeps the memory until it has run, also where Python ends.
        weakref.finalize(self, _unregister, self.memory, device, os.getpid())

    @property
    def size(self) -> int:
        return self.memory.numel()

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes, of the first hole that is large enough."""
        for i, (offset, hole) in enumerate(self.free):
            if hole >= size:
                self.free[i : i + 1] = [(offset + size, hole - size)] if hole > size else []
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        self.free.append((offset, size))
        self.free.sort()
        merged = [self.free[0]]
        for start, length in self.free[1:]:
            last, before = merged[-1]
            if last + before == start:
                merged[-1] = (last, before + length)
            else:
                merged.append((start, length))
        self.free = merged

    @property
    def unused(self) -> bool:
        return self.free == [(0, self.size)]


class PinnedArena:
    """Tensors in host memory, cut from slabs; page-locked where there is a CUDA device.

    A tensor's memory returns to its slab when the tensor and all views of it are gone. A slab in
    which nothing is used returns to the system at the next call of `trim`, `empty` or a property:
    the device has to be waited for, which can't be done wherever Python frees a tensor. Each tensor
    is a storage of its own: saving one saves its bytes only. Any thread may allocate.

    Args:
        slab_bytes: size of a slab; what is larger gets one of its own. At most one slab's rest and
            the holes left by tensors of other sizes are wasted.
        device: the GPU that copies; None: the current one where CUDA is available. For a CPU it is
            plain memory.
    """

    def __init__(self, slab_bytes: int = 64 << 20, device: torch.device | None = None) -> None:
        if slab_bytes < _PAGE:
            raise ValueError(f"slab_bytes is {slab_bytes}; it must be at least {_PAGE}")
        self._slab_bytes = slab_bytes
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device or torch.device("cpu")
        self._slabs: list[_Slab] = []
        self._lock = threading.Lock()
        # Filled by finalizers, which may run at any point of any thread: they must not take locks.
        self._returned: deque[tuple[_Slab, int, int]] = deque()
        self._used = 0
        self._peak = 0

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor.

        Raises:
            RuntimeError: memory is short, or can't be page-locked.
            ValueError: a negative size.
            TypeError: a size that is no integer.
        """
        shape = tuple(map(operator.index, (shape,) if isinstance(shape, int) else shape))
        if any(size < 0 for size in shape):
            raise ValueError(f"shape is {shape}; no size may be negative")
        wanted = math.prod(shape) * dtype.itemsize
        if wanted == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        size = -(-wanted // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._drain()
            slab, offset = self._find(size)
            self._used += size
        buffer: Any = (ctypes.c_uint8 * wanted).from_address(slab.memory.data_ptr() + offset)
        finalizer = weakref.finalize(buffer, self._returned.append, (slab, offset, size))
        finalizer.atexit = False
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def zeros(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.empty(shape, dtype).zero_()

    def _find(self, size: int) -> tuple[_Slab, int]:
        for slab in self._slabs:
            offset = slab.take(size)
            if offset is not None:
                return slab, offset
        slab = _Slab(max(self._slab_bytes, size), self._device)
        self._slabs.append(slab)
        self._peak = max(self._peak, sum(s.size for s in self._slabs))
        offset = slab.take(size)
        assert offset is not None
        return slab, offset

    def _drain(self) -> None:
        while self._returned:
            slab, offset, size = self._returned.popleft()
            slab.give(offset, size)
            self._used -= size
            if slab.unused:
                self._slabs.remove(slab)

    def trim(self) -> None:
        """Give slabs in which nothing is used back to the system."""
        with self._lock:
            self._drain()

    @property
    def used_bytes(self) -> int:
        """Held by tensors, each rounded up to 64 bytes."""
        with self._lock:
            self._drain()
            return self._used

    @property
    def reserved_bytes(self) -> int:
        """Taken from the system."""
        with self._lock:
            self._drain()
            return sum(slab.size for slab in self._slabs)

    @property
    def peak_bytes(self) -> int:
        """The most that was ever taken from the system at one time."""
        return self._peak
