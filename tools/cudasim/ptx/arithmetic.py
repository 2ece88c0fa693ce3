"""Instructions that compute on registers: integers, floats, comparisons, conversions, moves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .machine import PARAMETER_WINDOW, WARP, Block, Lanes, handles
from .memory import LocalMemory
from .parser import Discard, Instruction, Pair, Register, Vector
from .ptxtypes import TYPES, UNSIGNED, Array, SimError, bf16_to_f32, f32_to_bf16, size_of
from .shared import SharedMemory

_ROUNDINGS = ("rn", "rni", "rz", "rzi")


def _reject(instruction: Instruction, *allowed: str) -> None:
    """An unknown modifier would silently be computed wrong."""
    for modifier in instruction.modifiers:
        if modifier not in TYPES and modifier not in (*allowed, "f16x2", "bf16x2"):
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
    operation = _BINARY[instruction.opcode]
    if instruction.type.startswith("f") and instruction.opcode in ("min", "max"):
        operation = np.fmin if instruction.opcode == "min" else np.fmax  # the number, not the NaN
    a, b = _inputs(block, instruction, lanes)
    with np.errstate(all="ignore"):
        block.write(instruction.operands[0], operation(a, b), lanes)


@handles("mul", "mad")
def multiply(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """mul of floats; mul and mad of integers, .lo or .wide; mul.hi of 32 bits."""
    _reject(instruction, "lo", "wide", "hi", "rn")
    kind = instruction.type
    if instruction.opcode == "mad" and kind[0] == "f":
        raise SimError("mad of floats is not interpreted")
    high = "hi" in instruction.modifiers
    if high and (instruction.opcode == "mad" or size_of(kind) != 4):
        raise SimError(f"{instruction.text} is not interpreted")
    double = high or "wide" in instruction.modifiers
    wide = f"{kind[0]}{16 * size_of(kind)}" if double else kind
    a, b = (block.read(o, kind, lanes).astype(TYPES[wide]) for o in instruction.operands[1:3])
    with np.errstate(all="ignore"):
        result = a * b
        if instruction.opcode == "mad":
            result = result + block.read(instruction.operands[3], wide, lanes)
        if high:
            result = (result >> 32).astype(TYPES[kind])
    block.write(instruction.operands[0], result, lanes)


@handles("div", "rem")
def divide(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """Of integers, truncated; division by zero is an error here."""
    _reject(instruction)
    a, b = _inputs(block, instruction, lanes)
    if a.dtype.kind == "f" or (b == 0).any():
        raise SimError("division of floats, or by zero, is not interpreted")
    quotient = a // b
    if a.dtype.kind == "i":  # numpy rounds down
        quotient = quotient + ((a % b != 0) & ((a < 0) != (b < 0)))
    result = quotient if instruction.opcode == "div" else a - quotient * b
    block.write(instruction.operands[0], result.astype(a.dtype), lanes)


@handles("fma")
def fused(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """In float64 and rounded: within one ulp in 2^29 cases of the single rounding."""
    _reject(instruction, "rn")
    a, b, c = (x.astype(np.float64) for x in _inputs(block, instruction, lanes))
    with np.errstate(all="ignore"):
        block.write(instruction.operands[0], (a * b + c).astype(np.float32), lanes)


@handles("ex2", "lg2", "rcp")
def special(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """Correctly rounded; the hardware's ex2.approx and lg2.approx are within 2^-22."""
    _reject(instruction, "approx", "ftz", "rn")
    (a,) = _inputs(block, instruction, lanes)
    flushed = _flushed if "ftz" in instruction.modifiers else np.float32
    a = flushed(a)
    with np.errstate(all="ignore"):
        if instruction.opcode == "rcp":
            result = np.float32(1) / a
        else:
            result = np.exp2(a) if instruction.opcode == "ex2" else np.log2(a)
    block.write(instruction.operands[0], flushed(result), lanes)


def _flushed(x: Array) -> Array:
    """float32, subnormal numbers as zeros of their sign."""
    x = x.astype(np.float32)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


@handles("bfi")
def insert_bits(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    _reject(instruction)
    target, field, base, start, length = instruction.operands
    f, b = (block.read(x, "b32", lanes).astype(np.uint64) for x in (field, base))
    at, n = (block.read(x, "u32", lanes).astype(np.uint64) & 0xFF for x in (start, length))
    mask = ((np.uint64(1) << n) - np.uint64(1)) << at
    block.write(target, ((b & ~mask) | ((f << at) & mask)).astype(np.uint32), lanes)


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
    # The unordered ones hold for a NaN.
    "neu": np.not_equal,
    "ltu": lambda a, b: ~np.greater_equal(a, b),
    "leu": lambda a, b: ~np.greater(a, b),
    "gtu": lambda a, b: ~np.less_equal(a, b),
    "geu": lambda a, b: ~np.less(a, b),
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


_WINDOWS = {
    "global": 0,
    "local": LocalMemory.BASE,
    "shared": SharedMemory.WINDOW,
    "param": PARAMETER_WINDOW,
}


@handles("cvta")
def convert_address(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """Global addresses are generic ones; the other spaces are windows above them."""
    _reject(instruction, "to", *_WINDOWS)
    address = block.read(instruction.operands[1], "u64", lanes)
    if "global" not in instruction.modifiers:
        base = np.uint64(next(_WINDOWS[m] for m in instruction.modifiers if m in _WINDOWS))
        address = address - base if "to" in instruction.modifiers else address + base
    block.write(instruction.operands[0], address, lanes)


@handles("cvt")
def convert(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    _reject(instruction, *_ROUNDINGS)
    to, of = instruction.modifiers[-2:]
    if to in ("f16x2", "bf16x2"):
        _convert_pair(block, instruction, lanes)
        return
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


def _convert_pair(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """The first source becomes the upper half."""
    to, of = instruction.modifiers[-2:]
    if of != "f32" or {"rz", "relu"} & set(instruction.modifiers):
        raise SimError(f"conversion {instruction.text} is not interpreted")
    target, high, low = instruction.operands
    halves = []
    for operand in (low, high):
        value = block.read(operand, "f32", lanes)
        with np.errstate(over="ignore"):
            half = value.astype(np.float16).view(np.uint16) if to == "f16x2" else None
        halves.append(f32_to_bf16(value) if half is None else half)
    packed = halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << np.uint32(16)
    block.write(target, packed, lanes)


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
