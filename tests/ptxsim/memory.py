"""Global, local and shared memory with the checks of compute-sanitizer.

Global memory is one real arena.

The arena is ordinary host memory, so the addresses that a host launcher passes to a kernel are
real pointers, and code on the host can use them too. Shadow arrays, one entry a byte, know which
bytes belong to an allocation, which were ever written, and by which block of the running launch.
"""

from __future__ import annotations

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


class SharedMemory:
    """Shared memory of one block: which bytes were written, are under way, and by which warp since
    the last barrier of the block.

    Lanes of one warp count as ordered: a missing __syncwarp is not seen.
    """

    BASE = 1 << 50  # of its window in the generic address space
    _SEVERAL = -2  # warps have read it since the barrier
    _ATOMIC = 1 << 30  # no warp: written by atomics only

    def __init__(self, size: int, threads: int) -> None:
        self._bytes = np.full(size, _POISON, np.uint8)
        self._written = np.zeros(size, np.bool_)
        self._in_flight = np.zeros(size, np.int32)
        self._writer = np.full(size, -1, np.int32)  # warp that wrote it since the barrier
        self._reader = np.full(size, -1, np.int32)
        self._groups = np.zeros(threads, np.int64)  # committed by each thread
        # Copies under way: threads, their groups, places [lanes, size] and data.
        self._copies: list[tuple[Array, Array, Array, Array]] = []

    def load(self, addresses: Array, size: int, threads: Array) -> Array:
        """uint8 [lanes, size]."""
        at = self._checked(addresses, size, "read")
        warp = (threads // 32)[:, None]
        if (self._in_flight[at] > 0).any():
            raise SimError("read of shared bytes whose asynchronous copy was not waited for")
        if not self._written[at].all():
            raise SimError(f"read of never-written shared memory at {self._first(at)}")
        if ((self._writer[at] >= 0) & (self._writer[at] != warp)).any():
            raise SimError("race: shared read after another warp's write without a barrier")
        reader = self._reader[at]
        same = (reader == -1) | (reader == warp)
        # Lanes of several warps may read one byte in this very instruction.
        self._reader[at] = np.where(same, warp, self._SEVERAL)
        now = self._reader[at]
        self._reader[at] = np.where(now == warp, now, self._SEVERAL)
        return self._bytes[at]

    def store(self, addresses: Array, data: Array, threads: Array) -> None:
        """`data` is uint8 [lanes, size]."""
        at = self._checked(addresses, data.shape[1], "write")
        if len(np.unique(addresses)) != len(addresses):
            raise SimError("race: two threads write the same shared address in one instruction")
        self._claim(at, threads)
        if (self._in_flight[at] > 0).any():
            raise SimError("race: shared write onto bytes of an asynchronous copy under way")
        self._bytes[at] = data
        self._written[at] = True

    def atomic(self, address: int, size: int, thread: int) -> Array:
        """A view, uint8 [size], of the bytes one lane's atomic operation may read and change.

        Atomics of several warps on one byte are no race; beside a plain access without a barrier
        they are."""
        at = self._checked(np.array([address], np.int64), size, "atomic")[0]
        if (self._in_flight[at] > 0).any() or not self._written[at].all():
            raise SimError(f"atomic on shared bytes that are not written yet, at byte {address}")
        warp = thread // 32
        for users in (self._writer, self._reader):
            if not np.isin(users[at], (-1, warp, self._ATOMIC)).all():
                raise SimError("race: shared atomic after another warp's access without a barrier")
        self._writer[at] = self._ATOMIC
        return self._bytes[at[0] : at[0] + size]

    def start_copy(self, addresses: Array, data: Array, threads: Array) -> None:
        """cp.async: the bytes belong to nobody until the threads have waited."""
        at = self._checked(addresses, data.shape[1], "asynchronous write")
        self._claim(at, threads)
        if (self._in_flight[at] > 0).any():
            raise SimError("race: two asynchronous copies to the same shared bytes")
        np.add.at(self._in_flight, at, 1)
        self._copies.append((threads, self._groups[threads], at, data))

    def commit(self, threads: Array) -> None:
        self._groups[threads] += 1

    def wait(self, threads: Array, pending: int) -> None:
        """Lands the copies of these threads, but for their `pending` youngest groups."""
        waiting = np.zeros(len(self._groups), np.bool_)
        waiting[threads] = True
        left = []
        for owner, group, at, data in self._copies:
            lands = waiting[owner] & (group < self._groups[owner] - pending)
            if lands.any():
                self._claim(at[lands], owner[lands])
                self._bytes[at[lands]] = data[lands]
                self._written[at[lands]] = True
                self._in_flight[at[lands]] = 0
            if not lands.all():
                left.append((owner[~lands], group[~lands], at[~lands], data[~lands]))
        self._copies = left

    def barrier(self) -> None:
        self._writer[:] = -1
        self._reader[:] = -1

    def end(self) -> None:
        if self._copies:
            raise SimError("the kernel ended with asynchronous copies that nobody waited for")

    def _claim(self, at: Array, threads: Array) -> None:
        warp = (threads // 32)[:, None]
        if ((self._writer[at] >= 0) & (self._writer[at] != warp)).any():
            raise SimError("race: two warps write the same shared bytes without a barrier")
        if ((self._reader[at] != -1) & (self._reader[at] != warp)).any():
            raise SimError("race: shared write after another warp's read without a barrier")
        self._writer[at] = warp

    def _checked(self, addresses: Array, size: int, what: str) -> Array:
        at = addresses.astype(np.int64)
        if ((at < 0) | (at + size > len(self._bytes))).any():
            bad = int(at[int(np.argmax((at < 0) | (at + size > len(self._bytes))))])
            raise SimError(f"shared {what} at byte {bad}, out of bounds of {len(self._bytes)}")
        if (at % size).any():
            raise SimError(f"misaligned shared {what} of {size} bytes")
        return at[:, None] + np.arange(size)

    def _first(self, at: Array) -> str:
        return f"byte {int(at[~self._written[at]][0])}"
