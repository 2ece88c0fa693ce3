"""The float types that tests hand to kernels; bfloat16, which numpy lacks, as its bits."""

from __future__ import annotations

import numpy as np

from .ptx.ptxtypes import Array, bf16_to_f32, f32_to_bf16

#: The number that a kernel's parameters give to a type, and numpy's type.
DTYPES = {"float32": (0, np.float32), "bfloat16": (1, np.uint16), "float16": (2, np.float16)}


def to_float(bits: Array, dtype: str) -> Array:
    return bf16_to_f32(bits) if dtype == "bfloat16" else bits.astype(np.float32)


def from_float(values: Array, dtype: str) -> Array:
    values = np.asarray(values, np.float32)
    if dtype == "bfloat16":
        return f32_to_bf16(values)
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[dtype][1])


def same_bits(got: Array, want: Array, what: str) -> None:
    """Bitwise equality; names the first mismatch by coordinate."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape} {got.dtype}"
    unsigned = {2: np.uint16, 4: np.uint32}[got.dtype.itemsize]
    differ = np.argwhere(got.view(unsigned) != want.view(unsigned))
    if len(differ):
        at = tuple(int(i) for i in differ[0])
        raise AssertionError(
            f"{what}: {len(differ)} of {got.size} differ, first at {at}: {got[at]} != {want[at]}"
        )
