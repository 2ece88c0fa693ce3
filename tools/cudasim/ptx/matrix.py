"""Shared memory's own instructions and the tensor core's: barriers, cp.async, ldmatrix, mma."""

from __future__ import annotations

import numpy as np

from .bulk import end_group, start_bulk
from .hopper import constant, copy_box
from .machine import WARP, Barrier, Block, Lanes, handles
from .parser import Instruction, Operand, Vector
from .ptxtypes import Array, SimError, bf16_to_f32

#: Of a lane in an 8 x 8 piece: its row, and the first of its two columns.
_ROW, _COLUMN = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2


def _items(operand: Operand, count: int) -> tuple[Operand, ...]:
    if not isinstance(operand, Vector) or len(operand.items) != count:
        raise SimError(f"{operand} is not a list of {count} registers")
    return operand.items


@handles("bar", "barrier")
def barrier(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """bar.sync and bar.arrive of whole warps, and bar.warp.sync."""
    block.whole_warps(lanes)
    modifiers, operands = instruction.modifiers, instruction.operands
    if "warp" in modifiers:
        mask = block.read(operands[0], "u32", lanes)
        if (mask != 0xFFFFFFFF).any():
            raise SimError("a warp's barrier for a part of the warp is not interpreted")
        return
    plain = tuple(m for m in modifiers if m not in ("cta", "aligned"))
    fits = {("sync",): len(operands) in (1, 2), ("arrive",): len(operands) == 2}
    if not fits.get(plain):
        raise SimError(f"{instruction.text} is not interpreted")
    threads = block.numbers(lanes)
    ids = block.read(operands[0], "u32", lanes)
    counts = block.read(operands[1], "u32", lanes) if len(operands) > 1 else None
    for warp in range(0, len(threads), WARP):
        mine = slice(warp, warp + WARP)
        if (ids[mine] != ids[warp]).any():
            raise SimError("lanes of a warp are at barriers of different numbers")
        count = None if counts is None else int(counts[warp])
        block.barriers.arrive_named(threads[mine], int(ids[warp]), count, plain == ("sync",))
    if plain == ("sync",):
        raise Barrier
    block.barriers.open()


@handles("cp")
def copy_async(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    modifiers = instruction.modifiers
    threads = block.numbers(lanes)
    if modifiers[:2] == ("async", "bulk") or modifiers[0] == "reduce":
        is_group = modifiers[2] in ("commit_group", "wait_group")
        is_box = "tensor" in modifiers
        copy = end_group if is_group else copy_box if is_box else start_bulk
        copy(block, instruction, lanes)
        return
    if modifiers == ("async", "commit_group"):
        block.shared.commit(threads)
        return
    if modifiers == ("async", "wait_group"):
        block.shared.wait(threads, constant(instruction.operands[0]))
        return
    if modifiers not in (("async", "cg", "shared", "global"), ("async", "ca", "shared", "global")):
        raise SimError(f"{instruction.text} is not interpreted")
    target, source, size, *rest = instruction.operands
    count = constant(size)
    given = block.read(rest[0], "u32", lanes) if rest else np.full(len(threads), count)
    if not np.isin(given, (0, count)).all():
        raise SimError("cp.async of a part of its bytes is not interpreted")
    data = np.zeros((len(threads), count), np.uint8)
    reads = given > 0
    if reads.any():
        addresses = block.address(source, lanes)[reads]
        data[reads] = block.memory.load(addresses, count, block.number)
    block.shared.start_copy(block.address(target, lanes), data, threads)


@handles("ldmatrix")
def load_matrix(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """Lanes 8 i to 8 i + 7 name the rows of matrix i."""
    modifiers = tuple(m for m in instruction.modifiers if m != "trans")
    counts = {"x1": 1, "x2": 2, "x4": 4}
    if len(modifiers) != 6 or modifiers[2:3] != ("m8n8",) or modifiers[3] not in counts:
        raise SimError(f"{instruction.text} is not interpreted")
    block.whole_warps(lanes)
    count = counts[modifiers[3]]
    threads = block.numbers(lanes).reshape(-1, WARP)
    rows = block.address(instruction.operands[1], lanes).reshape(-1, WARP)[:, : 8 * count]
    owners = threads[:, : 8 * count]
    data = block.shared.load(rows.ravel(), 16, owners.ravel())
    pieces = np.ascontiguousarray(data).view(np.uint16).reshape(-1, count, 8, 8)
    if "trans" in instruction.modifiers:
        pieces = pieces.transpose(0, 1, 3, 2)
    for i, item in enumerate(_items(instruction.operands[0], count)):
        low, high = pieces[:, i, _ROW, _COLUMN], pieces[:, i, _ROW, _COLUMN + 1]
        packed = low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)
        block.write(item, packed.ravel(), lanes)


def _halves(
    block: Block, items: tuple[Operand, ...], kind: str, lanes: Lanes
) -> list[tuple[Array, Array]]:
    """float32 [warps, 32] of the lower and the upper half of each register."""
    result = []
    for item in items:
        bits = block.read(item, "b32", lanes).reshape(-1, WARP)
        parts = (bits & np.uint32(0xFFFF), bits >> np.uint32(16))
        words = [np.ascontiguousarray(p.astype(np.uint16)) for p in parts]
        if kind == "bf16":
            result.append((bf16_to_f32(words[0]), bf16_to_f32(words[1])))
        else:
            low, high = (w.view(np.float16).astype(np.float32) for w in words)
            result.append((low, high))
    return result


@handles("mma")
def multiply_matrices(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """mma.sync m16n8k16 and m16n8k8, bf16 or fp16, sums in float32 (the hardware's order is its
    own)."""
    kind, shape = instruction.modifiers[-2], instruction.modifiers[2:3]
    wanted = ("sync", "aligned", *shape, "row", "col", "f32", kind, kind, "f32")
    depths = {("m16n8k16",): 16, ("m16n8k8",): 8}
    if instruction.modifiers != wanted or kind not in ("bf16", "f16") or shape not in depths:
        raise SimError(f"{instruction.text} is not interpreted")
    block.whole_warps(lanes)
    target, left, right, start = instruction.operands
    warps, depth = block.count(lanes) // WARP, depths[shape]
    a = np.empty((warps, 16, depth), np.float32)
    for i, (low, high) in enumerate(_halves(block, _items(left, depth // 4), kind, lanes)):
        row, column = _ROW + i % 2 * 8, _COLUMN + i // 2 * 8
        a[:, row, column], a[:, row, column + 1] = low, high
    b = np.empty((warps, depth, 8), np.float32)
    for i, (low, high) in enumerate(_halves(block, _items(right, depth // 8), kind, lanes)):
        b[:, _COLUMN + i * 8, _ROW], b[:, _COLUMN + i * 8 + 1, _ROW] = low, high
    with np.errstate(all="ignore"):
        product = a @ b
    starts = [block.read(item, "f32", lanes) for item in _items(start, 4)]
    for i, item in enumerate(_items(target, 4)):
        part = product[:, _ROW + i // 2 * 8, _COLUMN + i % 2].ravel()
        with np.errstate(all="ignore"):
            block.write(item, starts[i] + part, lanes)
