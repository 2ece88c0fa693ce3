"""Instructions that compute on registers: integers, floats, comparisons, conversions, moves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .machine import WARP, Block, Lanes, handles
from .memory import LocalMemory
from .parser import Discard, Instruction, Pair, Register, Vector
from .ptxtypes import TYPES, UNSIGNED, Array, SimError, bf16_to_f32, f32_to_bf16, size_of

_ROUNDINGS = ("rn", "rni", "rz", "rzi")


def _reject(instruction: Instruction, *allowed: str) -> None:
    """An unknown modifier would silently be computed wrong."""
    for modifier in instruction.modifiers:
        if modifier not in TYPES and modifier not in allowed:
            raise SimError(f"modifier .{modifier} is not interpreted")


def _inputs(block: Block, instruction: Instruction, lanes: Lanes) -> list[Array]:
    return [block.read(o, instruction.type, lanes) for o in instruction.operands[1:]]


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@handles(*_BINARY)
def binary(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    _reject(instruction, "rn")
    if instruction.type in ("f16", "bf16"):
        raise SimError(f"arithmetic in {instruction.type} is not interpreted")
    if instruction.type.startswith("f") and instruction.opcode in ("min", "max"):
        raise SimError("min and max of floats are not interpreted")
    a, b = _inputs(block, instruction, lanes)
    with np.errstate(all="ignore"):
        block.write(instruction.operands[0], _BINARY[instruction.opcode](a, b), lanes)


@handles("mul", "mad")
def multiply(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """mul of floats; mul and mad of integers, .lo or .wide."""
    _reject(instruction, "lo", "wide", "rn")
    kind = instruction.type
    if instruction.opcode == "mad" and kind[0] == "f":
        raise SimError("mad of floats is not interpreted")
    wide = f"{kind[0]}{16 * size_of(kind)}" if "wide" in instruction.modifiers else kind
    a, b = (block.read(o, kind, lanes).astype(TYPES[wide]) for o in instruction.operands[1:3])
    with np.errstate(all="ignore"):
        result = a * b
        if instruction.opcode == "mad":
            result = result + block.read(instruction.operands[3], wide, lanes)
    block.write(instruction.operands[0], result, lanes)


@handles("neg", "abs", "not")
def unary(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    _reject(instruction)
    (a,) = _inputs(block, instruction, lanes)
    if instruction.opcode == "not":
        result = ~a
    else:
        with np.errstate(all="ignore"):
            result = -a if instruction.opcode == "neg" else np.abs(a)
    block.write(instruction.operands[0], result, lanes)


@handles("shl", "shr")
def shift(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """Amounts beyond the width give zero, or the sign for shr.s."""
    _reject(instruction)
    value = block.read(instruction.operands[1], instruction.type, lanes)
    amount = block.read(instruction.operands[2], "u32", lanes)
    width = 8 * value.dtype.itemsize
    inside = np.minimum(amount, width - 1).astype(value.dtype)
    if instruction.opcode == "shl":
        result = np.where(amount < width, value << inside, 0).astype(value.dtype)
    elif value.dtype.kind == "i":
        result = value >> inside
    else:
        result = np.where(amount < width, value >> inside, 0).astype(value.dtype)
    block.write(instruction.operands[0], result, lanes)


_ORDERED: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b) if a.dtype.kind == "f" else a != b,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "neu": np.not_equal,
}


@handles("setp")
def compare(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    _reject(instruction, *_ORDERED)
    comparison = instruction.modifiers[0]
    if comparison not in _ORDERED or isinstance(instruction.operands[0], Pair):
        raise SimError(f"comparison {instruction.text} is not interpreted")
    a, b = _inputs(block, instruction, lanes)
    with np.errstate(all="ignore"):
        block.write(instruction.operands[0], _ORDERED[comparison](a, b), lanes)


@handles("selp")
def select(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    _reject(instruction)
    target, a, b, predicate = instruction.operands
    chosen = np.where(
        block.read(predicate, "pred", lanes),
        block.read(a, instruction.type, lanes),
        block.read(b, instruction.type, lanes),
    )
    block.write(target, chosen, lanes)


@handles("mov")
def move(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """Also packs ``{lo, hi}`` into a register and unpacks one."""
    _reject(instruction)
    target, source = instruction.operands
    size = size_of(instruction.type)
    if isinstance(source, Vector):
        part = size // len(source.items)
        columns = [block.read(item, f"b{8 * part}", lanes) for item in source.items]
        packed = np.stack(columns, axis=1).view(UNSIGNED[size])[:, 0]
        block.write(target, packed, lanes)
    elif isinstance(target, Vector):
        part = size // len(target.items)
        whole = np.ascontiguousarray(block.read(source, f"b{8 * size}", lanes))
        parts = whole.view(UNSIGNED[part]).reshape(-1, len(target.items))
        for i, item in enumerate(target.items):
            block.write(item, parts[:, i], lanes)
    else:
        block.write(target, block.read(source, instruction.type, lanes), lanes)


@handles("cvta")
def convert_address(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """Global addresses are generic ones; local memory is a window above them."""
    _reject(instruction, "to", "global", "local")
    address = block.read(instruction.operands[1], "u64", lanes)
    if "local" in instruction.modifiers:
        base = np.uint64(LocalMemory.BASE)
        address = address - base if "to" in instruction.modifiers else address + base
    block.write(instruction.operands[0], address, lanes)


@handles("cvt")
def convert(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    _reject(instruction, *_ROUNDINGS)
    to, of = instruction.modifiers[-2:]
    if to in ("f16", "bf16", "f32") and {"rz", "rzi", "rni"} & set(instruction.modifiers):
        raise SimError("rounding of a float other than to nearest is not interpreted")
    value = block.read(instruction.operands[1], of, lanes)
    if of == "bf16":
        value, of = bf16_to_f32(value), "f32"
    with np.errstate(all="ignore"):
        if to == "bf16":
            if of != "f32":
                raise SimError(f"conversion {instruction.text} is not interpreted")
            result = f32_to_bf16(value)
        elif value.dtype.kind == "f" and to[0] in "us":
            rounded = np.rint(value) if "rni" in instruction.modifiers else np.trunc(value)
            limits = np.iinfo(TYPES[to])
            clipped = np.clip(np.nan_to_num(rounded, nan=0.0), limits.min, limits.max)
            result = clipped.astype(TYPES[to])
        else:
            result = value.astype(TYPES[to])
    block.write(instruction.operands[0], result, lanes)


@handles("shfl")
def shuffle(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """shfl.sync with all 32 lanes; the lanes must all be here."""
    _reject(instruction, "sync", "idx", "bfly", "up", "down")
    target, source, distance, clamp, mask = instruction.operands
    block.whole_warps(lanes)
    if (block.read(mask, "u32", lanes) != 0xFFFFFFFF).any():
        raise SimError("shfl.sync with a part of the warp is not interpreted")
    lane = np.arange(WARP)[None]
    values = block.read(source, "b32", lanes).reshape(-1, WARP)
    b = block.read(distance, "u32", lanes).reshape(-1, WARP).astype(np.int64)
    c = block.read(clamp, "u32", lanes).reshape(-1, WARP).astype(np.int64)
    segment, limit = c >> 8 & 31, c & 31
    last = (lane & segment) | (limit & ~segment & 31)
    mode = instruction.modifiers[1]
    wanted = {
        "idx": (lane & segment) | (b & ~segment & 31),
        "bfly": lane ^ b,
        "up": lane - b,
        "down": lane + b,
    }[mode]
    valid = wanted >= last if mode == "up" else wanted <= last
    result = np.take_along_axis(values, np.where(valid, wanted, lane), axis=1).ravel()
    value, predicate = (
        (target.first, target.second) if isinstance(target, Pair) else (target, Discard())
    )
    block.write(value, result, lanes)
    if isinstance(predicate, Register):
        block.write(predicate, np.broadcast_to(valid, values.shape).ravel(), lanes)
