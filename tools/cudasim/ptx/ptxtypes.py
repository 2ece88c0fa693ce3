"""PTX's scalar types as numpy types, and the two conversions that numpy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class SimError(Exception):
    """A kernel did what the hardware forbids or leaves undefined, or what is not interpreted."""


# Registers hold bits, so every register is kept in the unsigned type of its width.
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

TYPES: dict[str, Any] = {
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "bf16": np.uint16,  # its bits: numpy has no bfloat16
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
    "pred": np.bool_,
}


def size_of(type_name: str) -> int:
    """Bytes of one value of a PTX type."""
    if type_name not in TYPES:
        raise SimError(f"type .{type_name} is not interpreted")
    return int(np.dtype(TYPES[type_name]).itemsize)


def bf16_to_f32(bits: Array) -> Array:
    """uint16 bits of bfloat16 -> float32, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(value: Array) -> Array:
    """float32 -> uint16 bits of bfloat16, to nearest even; NaN becomes the canonical 0x7fff."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    rounded = bits.astype(np.uint64) + 0x7FFF + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.where(
        np.isnan(value), np.uint16(0x7FFF), (rounded >> np.uint64(16)).astype(np.uint16)
    )
