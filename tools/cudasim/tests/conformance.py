"""Conformance of tensor copies and warpgroup products: sm90_programs.cu, run by
either simulator, against numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ..floats import from_float, to_float
from ..ptx.ptxtypes import Array

#: columns of the result, columns of a chunk, depth, type: the instances of hopper_programs.cu.
ROW_PRODUCTS = [
    (64, 64, 128, "bfloat16"),
    (32, 32, 96, "float16"),
    (96, 16, 80, "bfloat16"),
    (128, 64, 64, "float16"),
]
COLUMN_PRODUCTS = [
    (64, 64, 32, "float16"),
    (16, 16, 48, "bfloat16"),
    (96, 16, 48, "bfloat16"),
    (96, 32, 32, "float16"),
    (128, 64, 64, "bfloat16"),
]
#: A fresh device, and a function of the library by name.
Simulator = tuple[Any, Callable[[str], Any]]


def _call(simulator: Simulator, name: str, *arguments: Any) -> int:
    device, function = simulator
    return device.call(function(name), *arguments)


def check_box(simulator: Simulator, rng: np.random.Generator, chunk: int) -> None:
    """A box that leaves the tensor on a random side, as it lies in shared memory: unit u of a row
    at the place that the swizzle's address bits give it."""
    memory = simulator[0].memory
    columns = int(rng.integers(1, 20)) * 8
    heads, tokens = int(rng.integers(1, 4)), int(rng.integers(1, 90))
    x = rng.integers(0, 1 << 16, (tokens, heads, columns), dtype=np.uint16)
    rows = int(rng.choice([8, 24, 64, 128]))
    column = int(rng.integers(-chunk, columns + 8))
    if rng.random() < 0.7:  # as a kernel takes them
        column = column // 8 * 8
    head, token = int(rng.integers(0, heads)), int(rng.integers(-rows, tokens))
    offset = int(rng.integers(0, 9)) * 128
    print(columns, heads, tokens, rows, (column, head, token), offset)
    address = memory.upload("x", x)
    out = memory.reserve("out", (rows * chunk // 2,), np.uint32)
    code = _call(simulator, "hopper_box", chunk, ctypes.c_void_p(address), columns, heads, tokens,
                 rows, column, head, token, offset, ctypes.c_void_p(out))  # fmt: skip
    assert code == 0, code
    box = np.zeros((rows, chunk), np.uint16)
    for r in range(rows):
        for c in range(chunk):
            if 0 <= token + r < tokens and 0 <= column + c < columns:
                box[r, c] = x[token + r, head, column + c]
    mask = {64: 7, 32: 3, 16: 1}[chunk]
    expected = np.empty(rows * chunk, np.uint16)
    for i, values in enumerate(box.reshape(-1, 8)):
        at = 16 * i + offset  # from a multiple of 1024 on
        at ^= (at >> 7 & mask) << 4
        expected[(at - offset) // 2 : (at - offset) // 2 + 8] = values
    np.testing.assert_array_equal(memory.array("out").view(np.uint16), expected)


def _close(got: Array, exact: Array, terms: Array, depth: int) -> None:
    """Sums of `depth` products in float32, in any order."""
    error = np.abs(got - exact) / terms
    assert error.max() <= depth * 2.0**-24, f"error {error.max():.2e} of the sum of magnitudes"


def check_row_product(
    simulator: Simulator, rng: np.random.Generator, columns: int, chunk: int, depth: int, dtype: str
) -> None:
    memory = simulator[0].memory
    a, b = (from_float(rng.standard_normal((n, depth)), dtype) for n in (64, columns))
    out = memory.reserve("out", (64, columns), np.float32)
    addresses = memory.upload("a", a), memory.upload("b", b), out
    code = _call(simulator, "hopper_row_product", columns, chunk,
                 *(ctypes.c_void_p(p) for p in addresses))  # fmt: skip
    assert code == 0, code
    left, right = (to_float(x, dtype).astype(np.float64) for x in (a, b))
    exact, terms = left @ right.T, np.abs(left) @ np.abs(right.T)
    _close(memory.array("out"), exact, terms, depth)


def check_column_product(
    simulator: Simulator, rng: np.random.Generator, columns: int, chunk: int, depth: int, dtype: str
) -> None:
    memory = simulator[0].memory
    a, b = (from_float(rng.standard_normal(s), dtype) for s in ((64, depth), (depth, columns)))
    out = memory.reserve("out", (64, columns), np.float32)
    addresses = memory.upload("a", a), memory.upload("b", b), out
    code = _call(simulator, "hopper_column_product", columns, chunk,
                 *(ctypes.c_void_p(p) for p in addresses))  # fmt: skip
    assert code == 0, code
    left, right = (to_float(x, dtype).astype(np.float64) for x in (a, b))
    exact, terms = 1 + left @ right, 1 + np.abs(left) @ np.abs(right)
    _close(memory.array("out"), exact, terms, depth + 1)
