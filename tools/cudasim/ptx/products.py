"""wgmma: matrices in shared memory behind descriptors, accumulators that are nobody's until the
wait, and the rules that PTX has for both."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .order import WARP, WARPGROUP
from .parser import Register
from .ptxtypes import Array, SimError, bf16_to_f32
from .tensor_copy import swizzled

if TYPE_CHECKING:
    from .machine import Block, Lanes

_ACCUMULATOR, _OPERAND = 1, 2
#: By the descriptor's code: bytes of a row of the layout.
_SPANS = {0: 16, 1: 128, 2: 64, 3: 32}
_DEPTH = 16


@lru_cache(maxsize=256)
def _offsets(rows: int, depth_major: bool, span: int, leading: int, stride: int) -> Array:
    """Offsets, before the swizzle, of the 16-byte units of a matrix [rows, 16 deep] of 16-bit
    elements: [rows, 2] where the depth is contiguous, otherwise [16, rows / 8].

    As the PTX manual defines the two strides. Depth contiguous: rows of `span` bytes, `stride` from
    8 rows to the next 8; without a swizzle `leading` from the first 8 of the depth to the second.
    Rows contiguous: pieces of `span` bytes of them, `leading` from one to the next, and `stride`
    from 8 of the depth to the next 8; without a swizzle the two change places.
    """
    if depth_major:
        row, half = np.arange(rows)[:, None], np.arange(2)[None]
        return row // 8 * stride + row % 8 * span + half * (leading if span == 16 else 16)
    if span == 16:
        leading, stride = stride, leading
    deep, unit = np.arange(_DEPTH)[:, None], np.arange(rows // 8)[None]
    per = span // 16
    return deep // 8 * stride + deep % 8 * span + unit // per * leading + unit % per * 16


def matrix_addresses(descriptor: int, rows: int, depth_major: bool) -> Array:
    """Shared addresses of the units of _offsets, of the matrix that a descriptor describes."""
    if descriptor & ~(0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 7 << 49 | 3 << 62):
        raise SimError(f"matrix descriptor {descriptor:#x} has bits that mean nothing")
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    span = _SPANS[descriptor >> 62 & 3]
    if descriptor >> 49 & 7:
        raise SimError("a base offset in a matrix descriptor is not interpreted")
    if span > 16 and start % (8 * span) // span:
        raise SimError(
            f"a matrix at shared address {start}, in the middle of 8 rows of {span} bytes, needs a "
            "base offset"
        )
    return swizzled(start + _offsets(rows, depth_major, span, leading, stride), span)


def _numbers(units: Array, kind: str) -> Array:
    """float32 of uint8 [n, 16]: [n, 8]."""
    halves = np.ascontiguousarray(units).view(np.uint16)
    return bf16_to_f32(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)


class Products:
    """The matrix products of one block that are under way, and the registers that they own."""

    def __init__(self, block: Block) -> None:
        self._block = block
        slots = block.kernel.product_registers
        shape = (len(slots), block.threads)
        self._names: list[Register | None] = [None] * len(slots)
        self._group = np.zeros(shape, np.int64)  # of the last product that names the register
        self._role = np.zeros(shape, np.int8)
        self._columns = np.zeros(shape, np.int16)  # of that product
        self._result = np.zeros(shape, np.float32)  # what it will leave there
        self._touched = np.zeros(shape, np.int64)  # when another instruction last used it
        self._fenced = np.full(block.threads, -1, np.int64)  # when the thread last fenced
        self._committed = np.zeros(block.threads, np.int64)  # groups
        self._done = np.zeros(block.threads, np.int64)
        self._open = np.zeros(block.threads, np.bool_)  # products since the last commit

    def touch(self, index: int, register: Register, lanes: Lanes) -> None:
        """Another instruction reads or writes a register that products name too."""
        if (self._group[index, lanes] > self._done[lanes]).any():
            what = "accumulator" if (self._role[index, lanes] == _ACCUMULATOR).any() else "operand"
            raise SimError(f"a register is used that is the {what} of a wgmma under way")
        self._touched[index, lanes] = self._block.steps

    def fence(self, lanes: Lanes) -> None:
        self._fenced[lanes] = self._block.steps

    def commit(self, lanes: Lanes) -> None:
        self._committed[lanes] += 1
        self._open[lanes] = False

    def wait(self, lanes: Lanes, pending: int) -> None:
        """Ends these threads' groups but for the `pending` youngest."""
        before = self._done[lanes].copy()
        now = np.maximum(before, self._committed[lanes] - pending)
        group = self._group[:, lanes]
        ready = (group > before) & (group <= now) & (self._role[:, lanes] == _ACCUMULATOR)
        numbers = self._block.numbers(lanes)
        for index in np.flatnonzero(ready.any(axis=1)).tolist():
            register = self._names[index]
            assert register is not None
            threads = numbers[ready[index]]
            result = self._result[index, threads]
            self._block.register(register)[threads] = result.view(np.uint32)
        self._done[lanes] = now
        for warp in np.unique(numbers // WARP).tolist():
            mine = np.array([warp])
            agent = self._block.order.tensor_core(warp * WARP // WARPGROUP)
            self._block.order.learn(mine, agent, int(self._done[warp * WARP]))

    def claim(self, items: list[Register], threads: Array, role: int, columns: int) -> Array:
        """Gives registers to a product of one warpgroup; their numbers. Checks the fence."""
        slots = self._block.kernel.product_registers
        indices = np.array([slots[item.slot] for item in items])
        if len(np.unique(indices)) != len(indices):
            raise SimError("a wgmma names a register twice")
        for index, item in zip(indices.tolist(), items, strict=True):
            self._names[index] = item
        at = np.ix_(indices, threads)
        busy = self._group[at] > self._done[threads]
        if (busy & (self._role[at] != role)).any():
            raise SimError("a register is accumulator and operand of wgmmas under way")
        if role == _ACCUMULATOR and (busy & (self._columns[at] != columns)).any():
            raise SimError("wgmmas of two shapes under way share accumulators")
        if (self._fenced[threads] < 0).any():
            raise SimError("a warpgroup's first wgmma without a wgmma.fence before it")
        if (self._touched[at] > self._fenced[threads]).any():
            raise SimError("a wgmma names a register used since the last wgmma.fence")
        return indices

    def multiply(
        self,
        threads: Array,
        kind: str,
        columns: int,
        c: list[Register],
        a: list[Register] | int,
        b: int,
        add: bool,
        signs: tuple[int, int],
        transposed: tuple[bool, bool],
    ) -> None:
        """Issues c [64, columns] (+)= a [64, 16] b [16, columns] of the warpgroup `threads`."""
        block = self._block
        warps = np.unique(threads // WARP)
        group = int(self._committed[threads[0]]) + 1
        if (self._committed[threads] != group - 1).any():
            raise SimError("the warps of a warpgroup have committed different groups")
        agent = block.order.tensor_core(int(threads[0]) // WARPGROUP)

        def matrix(descriptor: int, rows: int, is_transposed: bool) -> Array:
            addresses = matrix_addresses(descriptor, rows, not is_transposed)
            units = block.shared.matrix(addresses.ravel(), warps, agent, group)
            numbers = _numbers(units, kind).reshape(addresses.shape[0], -1)
            return numbers.T if is_transposed else numbers

        owned = self.claim(c, threads, _ACCUMULATOR, columns)
        if isinstance(a, int):
            left = matrix(a, 64, transposed[0])
        else:
            operand = self.claim(a, threads, _OPERAND, columns)
            left = self._fragments(a, threads, kind)
            self._group[np.ix_(operand, threads)] = group
            self._role[np.ix_(operand, threads)] = _OPERAND
        right = matrix(b, columns, transposed[1])
        with np.errstate(all="ignore"):
            product = (signs[0] * left) @ (signs[1] * right).T
        at = np.ix_(owned, threads)
        rows, places = _result_places(columns)
        mine = product[rows, places]
        if add:
            raw = np.stack([block.register(r)[threads] for r in c]).view(np.float32)
            under_way = self._group[at] > self._done[threads]
            with np.errstate(all="ignore"):
                mine = np.where(under_way, self._result[at], raw) + mine
        self._result[at] = mine
        self._group[at], self._role[at], self._columns[at] = group, _ACCUMULATOR, columns
        self._open[threads] = True
        for register in c:  # not a number until the wait
            block.register(register)[threads] = 0xFFFFFFFF

    def _fragments(self, a: list[Register], threads: Array, kind: str) -> Array:
        """float32 [64, 16] of four registers: of warp w rows 16 w on, in mma.sync's layout."""
        left = np.empty((64, _DEPTH), np.float32)
        lane = np.arange(WARPGROUP)
        row = lane // WARP * 16 + lane % WARP // 4
        column = lane % 4 * 2
        for i, register in enumerate(a):
            bits = np.ascontiguousarray(self._block.register(register)[threads])
            pair = _numbers(bits.view(np.uint8).reshape(-1, 16), kind).reshape(-1, 2)
            for e in range(2):
                left[row + i % 2 * 8, column + i // 2 * 8 + e] = pair[:, e]
        return left

    def end(self) -> None:
        if self._open.any():
            raise SimError("the kernel ended with wgmmas that were never committed")
        if (self._done < self._committed).any():
            raise SimError("the kernel ended with wgmmas that nobody waited for")


@lru_cache
def _result_places(columns: int) -> tuple[Array, Array]:
    """Row and column, [columns / 2, 128], of each accumulator of each thread."""
    lane, i = np.arange(WARPGROUP)[None], np.arange(columns // 2)[:, None]
    row = lane // WARP * 16 + lane % WARP // 4 + i // 2 % 2 * 8
    return row, i // 4 * 8 + lane % 4 * 2 + i % 2
