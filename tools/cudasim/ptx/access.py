"""Instructions that touch memory or leave the kernel: ld, st, atom, call, trap."""

from __future__ import annotations

import re
import struct

import numpy as np

from .bulk import acquire
from .machine import Block, Lanes, handles
from .memory import LocalMemory
from .parser import Address, Instruction, Operand, Symbol, Vector
from .ptxtypes import TYPES, UNSIGNED, Array, SimError, size_of

_SPACES = ("global", "local", "param", "shared")
# Cache hints change speed only.
_HINTS = ("nc", "ca", "cg", "cs", "lu", "wb", "wt", "L1::no_allocate")
_COUNTS = {"v2": 2, "v4": 4}


def _shape(instruction: Instruction) -> tuple[str, int]:
    """Memory space and number of elements of a load or store."""
    space, count = "generic", 1
    for modifier in instruction.modifiers[:-1]:
        if modifier in _SPACES:
            space = modifier
        elif modifier in _COUNTS:
            count = _COUNTS[modifier]
        elif modifier not in _HINTS:
            raise SimError(f"modifier .{modifier} is not interpreted")
    return space, count


def _items(operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise SimError(f"{len(items)} registers for {count} elements")
    return items


def _call_parameter(block: Block, operand: Operand, size: int) -> tuple[Array, int] | None:
    """The bytes, uint8 [threads, 64], of a parameter of a call, and the offset into them."""
    if not (isinstance(operand, Address) and isinstance(operand.base, Symbol)):
        return None
    if operand.base.space != "call":
        return None
    if operand.offset + size > 64:
        raise SimError("parameters of calls are interpreted up to 64 bytes")
    new = np.zeros((block.threads, 64), np.uint8)
    return block.call_parameters.setdefault(operand.base.name, new), operand.offset


@handles("ld")
def load(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    if "acquire" in instruction.modifiers:
        acquire(block, instruction, lanes)
        return
    space, count = _shape(instruction)
    element = size_of(instruction.type)
    size = element * count
    target, source = instruction.operands
    call = _call_parameter(block, source, size) if space == "param" else None
    if call is not None:
        data = call[0][lanes, call[1] : call[1] + size]
    else:
        address = block.address(source, lanes)
        if space == "param":
            at = address[:, None] + np.arange(size)
            if (at >= len(block.parameters)).any():
                raise SimError("read beyond the kernel's parameters")
            data = block.parameters[at]
        elif space == "local":
            data = block.local.load(address, size, block.numbers(lanes))
        elif space == "shared":
            data = block.shared.load(address, size, block.numbers(lanes))
        elif space == "generic" and (address >= LocalMemory.BASE).all():
            data = block.local.load(address - LocalMemory.BASE, size, block.numbers(lanes))
        else:
            read_only = "nc" in instruction.modifiers
            data = block.memory.load(address, size, block.number, read_only)
    values = np.ascontiguousarray(data).view(UNSIGNED[element]).view(TYPES[instruction.type])
    for i, item in enumerate(_items(target, count)):
        block.write(item, values[:, i], lanes)


@handles("st")
def store(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    space, count = _shape(instruction)
    target, source = instruction.operands
    columns = [block.read(item, instruction.type, lanes) for item in _items(source, count)]
    data = np.ascontiguousarray(np.stack(columns, axis=1)).view(np.uint8)
    call = _call_parameter(block, target, data.shape[1]) if space == "param" else None
    if call is not None:
        call[0][lanes, call[1] : call[1] + data.shape[1]] = data
        return
    address = block.address(target, lanes)
    if space == "local":
        block.local.store(address, data, block.numbers(lanes))
    elif space == "shared":
        block.shared.store(address, data, block.numbers(lanes))
    elif space == "generic" and (address >= LocalMemory.BASE).all():
        block.local.store(address - LocalMemory.BASE, data, block.numbers(lanes))
    elif space == "param":
        raise SimError("write to a kernel's parameters")
    else:
        block.memory.store(address, data, block.number)


@handles("atom")
def atomic(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """Compare-and-swap, exchange and add, lane after lane, in global memory; add in shared."""
    shared = "shared" in instruction.modifiers
    plain = ("global", "shared", "relaxed", "gpu")
    operation = [m for m in instruction.modifiers[:-1] if m not in plain]
    if operation not in ([["add"]] if shared else [["cas"], ["exch"], ["add"]]):
        raise SimError(f"atomic {instruction.text} is not interpreted")
    target, place, *inputs = instruction.operands
    addresses = block.address(place, lanes)
    values = [block.read(o, instruction.type, lanes) for o in inputs]
    size = size_of(instruction.type)
    before = np.empty(len(addresses), TYPES[instruction.type])
    for i, address in enumerate(addresses):
        if shared:
            thread = int(block.numbers(lanes)[i])
            cell = block.shared.atomic(int(address), size, thread).view(TYPES[instruction.type])
        else:
            cell = block.memory.atomic(int(address), size).view(TYPES[instruction.type])
        before[i] = cell[0]
        if operation == ["cas"]:
            if cell[0] == values[0][i]:
                cell[0] = values[1][i]
        elif operation == ["exch"]:
            cell[0] = values[0][i]
        else:
            cell += values[0][i]
    block.write(target, before, lanes)


@handles("call")
def call(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """vprintf, the one function that the kernels call; its text goes to `printed`."""
    if instruction.callee != "vprintf":
        raise SimError(f"call of {instruction.callee} is not interpreted")
    results, arguments = instruction.operands
    assert isinstance(results, Vector) and isinstance(arguments, Vector)
    words = []
    for argument in arguments.items:
        assert isinstance(argument, Symbol)
        words.append(np.ascontiguousarray(block.call_parameters[argument.name][:, :8]))
    formats, buffers = (word.view(np.uint64)[:, 0] for word in words)
    for thread in block.numbers(lanes):
        text = block.memory.string(int(formats[thread])).decode()
        block.printed.append(_format(block, text, int(buffers[thread]), int(thread)))
    for result in results.items:
        assert isinstance(result, Symbol)
        block.call_parameters[result.name] = np.zeros((block.threads, 64), np.uint8)


def _format(block: Block, text: str, buffer: int, thread: int) -> str:
    """printf's conversions %d, %u, %x and their ll forms, from the argument buffer."""
    offset = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal offset
        size, kind = (8 if match.group(1) else 4), match.group(2)
        offset = -(-offset // size) * size
        address = np.array([buffer + offset - LocalMemory.BASE], np.int64)
        data = block.local.load(address, size, np.array([thread]))[0].tobytes()
        offset += size
        code = {8: "q", 4: "i"}[size]
        return format(struct.unpack(code if kind == "d" else code.upper(), data)[0], kind)

    return re.sub(r"%(ll)?([dux])", replace, text.replace("%u", "%d"))


@handles("trap")
def trap(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    said = f" after printing {block.printed[-1].strip()!r}" if block.printed else ""
    raise SimError(f"trap{said}")
