"""Shared memory of one block, with its checks: bounds, bytes never written or under way, races.

Order between warps is kept in vector clocks (order.py), so a race is found whatever the schedule
was. Lanes of one warp count as ordered: a missing __syncwarp is not seen.
"""

from __future__ import annotations

import numpy as np

from .order import WARP, Order
from .ptxtypes import Array, SimError

_POISON = 0xCD
# What a byte is.
_WRITTEN, _COPYING, _ARRIVING, _BARRIER = 1, 2, 4, 8
_NO_WRITER = 0  # with epoch 0, which every warp knows


class SharedMemory:
    """Bytes, and of each: what it is, who wrote it when, who read it when."""

    WINDOW = 1 << 50  # in the generic address space
    #: Where a block's shared memory begins: the hardware keeps the first 1 KB.
    BASE = 1024

    def __init__(self, size: int, threads: int, order: Order) -> None:
        self.size = size
        room = -(-size // 16) * 16
        self.order = order
        self._bytes = np.full(room, _POISON, np.uint8)
        self._state = np.zeros(room, np.uint8)
        self._writer = np.full(room, _NO_WRITER, np.int16)  # agent
        self._epoch = np.zeros(room, np.int32)
        self._thread = np.full(room, -1, np.int16)  # that wrote it through the generic proxy
        self._read = np.zeros((order.readers, room), np.int32)  # last epoch of each agent
        self._atomics: Array | None = None  # [warps, size]: last epoch of each warp's atomics
        self._groups = np.zeros(threads, np.int64)  # committed by each thread
        # Copies under way: threads, their groups, addresses and data.
        self._copies: list[tuple[Array, Array, Array, Array]] = []

    # ---- the generic proxy

    def load(self, addresses: Array, size: int, threads: Array) -> Array:
        """uint8 [lanes, size]."""
        rows = self._rows(addresses, size, "read")
        warps = threads // WARP
        if (self._state.reshape(-1, size)[rows] != _WRITTEN).any():
            self._refuse(rows, size, "read")
        self._after_writes(rows, size, warps, "read")
        self._after_atomics(rows, size, warps, "read")
        epochs = self.order.epochs(warps)
        self._read.reshape(self.order.readers, -1, size)[warps, rows] = epochs[:, None]
        return self._bytes.reshape(-1, size)[rows]

    def store(self, addresses: Array, data: Array, threads: Array) -> None:
        """`data` is uint8 [lanes, size]."""
        size = data.shape[1]
        rows = self._rows(addresses, size, "write")
        if len(np.unique(rows)) != len(rows):
            raise SimError("race: two threads write the same shared address in one instruction")
        self._claim(rows, size, threads)
        self._state.reshape(-1, size)[rows] = _WRITTEN
        self._bytes.reshape(-1, size)[rows] = data

    def atomic(self, address: int, size: int, thread: int) -> Array:
        """A view, uint8 [size], of the bytes one lane's atomic operation may read and change.

        Atomics of several warps on one byte are no race; beside a plain access without a barrier
        they are."""
        rows = self._rows(np.array([address], np.int64), size, "atomic")
        if (self._state.reshape(-1, size)[rows] != _WRITTEN).any():
            raise SimError(
                f"atomic on shared bytes that are not written yet, at byte {address - self.BASE}"
            )
        warps = np.array([thread // WARP])
        self._after_writes(rows, size, warps, "atomic")
        self._after_reads(rows, size, warps, "atomic")
        if self._atomics is None:
            self._atomics = np.zeros((self.order.warps, len(self._bytes)), np.int32)
        at = slice(int(rows[0]) * size, int(rows[0]) * size + size)
        self._atomics[warps[0], at] = self.order.epochs(warps)
        return self._bytes[at]

    # ---- cp.async, of the generic proxy too

    def start_copy(self, addresses: Array, data: Array, threads: Array) -> None:
        """The bytes belong to nobody until the threads have waited."""
        size = data.shape[1]
        rows = self._rows(addresses, size, "asynchronous write")
        self._claim(rows, size, threads)
        self._state.reshape(-1, size)[rows] = _COPYING
        self._copies.append((threads, self._groups[threads], rows, data))

    def commit(self, threads: Array) -> None:
        self._groups[threads] += 1

    def wait(self, threads: Array, pending: int) -> None:
        """Lands the copies of these threads, but for their `pending` youngest groups."""
        waiting = np.zeros(len(self._groups), np.bool_)
        waiting[threads] = True
        left = []
        for owner, group, rows, data in self._copies:
            lands = waiting[owner] & (group < self._groups[owner] - pending)
            if lands.any():
                size, place = data.shape[1], rows[lands]
                epochs = self.order.epochs(owner[lands] // WARP)
                self._bytes.reshape(-1, size)[place] = data[lands]
                self._state.reshape(-1, size)[place] = _WRITTEN
                self._epoch.reshape(-1, size)[place] = epochs[:, None]
            if not lands.all():
                left.append((owner[~lands], group[~lands], rows[~lands], data[~lands]))
        self._copies = left

    # ---- the asynchronous proxy: units of 16 bytes

    def start_arrival(self, addresses: Array, warp: int, agent: int, epoch: int) -> Array:
        """Claims the target of a tensor copy that `warp` starts; its bytes are nobody's until
        land(). Whoever knows `epoch` of `agent` may touch them then."""
        rows = self._rows(addresses, 16, "tensor copy")
        warps = np.full(len(rows), warp)
        state = self._state.reshape(-1, 16)[rows]
        if (state & ~np.uint8(_WRITTEN)).any():
            self._refuse(rows, 16, "tensor copy", unwritten=False)
        self._after_writes(rows, 16, warps, "tensor copy")
        self._after_reads(rows, 16, warps, "tensor copy")
        self._after_atomics(rows, 16, warps, "tensor copy")
        self._through_fence(rows, warp, "tensor copy")
        self._state.reshape(-1, 16)[rows] = _ARRIVING
        self._writer.reshape(-1, 16)[rows] = agent
        self._epoch.reshape(-1, 16)[rows] = epoch
        self._thread.reshape(-1, 16)[rows] = -1
        return rows

    def land(self, rows: Array, data: Array) -> None:
        """The bytes of a tensor copy arrive; uint8 [units, 16]."""
        self._bytes.reshape(-1, 16)[rows] = data
        self._state.reshape(-1, 16)[rows] = _WRITTEN

    def matrix(self, addresses: Array, warps: Array, agent: int, group: int) -> Array:
        """uint8 [units, 16]: an operand of a product of these warps, under way until they wait for
        `group`."""
        rows = self._rows(addresses, 16, "wgmma read")
        if (self._state.reshape(-1, 16)[rows] != _WRITTEN).any():
            self._refuse(rows, 16, "wgmma read")
        for warp in warps.tolist():
            repeated = np.full(len(rows), warp)
            self._after_writes(rows, 16, repeated, "wgmma read")
            self._after_atomics(rows, 16, repeated, "wgmma read")
            self._through_fence(rows, warp, "wgmma")
        self._read.reshape(self.order.readers, -1, 16)[agent, rows] = group
        return self._bytes.reshape(-1, 16)[rows]

    def check_bulk(self, addresses: Array, warp: int) -> None:
        """A bulk copy of `warp` is about to read units of 16 bytes."""
        rows = self._rows(addresses, 16, "bulk copy")
        if (self._state.reshape(-1, 16)[rows] != _WRITTEN).any():
            self._refuse(rows, 16, "bulk copy")
        self._after_writes(rows, 16, np.full(len(rows), warp), "bulk copy")
        self._through_fence(rows, warp, "bulk copy")

    def make_barrier(self, address: int, thread: int) -> None:
        """The 8 bytes of an mbarrier are no longer ordinary memory."""
        rows = self._rows(np.array([address], np.int64), 8, "mbarrier.init")
        self._claim(rows, 8, np.array([thread]))
        self._state.reshape(-1, 8)[rows] = _BARRIER

    # ---- the block

    def end(self) -> None:
        if self._copies:
            raise SimError("the kernel ended with asynchronous copies that nobody waited for")

    # ---- checks

    def _claim(self, rows: Array, size: int, threads: Array) -> None:
        """A write through the generic proxy, on what is under way for nobody."""
        warps = threads // WARP
        if (self._state.reshape(-1, size)[rows] & ~np.uint8(_WRITTEN)).any():
            self._refuse(rows, size, "write", unwritten=False)
        self._after_writes(rows, size, warps, "write")
        self._after_reads(rows, size, warps, "write")
        self._after_atomics(rows, size, warps, "write")
        self._writer.reshape(-1, size)[rows] = warps[:, None]
        self._epoch.reshape(-1, size)[rows] = self.order.epochs(warps)[:, None]
        self._thread.reshape(-1, size)[rows] = threads[:, None]

    def _after_writes(self, rows: Array, size: int, warps: Array, what: str) -> None:
        writer = self._writer.reshape(-1, size)[rows]
        epoch = self._epoch.reshape(-1, size)[rows]
        unknown = ~self.order.knows(warps[:, None], writer, epoch)
        if not unknown.any():
            return
        lane, byte = np.argwhere(unknown)[0]
        at, agent = int(rows[lane]) * size + int(byte), int(writer[lane, byte])
        if agent >= self.order.readers:
            raise SimError(
                f"race: shared {what} at byte {at} by warp {warps[lane]}, which did not wait for "
                "the mbarrier of the tensor copy that wrote it"
            )
        raise SimError(f"race: shared {what} after another warp's write without a barrier, "
                       f"at byte {at} by warp {warps[lane]}")  # fmt: skip

    def _after_reads(self, rows: Array, size: int, warps: Array, what: str) -> None:
        readers = self.order.readers
        reads = self._read.reshape(readers, -1, size)[:, rows]
        unknown = reads > self.order.now[warps, :readers].T[:, :, None]
        if not unknown.any():
            return
        agent, lane, byte = np.argwhere(unknown)[0]
        at = int(rows[lane]) * size + int(byte)
        if agent >= self.order.warps:
            raise SimError(f"race: shared {what} at byte {at} by warp {warps[lane]}, which a "
                           "wgmma reads that it is not ordered after")  # fmt: skip
        raise SimError(f"race: shared {what} after another warp's read without a barrier, "
                       f"at byte {at} by warp {warps[lane]}")  # fmt: skip

    def _after_atomics(self, rows: Array, size: int, warps: Array, what: str) -> None:
        if self._atomics is None:
            return
        adds = self._atomics.reshape(self.order.warps, -1, size)[:, rows]
        if (adds > self.order.now[warps, : self.order.warps].T[:, :, None]).any():
            raise SimError(f"race: shared {what} after another warp's write without a barrier")

    def _through_fence(self, rows: Array, warp: int, what: str) -> None:
        """What a thread wrote itself reaches the asynchronous proxy through that thread's fence."""
        thread = self._thread.reshape(-1, 16)[rows]
        epoch = self._epoch.reshape(-1, 16)[rows]
        hidden = (thread >= 0) & (epoch > self.order.visible[warp, thread])
        if hidden.any():
            unit, byte = np.argwhere(hidden)[0]
            raise SimError(
                f"{what} of shared byte {int(rows[unit]) * 16 + int(byte)}, which thread "
                f"{thread[unit, byte]} wrote without a fence.proxy.async after it"
            )

    def _refuse(self, rows: Array, size: int, what: str, unwritten: bool = True) -> None:
        """Says why an access to bytes that are not simply written is wrong."""
        state = self._state.reshape(-1, size)[rows]

        def first(wrong: Array) -> int:
            lane, byte = np.argwhere(wrong)[0]
            return int(rows[lane]) * size + int(byte)

        if (copying := (state & _COPYING) > 0).any():
            raise SimError(
                f"race: shared {what} at byte {first(copying)}: its asynchronous copy was not "
                "waited for"
            )
        if (arriving := (state & _ARRIVING) > 0).any():
            raise SimError(
                f"race: shared {what} at byte {first(arriving)}: a tensor copy to it is under way"
            )
        if (barrier := (state & _BARRIER) > 0).any():
            raise SimError(f"shared {what} at byte {first(barrier)}, which belongs to an mbarrier")
        assert unwritten
        raise SimError(f"{what} of never-written shared memory at byte {first(state == 0)}")

    def _rows(self, addresses: Array, size: int, what: str) -> Array:
        """Numbers of the accesses' places, in units of their size."""
        at = addresses.astype(np.int64) - self.BASE
        if ((at < 0) | (at + size > self.size)).any():
            bad = int(at[int(np.argmax((at < 0) | (at + size > self.size)))])
            raise SimError(f"shared {what} at byte {bad}, out of bounds of {self.size}")
        if (at % size).any():
            raise SimError(f"misaligned shared {what} of {size} bytes")
        return at // size
