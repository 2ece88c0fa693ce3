"""Global and local memory with the checks of compute-sanitizer; shared.py holds shared memory.

Global memory is one real arena.

The arena is ordinary host memory, so the addresses that a host launcher passes to a kernel are
real pointers, and code on the host can use them too. Shadow arrays, one entry a byte, know which
bytes belong to an allocation, which were ever written, and by which block of the running launch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from .ptxtypes import Array, SimError

_GUARD = 4096  # bytes of no-man's-land on both sides of an allocation
_POISON = 0xCD


class GlobalMemory:
    """Device memory. `upload` and `reserve` return addresses; `array` reads a buffer back."""

    def __init__(self, size: int = 8 << 20) -> None:
        backing = np.full(size + _GUARD, _POISON, np.uint8)
        start = -backing.ctypes.data % _GUARD
        self._bytes = backing[start : start + size]
        self.base = int(self._bytes.ctypes.data)
        self._owned = np.zeros(size, np.bool_)
        self._written = np.zeros(size, np.bool_)
        self._writer = np.full(size, -1, np.int32)  # block that wrote it in this launch
        self._reader = np.full(size, -1, np.int32)  # block that read it; -2: several
        self._epoch = np.zeros(size, np.int32)  # the writer's when it wrote
        self._known: dict[int, Counter[int]] = {}  # of each block: epochs of blocks it knows
        self._released: dict[int, Counter[int]] = {}  # of each count: what those knew who counted
        self._unfenced: set[int] = set()  # blocks that acquired since their last fence
        self._end = _GUARD
        self._buffers: dict[str, tuple[int, Any, tuple[int, ...]]] = {}

    # ---- the host's side -------------------------------------------------------------------------

    def reserve(self, name: str, shape: tuple[int, ...], dtype: Any, misalign: int = 0) -> int:
        """An allocation that nothing has written yet, `misalign` bytes off a multiple of 256."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        offset = -(-self._end // 256) * 256 + misalign
        self._end = offset + size + _GUARD
        if self._end > len(self._bytes):
            raise SimError(f"the arena of {len(self._bytes)} bytes is full; ask for a larger one")
        self._owned[offset : offset + size] = True
        self._buffers[name] = (offset, dtype, shape)
        return self.base + offset

    def upload(self, name: str, array: Array, misalign: int = 0) -> int:
        """An allocation that holds a copy of `array`."""
        address = self.reserve(name, array.shape, array.dtype, misalign)
        offset = address - self.base
        self._bytes[offset : offset + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        self._written[offset : offset + array.nbytes] = True
        return address

    def array(self, name: str) -> Array:
        """A copy of a buffer; an error where a byte of it was never written."""
        offset, dtype, shape = self._buffers[name]
        size = int(np.prod(shape)) * dtype.itemsize
        missing = np.flatnonzero(~self._written[offset : offset + size])
        if len(missing):
            raise SimError(
                f"{len(missing)} of {size} bytes of '{name}' were never written, the first at "
                f"element {int(missing[0]) // dtype.itemsize}"
            )
        return self._bytes[offset : offset + size].copy().view(dtype).reshape(shape)

    def string(self, address: int) -> bytes:
        """The zero-terminated string at an address."""
        offset = address - self.base
        end = offset
        while 0 <= end < len(self._bytes) and self._owned[end] and self._bytes[end]:
            end += 1
        if not (0 <= end < len(self._bytes)) or not self._owned[end]:
            raise SimError(f"no string at {address:#x}")
        return self._bytes[offset:end].tobytes()

    # ---- the kernel's side -----------------------------------------------------------------------

    def begin_launch(self) -> None:
        """Launches on one stream are ordered: what an earlier one wrote is settled."""
        self._writer[:] = -1
        self._reader[:] = -1
        self._known.clear()
        self._released.clear()
        self._unfenced.clear()

    def load(self, addresses: Array, size: int, block: int, read_only: bool = False) -> Array:
        """uint8 [lanes, size]. `read_only`: ld.global.nc, which must see no write of its launch."""
        at = self._checked(addresses, size, "read")
        if not self._written[at].all():
            lane = int(np.argmin(self._written[at].all(axis=1)))
            raise SimError(f"read of never-written bytes of {self._where(int(addresses[lane]))}")
        writer = self._writer[at]
        if read_only and (writer >= 0).any():
            raise SimError("ld.global.nc of bytes that this launch writes")
        if ((writer >= 0) & (writer != block)).any():
            raise SimError("race: read of bytes that another block of this launch writes")
        reader = self._reader[at]
        self._reader[at] = np.where((reader == -1) | (reader == block), block, -2)
        return self._bytes[at]

    def store(self, addresses: Array, data: Array, block: int) -> None:
        """`data` is uint8 [lanes, size]."""
        at = self._checked(addresses, data.shape[1], "write")
        if len(np.unique(addresses)) != len(addresses):
            raise SimError("race: two threads write the same address in one instruction")
        writer, reader = self._writer[at], self._reader[at]
        if ((writer >= 0) & (writer != block)).any():
            raise SimError("race: write of bytes that another block of this launch writes")
        if ((reader != -1) & (reader != block)).any():
            raise SimError("race: write of bytes that another block of this launch reads")
        self._writer[at] = block
        self._written[at] = True
        self._bytes[at] = data

    def atomic(self, address: int, size: int) -> Array:
        """A view, uint8 [size], of the bytes one lane's atomic operation may read and change."""
        at = self._checked(np.array([address], np.int64), size, "atomic")[0]
        if not self._written[at].all():
            raise SimError(f"atomic on never-written bytes of {self._where(address)}")
        return self._bytes[at[0] : at[0] + size]

    # ---- blocks that wait for each other: by counts, for sums

    def _knowledge(self, block: int) -> Counter[int]:
        return self._known.setdefault(block, Counter({block: 1}))

    def acquire(self, address: int, size: int, block: int) -> Array:
        """The bytes of a count, after what those did who counted."""
        known = self._knowledge(block)
        known |= self._released.get(address, Counter())
        self._known[block] = known
        self._unfenced.add(block)
        return self.atomic(address, size).copy()

    def release(self, address: int, size: int, block: int) -> Array:
        """A view of the bytes of a count, to be added to."""
        known = self._knowledge(block)
        self._released[address] = self._released.get(address, Counter()) | known
        known[block] += 1
        return self.atomic(address, size)

    def fence(self, block: int) -> None:
        """fence.proxy.async.global"""
        self._unfenced.discard(block)

    def check_fence(self, block: int) -> None:
        if block in self._unfenced:
            raise SimError("a bulk copy to global memory after an acquire without a fence between")

    def land(self, addresses: Array, data: Array, block: int, adds: bool) -> None:
        """A bulk copy's units of 16 bytes arrive, or are added as fp32 numbers."""
        at = self._checked(addresses, 16, "bulk write")
        writer = self._writer[at]
        known = self._knowledge(block)
        others = writer[(writer >= 0) & (writer != block)]
        if len(others):
            epochs = self._epoch[at][(writer >= 0) & (writer != block)]
            if (epochs > np.array([known[int(w)] for w in others])).any():
                raise SimError("race: a bulk write of bytes that another block writes, out of turn")
        if (self._reader[at] != -1).any():
            raise SimError("race: a bulk write of bytes that this launch reads")
        if adds:
            if not self._written[at].all():
                raise SimError("a bulk sum onto never-written bytes")
            sums = self._bytes[at].view(np.float32) + np.ascontiguousarray(data).view(np.float32)
            data = sums.view(np.uint8)
        self._bytes[at] = data
        self._written[at] = True
        self._writer[at], self._epoch[at] = block, known[block]

    def _checked(self, addresses: Array, size: int, what: str) -> Array:
        """int64 [lanes, size]: the places in the arena of every byte of the access."""
        at = addresses.astype(np.int64) - self.base
        inside = (at >= 0) & (at + size <= len(self._bytes))
        clipped = np.where(inside, at, 0)[:, None] + np.arange(size)
        bad = ~(inside & self._owned[clipped].all(axis=1))
        if bad.any():
            address = int(addresses[int(np.argmax(bad))])
            raise SimError(f"global {what} of {size} bytes out of bounds: {self._where(address)}")
        if (addresses.astype(np.int64) % size).any():
            raise SimError(f"global {what} of {size} bytes is misaligned")
        return clipped

    def _where(self, address: int) -> str:
        """The address in terms of the nearest buffer."""
        nearest, distance = f"{address:#x}", 1 << 60
        for name, (offset, dtype, shape) in self._buffers.items():
            size = int(np.prod(shape)) * dtype.itemsize
            start = self.base + offset
            off = max(start - address, address - (start + size) + 1, 0)
            if off < distance:
                distance = off
                nearest = f"byte {address - start} of '{name}' ({size} bytes)"
        return nearest


class LocalMemory:
    """Memory of one thread each, all at the same addresses: a window of the generic space."""

    BASE = 1 << 52

    def __init__(self, threads: int, size: int) -> None:
        self._bytes = np.full((threads, size), _POISON, np.uint8)
        self._written = np.zeros((threads, size), np.bool_)

    def load(self, addresses: Array, size: int, threads: Array) -> Array:
        at = self._checked(addresses, size)
        if not self._written[threads[:, None], at].all():
            raise SimError("read of never-written local memory")
        return self._bytes[threads[:, None], at]

    def store(self, addresses: Array, data: Array, threads: Array) -> None:
        at = self._checked(addresses, data.shape[1])
        self._bytes[threads[:, None], at] = data
        self._written[threads[:, None], at] = True

    def _checked(self, addresses: Array, size: int) -> Array:
        at = addresses.astype(np.int64)
        if ((at < 0) | (at + size > self._bytes.shape[1])).any():
            raise SimError("local access out of bounds")
        if (at % size).any():
            raise SimError("misaligned local access")
        return at[:, None] + np.arange(size)
