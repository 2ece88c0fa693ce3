"""Runs one block: all its threads are one numpy vector, one instruction at a time.

Threads that branched apart run in turns, the lowest instruction first, and meet again where their
program counters do. An instruction that needs its whole warp parks the threads that arrived until
the rest comes; if it never comes, that is the divergence the hardware would hang on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .memory import GlobalMemory, LocalMemory, SharedMemory
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
from .ptxtypes import TYPES, UNSIGNED, Array, SimError

WARP = 32
READY, PARKED, DONE, AT_BARRIER = 0, 1, 2, 3

#: Which threads an instruction runs for: their numbers, or all.
Lanes = Any


class Park(Exception):
    """The instruction needs all lanes of its warps, and some have not arrived."""


class Barrier(Exception):
    """The instruction is done, and its threads wait for the rest of the block."""


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
        self.shared = SharedMemory(kernel.shared_bytes + dynamic_shared, self.threads)
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
        return self.threads if isinstance(lanes, slice) else len(lanes)

    def numbers(self, lanes: Lanes) -> Array:
        return self._all[lanes]

    def read(self, operand: Operand, type_name: str, lanes: Lanes) -> Array:
        """The operand's value in each lane, as the numpy type of a PTX type."""
        dtype = np.dtype(TYPES[type_name])
        if isinstance(operand, Register):
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
        return self.symbols[symbol.name] if symbol.space == "global" else symbol.offset

    def write(self, operand: Operand, values: Array, lanes: Lanes) -> None:
        """Sets a register; narrower integers are extended by their own sign, as ld and cvt do."""
        if isinstance(operand, Discard):
            return
        if not isinstance(operand, Register):
            raise SimError(f"destination {operand} is not a register")
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

    def whole_warps(self, lanes: Lanes) -> None:
        """Parks unless every live lane of the warps concerned is here."""
        numbers = self.numbers(lanes)
        warps = np.unique(numbers // WARP)
        members = np.isin(self._all // WARP, warps)
        if members.sum() != len(numbers):
            if (self._state[members] == DONE).any():
                raise SimError("a lane that has exited is needed by a warp-wide instruction")
            raise Park

    # ---- control ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs the block to its end."""
        while not (self._state == DONE).all():
            ready = self._state == READY
            if not ready.any():
                self._open_barrier()
                continue
            current = int(self._pc[ready].min())
            chosen = ((self._state == READY) | (self._state == PARKED)) & (self._pc == current)
            self._state[chosen] = READY
            waiting = ready & (self._pc > current)
            limit = int(self._pc[waiting].min()) if waiting.any() else 1 << 60
            self._run_together(current, limit, chosen)

    def _open_barrier(self) -> None:
        """Nothing can run: every live thread is at the barrier, or this is a deadlock."""
        waiting = self._state == AT_BARRIER
        if (self._state == PARKED).any() or not waiting.any():
            at_it = f"; {waiting.sum()} threads wait at a barrier" if waiting.any() else ""
            raise SimError(f"warp divergence: lanes wait for a part of their warp for ever{at_it}")
        if len(np.unique(self._pc[waiting])) > 1:
            raise SimError("threads of the block wait at different barriers")
        self._state[waiting] = READY
        self.shared.barrier()

    def _run_together(self, current: int, limit: int, chosen: Array) -> None:
        """Runs the chosen threads until they part, end, park, or reach others at `limit`."""
        lanes: Lanes = slice(None) if chosen.all() else np.flatnonzero(chosen)
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
                except Park:
                    self._pc[lanes] = current
                    self._state[lanes] = PARKED
                    return
                except Barrier:
                    if self.count(active) != self.count(lanes):
                        raise SimError(f"a part of a warp is at {instruction.text}") from None
                    self._pc[lanes] = current + 1
                    self._state[lanes] = AT_BARRIER
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
    steps = 0
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                index = (x, y, z)
                running = Block(
                    kernel,
                    memory,
                    symbols,
                    parameters,
                    grid,
                    block,
                    index,
                    printed,
                    dynamic_shared,
                )
                running.run()
                running.shared.end()
                steps += running.steps
    return steps
