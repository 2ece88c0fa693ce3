"""Runs one block: all its threads are one numpy vector, one instruction at a time.

Threads that branched apart run in turns, the lowest instruction first, and meet again where their
program counters do. An instruction that needs its whole warp, or warpgroup, parks the threads that
arrived until the rest comes; if it never comes, that is the divergence the hardware would hang on.
A kernel with mbarriers runs its warps in an order drawn from Python's `random`, and a tensor copy
arrives when nothing else can go on. So do blocks that wait for each other, which run together.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .barriers import AT_BARRIER, DONE, PARKED, READY, WAITING, Barriers
from .memory import GlobalMemory, LocalMemory
from .order import WARP, Order
from .parser import (
    Address,
    Discard,
    Immediate,
    Instruction,
    Kernel,
    Operand,
    Register,
    Special,
    Symbol,
)
from .products import Products
from .ptxtypes import TYPES, UNSIGNED, Array, SimError
from .shared import SharedMemory

if TYPE_CHECKING:
    from .bulk import Bulk

#: Where the kernel's parameters lie in the generic address space.
PARAMETER_WINDOW = 1 << 51

#: Which threads an instruction runs for: their numbers, or all.
Lanes = Any


class Hold(Exception):
    """These threads can't run the instruction yet; the others run it now."""

    def __init__(self, threads: Array, state: int) -> None:
        self.threads, self.state = threads, state


class Barrier(Exception):
    """The instruction is done, and its threads wait for others."""


Handler = Callable[["Block", Instruction, Lanes], None]
HANDLERS: dict[str, Handler] = {}


def handles(*opcodes: str) -> Callable[[Handler], Handler]:
    """Registers the function that executes these opcodes."""

    def register(function: Handler) -> Handler:
        for opcode in opcodes:
            HANDLERS[opcode] = function
        return function

    return register


class Block:
    """One thread block in the middle of a launch."""

    MAX_STEPS = 2_000_000

    def __init__(
        self,
        kernel: Kernel,
        memory: GlobalMemory,
        symbols: dict[str, int],
        parameters: bytes,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        index: tuple[int, int, int],
        printed: list[str],
        dynamic_shared: int = 0,
    ) -> None:
        self.kernel = kernel
        self.memory = memory
        self.symbols = symbols  # addresses of the module's global variables
        self.parameters = np.frombuffer(parameters, np.uint8)
        self.printed = printed
        self.threads = block[0] * block[1] * block[2]
        self.number = index[0] + grid[0] * (index[1] + grid[1] * index[2])
        self.local = LocalMemory(self.threads, kernel.local_bytes)
        self.order = Order(self.threads)
        size = kernel.shared_bytes + dynamic_shared
        self.shared = SharedMemory(size, self.threads, self.order)
        self.random = random.Random(random.getrandbits(64)) if kernel.has_barriers else None
        # A warp of every second block runs when nothing else can, not even a copy arrive.
        self._slow: Array | None = None
        if self.random is not None and self.random.random() < 0.5:
            slow = self.random.randrange(-(-self.threads // WARP))
            self._slow = np.arange(self.threads) // WARP == slow
        self.products = Products(self)
        self.barriers = Barriers(self)
        self._watched = kernel.product_registers
        self.bulks: list[Bulk] = []  # bulk copies under way
        self.call_parameters: dict[str, Array] = {}
        self.steps = 0
        self._pc = np.zeros(self.threads, np.int64)
        self._state = np.full(self.threads, READY, np.int8)
        self._all = np.arange(self.threads)
        self._registers: list[Array | None] = [None] * len(kernel.register_types)
        t = self._all
        tid = (t % block[0], t // block[0] % block[1], t // (block[0] * block[1]))
        self._specials: dict[str, Sequence[Any]] = {
            "tid": tid,
            "ntid": block,
            "ctaid": index,
            "nctaid": grid,
            "laneid": (t % WARP,) * 3,
            "warpid": (t // WARP,) * 3,
        }

    # ---- operands --------------------------------------------------------------------------------

    def register(self, register: Register) -> Array:
        """The bits of a register in every thread; poison before the first write."""
        values = self._registers[register.slot]
        if values is None:
            if register.type == "pred":
                values = np.zeros(self.threads, np.bool_)
            else:
                unsigned = UNSIGNED[np.dtype(TYPES[register.type]).itemsize]
                values = np.full(self.threads, np.iinfo(unsigned).max, unsigned)
            self._registers[register.slot] = values
        return values

    def count(self, lanes: Lanes) -> int:
        return lanes.stop - lanes.start if isinstance(lanes, slice) else len(lanes)

    def numbers(self, lanes: Lanes) -> Array:
        return self._all[lanes]

    def read(self, operand: Operand, type_name: str, lanes: Lanes) -> Array:
        """The operand's value in each lane, as the numpy type of a PTX type."""
        dtype = np.dtype(TYPES[type_name])
        if isinstance(operand, Register):
            if operand.slot in self._watched:
                self.products.touch(self._watched[operand.slot], operand, lanes)
            values = self.register(operand)[lanes]
            if values.dtype == dtype:
                return values
            if dtype == np.bool_ or values.dtype == np.bool_:
                raise SimError("a predicate is used as a number, or a number as a predicate")
            if values.dtype.itemsize != dtype.itemsize:
                values = values.astype(UNSIGNED[dtype.itemsize])
            return values.view(dtype)
        count = self.count(lanes)
        if isinstance(operand, Immediate):
            if dtype == np.bool_:
                return np.full(count, bool(operand.bits))
            unsigned = UNSIGNED[dtype.itemsize]
            bits = operand.bits & ((1 << 8 * dtype.itemsize) - 1)
            return np.full(count, np.array(bits, unsigned).view(dtype))
        if isinstance(operand, Special):
            value = np.asarray(self._specials[operand.name][operand.axis])
            if value.ndim:
                value = value[lanes]
            return np.broadcast_to(value.astype(dtype), (count,))
        if isinstance(operand, Symbol):
            return np.full(count, self.symbol(operand), dtype)
        raise SimError(f"operand {operand} has no value")

    def symbol(self, symbol: Symbol) -> int:
        """Address in the symbol's own space; of a global variable, the generic address."""
        if symbol.space == "global":
            return self.symbols[symbol.name]
        return symbol.offset + (SharedMemory.BASE if symbol.space == "shared" else 0)

    def write(self, operand: Operand, values: Array, lanes: Lanes) -> None:
        """Sets a register; narrower integers are extended by their own sign, as ld and cvt do."""
        if isinstance(operand, Discard):
            return
        if not isinstance(operand, Register):
            raise SimError(f"destination {operand} is not a register")
        if operand.slot in self._watched:
            self.products.touch(self._watched[operand.slot], operand, lanes)
        target = self.register(operand)
        if values.dtype != target.dtype:
            if values.dtype.itemsize == target.dtype.itemsize:
                values = np.ascontiguousarray(values).view(target.dtype)
            elif values.dtype.kind == "f":
                raise SimError("a float is written to a register of another width")
            else:
                values = values.astype(target.dtype)
        target[lanes] = values

    def address(self, operand: Operand, lanes: Lanes) -> Array:
        """int64 address in each lane of a ``[base + offset]`` operand."""
        if not isinstance(operand, Address):
            raise SimError(f"{operand} is not an address")
        return self.read(operand.base, "u64", lanes).astype(np.int64) + operand.offset

    def uniform(self, operand: Operand, type_name: str, lanes: Lanes, what: str) -> Any:
        """The operand's value, which must be the same in these lanes."""
        values = self.read(operand, type_name, lanes)
        if (values != values[0]).any():
            raise SimError(f"{what} differs between threads that run one instruction together")
        return values[0]

    def whole_warps(self, lanes: Lanes, size: int = WARP) -> None:
        """Holds the threads of warps (or warpgroups: of `size` threads) that are not all here."""
        numbers = self.numbers(lanes)
        groups = numbers // size
        count = -(-self.threads // size)
        present = np.bincount(groups, minlength=count)
        full = np.full(count, size)
        if size == WARP:
            full[-1] = self.threads - WARP * (count - 1)
        elif present[self.threads // size :].any():
            raise SimError("a part of the block is no whole warpgroup")
        short = (present > 0) & (present < full)
        if short.any():
            if (self._state[short[self._all // size]] == DONE).any():
                raise SimError("a lane that has exited is needed by a warp-wide instruction")
            raise Hold(numbers[short[groups]], PARKED)

    # ---- control ---------------------------------------------------------------------------------

    def waiting(self, state: int) -> Array:
        """The threads in a state."""
        return np.flatnonzero(self._state == state)

    def wake(self, threads: Array) -> None:
        self._state[threads] = READY

    def go_on(self) -> bool:
        """Runs threads of the block until they part or wait; whether any are left."""
        if (self._state == DONE).all():
            self.barriers.end()
            self.products.end()
            self.shared.end()
            if self.bulks:
                raise SimError(f"the kernel ended with {len(self.bulks)} bulk copies under way")
            return False
        ready = self._state == READY
        if not ready.any():
            self._unblock()
            return True
        runnable = ready | (self._state == PARKED)
        if self._slow is not None:
            if (ready & ~self._slow).any():
                ready, runnable = ready & ~self._slow, runnable & ~self._slow
            elif self.barriers.copy_arrives():
                return True
        current = self._next(ready)
        chosen = runnable & (self._pc == current)
        self._state[chosen] = READY
        later = runnable & (self._pc > current)
        limit = int(self._pc[later].min()) if later.any() else 1 << 60
        self._run_together(current, limit, chosen)
        return True

    def _next(self, ready: Array) -> int:
        """The instruction to go on at: the lowest, now and then the lowest of any one warp."""
        if self.random is not None and self.random.random() < 0.25:
            thread = self.random.choice(np.flatnonzero(ready).tolist())
            ready = ready & (self._all // WARP == thread // WARP)
        return int(self._pc[ready].min())

    def _unblock(self) -> None:
        """Nothing can run: a barrier opens, a copy arrives, or this is a deadlock."""
        waiting = self._state == AT_BARRIER
        if waiting.any() and (waiting | (self._state == DONE)).all():
            if self.barriers.open_whole(np.flatnonzero(waiting), self._pc):
                return
        elif (self._state == WAITING).any() and self.barriers.copy_arrives():
            return
        stuck = self.barriers.stuck()
        if (self._state == PARKED).any():
            raise SimError(
                f"warp divergence: lanes wait for a part of their warp for ever; {stuck}"
            )
        raise SimError(f"deadlock: {stuck}")

    def _run_together(self, current: int, limit: int, chosen: Array) -> None:
        """Runs the chosen threads until they part, end, wait, or reach others at `limit`."""
        lanes: Lanes = _compact(np.flatnonzero(chosen))
        instructions = self.kernel.instructions
        while current < limit:
            if current >= len(instructions):
                self._state[lanes] = DONE
                return
            instruction = instructions[current]
            self.steps += 1
            if self.steps > self.MAX_STEPS:
                raise SimError(f"no end after {self.MAX_STEPS} instructions: an endless loop?")
            active = self._active(instruction, lanes)
            if instruction.opcode == "bra":
                self._pc[lanes] = current + 1
                self._pc[active] = instruction.target
                if self.count(active) == self.count(lanes) and instruction.target > current:
                    current = instruction.target
                    continue
                return
            if instruction.opcode in ("ret", "exit"):
                self._pc[lanes] = current + 1
                self._state[active] = DONE
                if self.count(active) == self.count(lanes):
                    return
                lanes = np.setdiff1d(self.numbers(lanes), self.numbers(active))
            elif self.count(active):
                try:
                    self._execute(instruction, active)
                except Hold as hold:
                    self._pc[hold.threads] = current
                    self._state[hold.threads] = hold.state
                    rest = np.setdiff1d(self.numbers(lanes), hold.threads)
                    if not len(rest):
                        return
                    lanes = _compact(rest)
                    continue  # the same instruction, for them
                except Barrier:
                    self._pc[lanes] = current + 1
                    self._state[active] = AT_BARRIER
                    self.barriers.open()
                    return
            current += 1
        self._pc[lanes] = current

    def _active(self, instruction: Instruction, lanes: Lanes) -> Lanes:
        """The lanes whose guard predicate holds."""
        if instruction.guard is None:
            return lanes
        holds = self.register(instruction.guard)[lanes] ^ instruction.negated
        return lanes if holds.all() else self.numbers(lanes)[holds]

    def _execute(self, instruction: Instruction, lanes: Lanes) -> None:
        handler = HANDLERS.get(instruction.opcode)
        if handler is None:
            raise SimError(f"instruction is not interpreted: {instruction.text}")
        try:
            handler(self, instruction, lanes)
        except SimError as error:
            where = f"{self.kernel.name}, block {self.number}, at: {instruction.text}"
            raise SimError(f"{error} [{where}]") from None


def _compact(threads: Array) -> Lanes:
    """A slice where the threads follow each other: numpy is quicker with one."""
    first, last = int(threads[0]), int(threads[-1])
    return slice(first, last + 1) if last - first + 1 == len(threads) else threads


def launch(
    kernel: Kernel,
    memory: GlobalMemory,
    symbols: dict[str, int],
    parameters: bytes,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    printed: list[str],
    dynamic_shared: int = 0,
) -> int:
    """Runs a whole grid, block after block; returns the number of vector instructions."""
    if kernel.max_threads is not None and block[0] * block[1] * block[2] > kernel.max_threads:
        raise SimError(f"{block} threads are more than the kernel's {kernel.max_threads}")
    if len(parameters) != kernel.parameter_bytes:
        raise SimError(f"{len(parameters)} parameter bytes, but {kernel.parameter_bytes} wanted")
    memory.begin_launch()
    arguments = kernel, memory, symbols, parameters, grid, block
    indices = ((x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0]))
    blocks = (Block(*arguments, index, printed, dynamic_shared) for index in indices)
    steps = 0
    # Blocks that wait for each other are on the device together, others one after another.
    running = list(blocks if kernel.waits_for_blocks else itertools.islice(blocks, 1))
    while running:
        chosen = random.choice(running)
        if not chosen.go_on():
            running.remove(chosen)
            steps += chosen.steps
            running += itertools.islice(blocks, 1)
    return steps
