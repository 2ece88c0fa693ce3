"""Tensor maps as fakecudart.c writes them, and the boxes that tensor copies read through them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from .memory import GlobalMemory
from .ptxtypes import Array, SimError

MAP_BYTES, MAP_ALIGNMENT = 128, 64
# In the order of struct map of fakecudart.c: mark, address, bytes of an element, dimensions, their
# strides (of all but the first), box, swizzle.
_LAYOUT = struct.Struct("<QQII5Q5Q5II")
_MARK = 0x70616D726F736E65
#: By CUtensorMapSwizzle: bytes of the span within which units of 16 are exchanged.
_SPANS = (16, 32, 64, 128)


def swizzled(addresses: Array, span: int) -> Array:
    """Shared addresses with bits 4 up to the span's exchanged by those from bit 7 on: 32, 64 or
    128 bytes; 16: as they are."""
    mask = {16: 0, 32: 1, 64: 3, 128: 7}[span]
    return addresses ^ ((addresses >> 7 & mask) << 4)


@dataclass(frozen=True)
class TensorMap:
    address: int
    element: int  # bytes
    sizes: tuple[int, ...]  # elements, the dense dimension first
    strides: tuple[int, ...]  # bytes, of all dimensions
    box: tuple[int, ...]
    span: int  # of the swizzle

    @staticmethod
    def decode(data: bytes) -> TensorMap:
        mark, address, element, rank, *rest = _LAYOUT.unpack(data[: _LAYOUT.size])
        if mark != _MARK:
            raise SimError("128 bytes that cuTensorMapEncodeTiled did not write are no tensor map")
        sizes, strides, box = rest[:rank], rest[5 : 5 + rank - 1], rest[10 : 10 + rank]
        return TensorMap(
            address, element, tuple(sizes), (element, *strides), tuple(box), _SPANS[rest[15]]
        )

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.element

    def read(self, corner: tuple[int, ...], memory: GlobalMemory, block: int) -> Array:
        """uint8 [units, 16] of the box whose first element is at `corner`, dense dimension last;
        zeros where it leaves the tensor."""
        # Units of 16 bytes where the box and the tensor consist of such, otherwise elements.
        dense = [corner[0] * self.element, self.sizes[0] * self.element]
        unit = 16 if all(n % 16 == 0 for n in dense) else self.element
        per = unit // self.element
        counts = (self.box[0] // per, *self.box[1:])
        sizes = (self.sizes[0] // per, *self.sizes[1:])
        first = (corner[0] // per, *corner[1:])
        places = np.zeros(counts[::-1], np.int64)
        inside = np.ones(counts[::-1], np.bool_)
        for axis, (count, size, start) in enumerate(zip(counts, sizes, first, strict=True)):
            index = start + np.arange(count)
            shape = [1] * len(counts)
            shape[-1 - axis] = count
            stride = unit if axis == 0 else self.strides[axis]
            places = places + (index * stride).reshape(shape)
            inside = inside & ((index >= 0) & (index < size)).reshape(shape)
        data = np.zeros((places.size, unit), np.uint8)
        there = inside.ravel()
        if there.any():
            # As ld.global.nc: nothing orders this launch's own writes before a tensor copy here.
            addresses = self.address + places.ravel()[there]
            data[there] = memory.load(addresses, unit, block, read_only=True)
        return data.reshape(-1, 16)

    def targets(self, to: int) -> Array:
        """Shared addresses of the box's units of 16 bytes, in the order of read()."""
        if to % 128:
            raise SimError(f"a tensor copy to shared address {to}, no multiple of 128")
        if self.span > 16 and self.box[0] * self.element != self.span:
            raise SimError("a box narrower than its swizzle's span is not interpreted")
        return swizzled(to + 16 * np.arange(self.box_bytes // 16, dtype=np.int64), self.span)
