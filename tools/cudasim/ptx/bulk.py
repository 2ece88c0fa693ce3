"""Bulk copies and sums from shared to global memory, and counts by which blocks order them.

A bulk copy takes its time: it reads shared memory at the wait for that and writes global memory at
the wait for all of it, whatever happened meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .machine import WARP, Block, Lanes, handles
from .parser import Immediate, Instruction
from .ptxtypes import TYPES, Array, SimError, size_of

_BULK = ("global", "shared::cta", "bulk_group")
_FORMS = {("async", "bulk", *_BULK): False, ("reduce", "async", "bulk", *_BULK, "add", "f32"): True}


@dataclass(eq=False)
class Bulk:
    """One copy under way, of one thread."""

    thread: int
    to: int
    sources: Array  # units of 16 bytes of shared memory, by address
    adds: bool
    committed: bool = False
    data: Array | None = None  # once it was read


def start_bulk(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """cp.async.bulk and cp.reduce.async.bulk of fp32 sums, from shared to global memory."""
    adds = _FORMS.get(instruction.modifiers)
    if adds is None or len(instruction.operands) != 3:
        raise SimError(f"{instruction.text} is not interpreted")
    target, source, size = instruction.operands
    to, at = block.address(target, lanes), block.address(source, lanes)
    sizes = block.read(size, "u32", lanes)
    for i, thread in enumerate(block.numbers(lanes).tolist()):
        if to[i] % 16 or sizes[i] % 16 or not sizes[i]:
            raise SimError(f"a bulk copy of {sizes[i]} bytes to {to[i]:#x}: multiples of 16")
        sources = at[i] + 16 * np.arange(sizes[i] // 16)
        block.shared.check_bulk(sources, thread // WARP)
        block.memory.check_fence(block.number)
        block.bulks.append(Bulk(thread, int(to[i]), sources, adds))


def end_group(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """cp.async.bulk.commit_group and wait_group 0, with .read or without."""
    mine = set(block.numbers(lanes).tolist())
    kind = instruction.modifiers[2:]
    if kind == ("commit_group",):
        for bulk in block.bulks:
            bulk.committed |= bulk.thread in mine
        return
    (count,) = instruction.operands
    read = kind == ("wait_group", "read")
    if not read and kind != ("wait_group",) or not isinstance(count, Immediate) or count.bits:
        raise SimError(f"{instruction.text} is not interpreted")
    for bulk in [b for b in block.bulks if b.committed and b.thread in mine]:
        if bulk.data is None:
            threads = np.full(len(bulk.sources), bulk.thread)
            bulk.data = block.shared.load(bulk.sources, 16, threads)
        if not read:
            units = bulk.to + 16 * np.arange(len(bulk.sources))
            block.memory.land(units, bulk.data, block.number, bulk.adds)
            block.bulks.remove(bulk)


def acquire(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """ld.acquire.gpu of a word of global memory."""
    if instruction.modifiers[:-1] != ("acquire", "gpu", "global"):
        raise SimError(f"{instruction.text} is not interpreted")
    target, place = instruction.operands
    values = [
        block.memory.acquire(int(address), size_of(instruction.type), block.number)
        for address in block.address(place, lanes)
    ]
    block.write(target, np.concatenate(values).view(TYPES[instruction.type]), lanes)


@handles("red")
def release(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """red.release.gpu.global.add of a word."""
    if instruction.modifiers[:-1] != ("release", "gpu", "global", "add"):
        raise SimError(f"{instruction.text} is not interpreted")
    place, value = instruction.operands
    values = block.read(value, instruction.type, lanes)
    for address, number in zip(block.address(place, lanes), values, strict=True):
        cell = block.memory.release(int(address), size_of(instruction.type), block.number)
        cell.view(TYPES[instruction.type])[0] += number
