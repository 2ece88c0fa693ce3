"""Hopper's own instructions: mbarrier, tensor copies, wgmma, fences of proxies, setmaxnreg."""

from __future__ import annotations

import re

import numpy as np

from .barriers import WAITING
from .machine import PARAMETER_WINDOW, Block, Hold, Lanes, handles
from .order import WARP, WARPGROUP
from .parser import Address, Discard, Immediate, Instruction, Operand, Register, Vector
from .ptxtypes import SimError
from .tensor_copy import MAP_ALIGNMENT, MAP_BYTES, TensorMap

_BARRIER = re.compile(
    r"(?:init|arrive(?:\.expect_tx)?(?:\.release\.cta)?|try_wait\.parity(?:\.acquire\.cta)?)"
    r"\.shared(?:::cta)?\.b64"
)


def constant(operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise SimError(f"{operand} is not a constant")
    return operand.bits


@handles("mbarrier")
def mbarrier(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """init, arrive, arrive.expect_tx and try_wait.parity, of the block's own shared memory."""
    modifiers = ".".join(instruction.modifiers)
    operands = instruction.operands
    if not _BARRIER.fullmatch(modifiers):
        raise SimError(f"{instruction.text} is not interpreted")
    if instruction.modifiers[0] == "try_wait":
        _try_wait(block, instruction, lanes)
        return
    threads = block.numbers(lanes)
    place = operands[0] if instruction.modifiers[0] == "init" else operands[1]
    addresses = block.address(place, lanes)
    if instruction.modifiers[0] == "init":
        counts = block.read(operands[1], "u32", lanes)
        for thread, address, count in zip(threads, addresses, counts, strict=True):
            block.barriers.make(int(address), int(count), int(thread))
        return
    if not isinstance(operands[0], Discard):
        raise SimError("the state that mbarrier.arrive returns is not interpreted")
    numbers = np.zeros(len(threads), np.uint32)
    if len(operands) > 2:
        numbers = block.read(operands[2], "u32", lanes)
    expects = "expect_tx" in instruction.modifiers
    if expects != (len(operands) > 2):
        raise SimError(f"{instruction.text} is not interpreted")
    # Lanes of a warp together: its order is kept as one.
    totals: dict[tuple[int, int], list[int]] = {}
    for thread, address, number in zip(threads, addresses, numbers, strict=True):
        total = totals.setdefault((int(thread) // WARP, int(address)), [int(thread), 0, 0])
        total[1] += 1
        total[2] += int(number)
    for (_, address), (thread, arrivals, more) in totals.items():
        block.barriers.arrive(thread, address, arrivals, more)


def _try_wait(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """Holds threads until the phase ends; says no at once the first time, as it may."""
    target, place, parity, *limit = instruction.operands
    if limit:
        raise SimError("a time limit of mbarrier.try_wait is not interpreted")
    addresses = block.address(place, lanes)
    parities = block.read(parity, "u32", lanes)
    threads = block.numbers(lanes)
    keys = np.stack([threads // WARP, addresses, parities.astype(np.int64)], axis=1)
    asked, which = np.unique(keys, axis=0, return_inverse=True)
    answers = [block.barriers.ask(*key) for key in asked.tolist()]
    which = which.ravel()
    late = np.array([answer is None for answer in answers])[which]
    if late.any():
        block.barriers.wait(threads[late], addresses[late], parities[late])
        raise Hold(threads[late], WAITING)
    block.write(target, np.array([bool(answer) for answer in answers])[which], lanes)


@handles("fence")
def fence(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    threads = block.numbers(lanes)
    modifiers = instruction.modifiers
    if modifiers == ("mbarrier_init", "release", "cluster"):
        block.barriers.fence_initialisation(threads)
    elif modifiers in (("proxy", "async"), ("proxy", "async", "shared::cta")):
        block.order.fence(threads)
    elif modifiers == ("proxy", "async", "global"):
        block.memory.fence(block.number)
    else:
        raise SimError(f"{instruction.text} is not interpreted")


def _map(block: Block, operand: Operand, lanes: Lanes) -> TensorMap:
    """The tensor map at a generic address, which must be in a parameter of the kernel."""
    address = int(block.uniform(_plain(operand), "u64", lanes, "the tensor map")) - PARAMETER_WINDOW
    assert isinstance(operand, Address)
    address += operand.offset
    if not 0 <= address <= len(block.parameters) - MAP_BYTES:
        raise SimError("a tensor map that is no __grid_constant__ parameter is not interpreted")
    if address % MAP_ALIGNMENT:
        raise SimError(f"a tensor map at parameter byte {address}, no multiple of 64")
    return TensorMap.decode(block.parameters[address : address + MAP_BYTES].tobytes())


def _plain(operand: Operand) -> Operand:
    if not isinstance(operand, Address):
        raise SimError(f"{operand} is not an address")
    return operand.base


@handles("prefetch")
def prefetch(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    if instruction.modifiers != ("tensormap",):
        raise SimError(f"{instruction.text} is not interpreted")
    _map(block, instruction.operands[0], lanes)


_COPY = re.compile(
    r"async\.bulk\.tensor\.([1-5])d\.shared::(?:cta|cluster)\.global(?:\.tile)?"
    r"\.mbarrier::complete_tx::bytes"
)


def copy_box(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """cp.async.bulk.tensor from global to shared memory, tiled."""
    match = _COPY.fullmatch(".".join(instruction.modifiers))
    if match is None or len(instruction.operands) != 3:
        raise SimError(f"{instruction.text} is not interpreted")
    target, source, barrier = instruction.operands
    assert isinstance(source, Address)
    corner = source.coordinates
    if corner is None or len(corner.items) != int(match.group(1)):
        raise SimError(f"{instruction.text}: coordinates are missing")
    tensor = _map(block, source, lanes)
    if len(tensor.sizes) != len(corner.items):
        raise SimError(f"{len(corner.items)} coordinates into a map of {len(tensor.sizes)}")
    coordinates = [block.read(item, "s32", lanes) for item in corner.items]
    to, counter = block.address(target, lanes), block.address(barrier, lanes)
    for i, thread in enumerate(block.numbers(lanes)):
        data = tensor.read(tuple(int(c[i]) for c in coordinates), block.memory, block.number)
        places = tensor.targets(int(to[i]))
        block.barriers.start_copy(int(thread), int(counter[i]), places, data)


@handles("setmaxnreg")
def set_registers(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    change, *rest = instruction.modifiers
    if change not in ("inc", "dec") or rest != ["sync", "aligned", "u32"]:
        raise SimError(f"{instruction.text} is not interpreted")
    block.whole_warps(lanes, WARPGROUP)
    count = constant(instruction.operands[0])
    late = block.barriers.set_registers(block.numbers(lanes), count, change == "inc")
    if len(late):
        raise Hold(late, WAITING)


_PRODUCT = re.compile(r"mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.(bf16|f16)")


@handles("wgmma")
def warpgroup(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    """wgmma.fence, mma_async, commit_group and wait_group, of whole warpgroups."""
    kind, *rest = instruction.modifiers
    if rest[:2] != ["sync", "aligned"]:
        raise SimError(f"{instruction.text} is not interpreted")
    block.whole_warps(lanes, WARPGROUP)
    if kind == "fence":
        block.products.fence(lanes)
    elif kind == "commit_group":
        block.products.commit(lanes)
    elif kind == "wait_group":
        block.products.wait(lanes, constant(instruction.operands[0]))
    else:
        _multiply(block, instruction, lanes)


def _registers(operand: Operand, type_name: str) -> list[Register]:
    assert isinstance(operand, Vector)
    items = [item for item in operand.items if isinstance(item, Register)]
    if len(items) != len(operand.items) or any(i.type != type_name for i in items):
        raise SimError(f"not all operands are registers of type .{type_name}")
    return items


def _multiply(block: Block, instruction: Instruction, lanes: Lanes) -> None:
    match = _PRODUCT.fullmatch(".".join(instruction.modifiers))
    if match is None or match.group(2) != match.group(3):
        raise SimError(f"{instruction.text} is not interpreted")
    columns, kind = int(match.group(1)), match.group(2)
    if columns % 8 or not 8 <= columns <= 256:
        raise SimError(f"wgmma of {columns} columns")
    c, a, b, add, *constants = instruction.operands
    in_registers = isinstance(a, Vector)
    signs = tuple(constant(o) for o in constants[:2])
    transposed = tuple(constant(o) for o in constants[2:])
    if len(constants) != (3 if in_registers else 4) or not set(transposed) <= {0, 1}:
        raise SimError(f"{instruction.text} is not interpreted")
    if not set(signs) <= {-1, 1}:
        raise SimError("a factor of wgmma's operands that is neither 1 nor -1")
    accumulators = _registers(c, "f32")
    operands = _registers(a, "b32") if in_registers else []
    if len(accumulators) != columns // 2 or (in_registers and len(operands) != 4):
        raise SimError(f"wgmma of {columns} columns with {len(accumulators)} accumulators")
    numbers = block.numbers(lanes)
    flips = (False, *transposed) if in_registers else transposed
    for start in range(0, len(numbers), WARPGROUP):
        threads = numbers[start : start + WARPGROUP]
        left: list[Register] | int = operands
        if not in_registers:
            left = int(block.uniform(a, "u64", threads, "a matrix descriptor"))
        block.products.multiply(
            threads,
            kind,
            columns,
            accumulators,
            left,
            int(block.uniform(b, "u64", threads, "a matrix descriptor")),
            bool(block.uniform(add, "pred", threads, "the predicate of a wgmma")),
            (signs[0], signs[1]),
            (bool(flips[0]), bool(flips[1])),
        )
