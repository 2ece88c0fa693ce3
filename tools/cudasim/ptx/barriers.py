"""Where the threads of a block wait for each other: bar, mbarrier with the tensor copies that it
counts, and the pool of registers of setmaxnreg.

Everything here asserts PTX's rules; hopper.py and matrix.py hold the instructions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .order import WARP, WARPGROUP, Knowledge
from .ptxtypes import Array, SimError
from .shared import SharedMemory

if TYPE_CHECKING:
    from .machine import Block

#: What a thread does.
READY, PARKED, DONE, AT_BARRIER, WAITING = 0, 1, 2, 3, 4
_MOST_ARRIVALS = _MOST_BYTES = (1 << 20) - 1


@dataclass(eq=False)
class Named:
    """One of the 16 barriers of bar.sync and bar.arrive."""

    knowledge: Knowledge
    expected: int | None = None  # threads; None: nobody has come. 0: the whole block
    arrived: int = 0
    waiting: list[Array] = field(default_factory=list)


@dataclass(eq=False)
class Copy:
    """A tensor copy under way: it arrives as a whole."""

    rows: Array  # of shared memory, in units of 16 bytes
    data: Array
    barrier: MBarrier
    phase: int  # of the barrier when it was started


@dataclass(eq=False)
class MBarrier:
    """An mbarrier object. Phases count from 0."""

    address: int
    arrivals: int  # that end a phase
    agent: int  # its number among the clocks
    maker: tuple[int, int, int]  # thread that initialised it, its warp and that one's epoch
    knowledge: Knowledge  # of those that arrived in this phase
    known: Knowledge  # of those that arrived in phases before
    phase: int = 0
    pending: int = 0  # arrivals that this phase still lacks
    bytes: int = 0  # that copies still bring, less those that came before they were announced
    fenced: int = 0  # the maker's warp's epoch of the fence after the initialisation

    @property
    def name(self) -> str:
        return f"mbarrier at byte {self.address - SharedMemory.BASE}"

    @property
    def status(self) -> str:
        return (
            f"the {self.name} is in phase {self.phase}, lacks {self.pending} of {self.arrivals} "
            f"arrivals and {self.bytes} bytes"
        )


class Barriers:
    """All barriers of one block."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._order = block.order
        self._named: dict[int, Named] = {}
        self._mbarriers: dict[int, MBarrier] = {}
        self._asked: set[tuple[int, int, int]] = set()  # warp, mbarrier, phase
        self.copies: list[Copy] = []
        # What a waiting thread waits for: an mbarrier's address and the parity, or -1: registers.
        self._for = np.zeros((block.threads, 2), np.int64)
        groups = -(-block.threads // WARPGROUP)
        self._registers = np.full(groups, block.kernel.registers or 0, np.int64)
        self._pool = int(self._registers.sum()) * WARPGROUP

    # ---- bar

    def arrive_named(self, threads: Array, number: int, count: int | None, waits: bool) -> None:
        """`count` threads, or None: the whole block, of whole warps, meet at barrier `number`."""
        if not 0 <= number < 16:
            raise SimError(f"barrier {number}: there are 0 to 15")
        if count is not None and (count % WARP or not 0 < count <= self._block.threads):
            raise SimError(f"barrier {number} for {count} of {self._block.threads} threads")
        barrier = self._named.setdefault(number, Named(self._order.nothing()))
        if barrier.expected not in (None, count or 0):
            raise SimError(
                f"barrier {number} is for {barrier.expected or 'all'} threads and for "
                f"{count or 'all'} at once"
            )
        barrier.expected = count or 0
        barrier.arrived += len(threads)
        warps = np.unique(threads // WARP)
        barrier.knowledge = self._order.release(warps, barrier.knowledge)
        if waits:
            barrier.waiting.append(threads)
        if count is not None and barrier.arrived > count:
            raise SimError(f"{barrier.arrived} threads at barrier {number}, which is for {count}")

    def open(self) -> None:
        """Lets go where all have come; of barriers for all threads, open_whole does."""
        for number, barrier in list(self._named.items()):
            if barrier.expected and barrier.arrived == barrier.expected:
                self._release(number)

    def open_whole(self, waiting: Array, counters: Array) -> bool:
        """Every live thread waits at a barrier: opens the one for all; False if there is none."""
        for number, barrier in self._named.items():
            if barrier.expected == 0 and barrier.arrived == len(waiting):
                if len(np.unique(counters[waiting])) > 1:
                    raise SimError("threads of the block wait at different barriers")
                self._release(number)
                return True
        return False

    def _release(self, number: int) -> None:
        barrier = self._named.pop(number)
        for threads in barrier.waiting:
            self._order.acquire(np.unique(threads // WARP), barrier.knowledge)
            self._block.wake(threads)

    # ---- mbarrier

    def make(self, address: int, arrivals: int, thread: int) -> None:
        if address % 8:
            raise SimError(f"an mbarrier at byte {address - SharedMemory.BASE} is misaligned")
        if not 0 < arrivals <= _MOST_ARRIVALS:
            raise SimError(f"an mbarrier of {arrivals} arrivals")
        if address in self._mbarriers:
            raise SimError(f"the {self._mbarriers[address].name} is initialised twice")
        self._block.shared.make_barrier(address, thread)
        warp = thread // WARP
        self._mbarriers[address] = MBarrier(
            address,
            arrivals,
            self._order.new_agent(),
            (thread, warp, int(self._order.now[warp, warp])),
            self._order.nothing(),
            self._order.nothing(),
            pending=arrivals,
        )

    def fence_initialisation(self, threads: Array) -> None:
        for barrier in self._mbarriers.values():
            thread, warp, _ = barrier.maker
            if (threads == thread).any():
                barrier.fenced = int(self._order.now[warp, warp])

    def at(self, address: int, warp: int) -> MBarrier:
        """The mbarrier there, which the warp must know of."""
        barrier = self._mbarriers.get(address)
        if barrier is None:
            where = address - SharedMemory.BASE
            raise SimError(f"byte {where} of shared memory is no initialised mbarrier")
        _, maker, epoch = barrier.maker
        if self._order.now[warp, maker] < epoch:
            raise SimError(
                f"race: warp {warp} uses the {barrier.name}, which warp {maker} initialised "
                "without a barrier between"
            )
        return barrier

    def arrive(self, thread: int, address: int, count: int, more_bytes: int) -> None:
        """Arrivals of a thread's warp, releasing what it knows, after announcing more bytes."""
        barrier = self.at(address, thread // WARP)
        if not 0 <= more_bytes <= _MOST_BYTES or abs(barrier.bytes + more_bytes) > _MOST_BYTES:
            raise SimError(f"too many bytes, {more_bytes} more: {barrier.status}")
        if count < 1 or count > barrier.pending:
            raise SimError(f"{count} arrivals too many: {barrier.status}")
        barrier.bytes += more_bytes
        barrier.pending -= count
        warps = np.array([thread // WARP])
        barrier.knowledge = self._order.release(warps, barrier.knowledge)
        self._end_phase(barrier)

    def _end_phase(self, barrier: MBarrier) -> None:
        if barrier.pending or barrier.bytes:
            return
        barrier.phase += 1
        barrier.pending = barrier.arrivals
        # Knowledge only grows: what this phase's arrivals knew holds in later phases too.
        barrier.known = barrier.knowledge
        at = self._block.waiting(WAITING)
        self._block.wake(at[self._for[at, 0] == barrier.address])

    def ask(self, warp: int, address: int, parity: int) -> bool | None:
        """Whether the phase of that parity is over; if so, the warp acquires it. If not, no the
        first time that the warp asks in a phase, and None from then on: it must wait."""
        barrier = self.at(address, warp)
        if parity not in (0, 1):
            raise SimError(f"parity {parity} of a phase")
        if barrier.phase & 1 == parity:
            asked = (warp, address, barrier.phase)
            if asked in self._asked:
                return None
            self._asked.add(asked)
            return False
        warps = np.array([warp])
        self._order.acquire(warps, barrier.known)
        self._order.learn(warps, barrier.agent, barrier.phase)
        return True

    def wait(self, threads: Array, addresses: Array, parities: Array) -> None:
        """Notes what threads wait for that are about to be held."""
        self._for[threads, 0], self._for[threads, 1] = addresses, parities

    # ---- tensor copies

    def start_copy(self, thread: int, address: int, to: Array, data: Array) -> None:
        """A copy to units of 16 bytes at `to`, which counts at the mbarrier at `address`."""
        warp = thread // WARP
        barrier = self.at(address, warp)
        maker, its_warp, epoch = barrier.maker
        fenced = barrier.fenced and self._order.now[warp, its_warp] >= barrier.fenced
        if not fenced and self._order.visible[warp, maker] < epoch:
            raise SimError(
                f"a tensor copy names the {barrier.name} before a fence.mbarrier_init of the "
                "thread that initialised it"
            )
        rows = self._block.shared.start_arrival(to, warp, barrier.agent, barrier.phase + 1)
        self.copies.append(Copy(rows, data, barrier, barrier.phase))

    def copy_arrives(self) -> bool:
        """One of the copies that somebody waits for; False if there is none."""
        at = self._block.waiting(WAITING)
        wanted = set(self._for[at, 0].tolist())
        known = [c for c in self.copies if c.barrier.address in wanted]
        if not known:
            return False
        assert self._block.random is not None
        copy = self._block.random.choice(known)
        self.copies.remove(copy)
        barrier = copy.barrier
        if barrier.phase != copy.phase:
            raise SimError(
                f"a tensor copy of {copy.data.size} bytes arrives after the phase {copy.phase} "
                f"that it was started in, for which too few bytes were announced: {barrier.status}"
            )
        self._block.shared.land(copy.rows, copy.data)
        barrier.bytes -= copy.data.size
        if abs(barrier.bytes) > _MOST_BYTES:
            raise SimError(f"too many bytes: {barrier.status}")
        self._end_phase(barrier)
        return True

    # ---- registers

    def set_registers(self, threads: Array, count: int, more: bool) -> Array:
        """Gives or takes registers; returns the threads that must wait for some."""
        if self._block.kernel.registers is None:
            raise SimError("setmaxnreg in a kernel whose number of registers nothing bounds")
        if count % 8 or not 24 <= count <= 256:
            raise SimError(f"setmaxnreg to {count} registers: multiples of 8 from 24 to 256")
        held = []
        for group in np.unique(threads // WARPGROUP).tolist():
            own = int(self._registers[group])
            if (count < own) if more else (count > own):
                what = "inc" if more else "dec"
                raise SimError(f"setmaxnreg.{what} to {count} of a warpgroup that has {own}")
            free = self._pool - int(self._registers.sum()) * WARPGROUP
            if (count - own) * WARPGROUP > free:
                held.append(group)
                continue
            self._registers[group] = count
            if not more:
                waiting = self._block.waiting(WAITING)
                self._block.wake(waiting[self._for[waiting, 0] == -1])
        late = threads[np.isin(threads // WARPGROUP, held)]
        self._for[late, 0] = -1
        return late

    # ---- the block

    def stuck(self) -> str:
        """What the threads that wait wait for."""
        lines = []
        at = self._block.waiting(WAITING)
        for address, parity in np.unique(self._for[at], axis=0).tolist():
            here = at[(self._for[at] == (address, parity)).all(axis=1)]
            who = f"{len(here)} threads from {here[0]} on wait"
            if address < 0:
                counts = ", ".join(str(n) for n in self._registers)
                lines.append(f"{who} for registers; warpgroups have {counts} of each thread")
            else:
                status = self._mbarriers[address].status
                lines.append(f"{who} for the end of a phase of parity {parity}: {status}")
        for number, barrier in self._named.items():
            expected = barrier.expected or "all"
            lines.append(f"{barrier.arrived} of {expected} threads are at barrier {number}")
        return "; ".join(lines) or "nobody waits at a barrier"

    def end(self) -> None:
        if self.copies:
            copy = self.copies[0]
            raise SimError(
                f"the kernel ended with {len(self.copies)} tensor copies under way, the first of "
                f"{copy.data.size} bytes for the {copy.barrier.name}"
            )
