"""Runs the launchers of csrc/cuda/layer on a fake GPU, against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tools.cudasim.floats import DTYPES, from_float, to_float
from tools.cudasim.ptx.ptxtypes import Array
from vlmkernels._native import _C

from ..kernels import Kernels
from ..params import fill

#: No gradient is wanted.
NO_SUMS = fill("ColumnSums", total=None, parts=None, adds=False)
#: Half a unit of a type, relative.
UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
EPS = 1e-5


def assert_close(name: str, ours: Array, exact: Array, dtype: str) -> None:
    """Two roundings of the type where one is needed, and float32's sums, of the array's norm."""
    error, size = np.linalg.norm(ours - exact), np.linalg.norm(exact)
    allowed = (2 * UNITS[dtype] + 2.0**-20) * size + 1e-30
    assert ours.shape == exact.shape and error <= allowed, f"{name}: {error:.2e}, {allowed:.2e}"


class Rows:
    """Random tensors on a fake GPU, and their values."""

    def __init__(self, kernels: Kernels, rng: np.random.Generator, dtype: str) -> None:
        self.kernels, self.rng, self.dtype = kernels, rng, dtype
        self.device = kernels.device()
        self.memory = self.device.memory
        self.values: dict[str, Array] = {}
        self.before: dict[str, Array | None] = {}  # in gradients that are added to

    def draw(self, name: str, *shape: int, mean: float = 0.0) -> int:
        bits = from_float(mean + self.rng.standard_normal(shape), self.dtype)
        self.values[name] = to_float(bits, self.dtype).astype(np.float64)
        return self.memory.upload(name, bits)

    def room(self, name: str, *shape: int, kind: Any = None) -> int:
        return self.memory.reserve(name, shape, kind or DTYPES[self.dtype][1])

    def found(self, name: str) -> Array:
        array = self.memory.array(name)
        values = array if array.dtype == np.float32 else to_float(array, self.dtype)
        return values.astype(np.float64)

    def run(self, launcher: str, struct: str, **values: Any) -> None:
        params = fill(struct, dtype=DTYPES[self.dtype][0], **values)
        code = self.kernels.run(self.device, launcher, params)
        assert code == 0, f"{launcher} returned cudaError_t {code}"

    def sums(self, name: str, rows: int, part: int, columns: int, adds: bool) -> Any:
        """A gradient summed over rows, `part` of them at a time, or added to what is there."""
        start = self.rng.standard_normal(columns).astype(np.float32) if adds else None
        room = self.room(name, columns) if start is None else self.memory.upload(name, start)
        self.before[name] = start
        parts = self.room(f"parts of {name}", -(-rows // part), columns, kind=np.float32)
        return fill("ColumnSums", total=room, parts=parts, adds=adds)

    def check_sums(self, name: str, exact: Array) -> None:
        """exact: of each row."""
        start = self.before[name]
        total = exact.sum(0) + (0 if start is None else start)
        assert_close(name, self.found(name), total, self.dtype if start is None else "float32")

    def rounded(self, x: Array) -> Array:
        return to_float(from_float(x, self.dtype), self.dtype).astype(np.float64)


def check_norm(
    kernels: Kernels,
    rng: np.random.Generator,
    rows: int,
    width: int,
    dtype: str = "bfloat16",
    residual: bool = False,
    bias: bool = False,
    adds: bool = False,
) -> None:
    """Forward and backward: the sum, the result, dx and the weight's gradient."""
    r = Rows(kernels, rng, dtype)
    x = r.draw("x", rows, width)
    weight = r.draw("weight", width)
    added = r.draw("residual", rows, width) if residual else None
    shift = r.draw("bias", width) if bias else None
    y, rstd = r.room("y", rows, width), r.room("rstd", rows, kind=np.float32)
    r.run(
        "rms_norm", "RmsNormParams",
        x=x, residual=added, bias=shift, weight=weight, y=y, rstd=rstd, rows=rows, width=width,
        eps=EPS,
    )  # fmt: skip
    total, gain = r.values["x"], r.values["weight"]
    if residual:
        total = r.rounded(total + r.values["residual"] + (r.values["bias"] if bias else 0))
        assert_close("sum", r.found("x"), total, dtype)
        total = r.found("x")
    factor = 1 / np.sqrt((total**2).mean(1, keepdims=True) + EPS)
    assert_close("rstd", r.found("rstd"), factor[:, 0], "float32")
    assert_close("y", r.found("y"), total * factor * gain, dtype)

    dy = r.draw("dy", rows, width)
    ds = r.draw("ds", rows, width) if residual else None
    r.run(
        "rms_norm_backward", "RmsNormGradParams",
        dy=dy, ds=ds, x=x, weight=weight, rstd=rstd, dx=r.room("dx", rows, width),
        dweight=r.sums("dweight", rows, _C.CUDA_NORM_ROWS, width, adds),
        dbias=r.sums("dbias", rows, _C.CUDA_NORM_ROWS, width, adds) if bias else NO_SUMS,
        rows=rows, width=width,
    )  # fmt: skip
    g, n = r.values["dy"] * gain, total * factor
    dx = (g - n * (g * n).mean(1, keepdims=True)) * factor + (r.values["ds"] if residual else 0)
    assert_close("dx", r.found("dx"), dx, dtype)
    r.check_sums("dweight", r.values["dy"] * n)
    if bias:
        r.check_sums("dbias", dx)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def check_swiglu(
    kernels: Kernels,
    rng: np.random.Generator,
    rows: int,
    width: int,
    dtype: str = "bfloat16",
    bias: bool = False,
    gap: int = 0,
    padding: int = 0,
    adds: bool = False,
) -> None:
    """Forward and backward, with the bias's gradient and without; `gap`: elements between two rows
    of dy; `padding`: zeros behind y's."""
    r = Rows(kernels, rng, dtype)
    # Around -4 a sigmoid changes by as much as its argument: a sum that isn't rounded shows.
    x, shift = r.draw("x", rows, 2 * width), r.draw("bias", 2 * width, mean=-4.0) if bias else None
    common: dict[str, Any] = {"x": x, "bias": shift, "rows": rows, "width": width}
    wide = width + padding
    r.run("swiglu", "SwigluParams", y=r.room("y", rows, wide), y_stride=wide, **common)
    total = r.values["x"]
    if bias:
        total = r.rounded(total + r.values["bias"])
    gate, up = np.split(total, 2, axis=1)
    s = sigmoid(gate)
    assert_close("y", r.found("y"), np.pad(gate * s * up, ((0, 0), (0, padding))), dtype)
    dy = r.draw("dy", rows, width + gap)
    of_rows = r.values["dy"][:, :width]
    both = of_rows * up * s * (1 + gate * (1 - s)), of_rows * gate * s
    exact = np.concatenate(both, 1)
    for name in ("dx", "dx of both") if bias else ("dx",):
        dbias = (
            NO_SUMS if name == "dx" else r.sums("dbias", rows, _C.CUDA_SWIGLU_ROWS, 2 * width, adds)
        )
        r.run(
            "swiglu_backward", "SwigluGradParams",
            dy=dy, dy_stride=width + gap, dx=r.room(name, rows, 2 * width), dbias=dbias, **common,
        )  # fmt: skip
        assert_close(name, r.found(name), exact, dtype)
    if bias:
        r.check_sums("dbias", exact)


def check_rotary(
    kernels: Kernels,
    rng: np.random.Generator,
    tokens: int,
    groups: int,
    heads: int,
    width: int,
    dtype: str = "bfloat16",
    conjugate: bool = False,
) -> None:
    """Heads of a fused projection, two more a group, into dense ones."""
    r = Rows(kernels, rng, dtype)
    x = r.draw("x", tokens, groups, heads + 2, width)
    of = rng.random((tokens, width // 2)) * 100
    table = np.concatenate([np.cos(of), np.sin(of)], 1).astype(np.float32)
    cos = r.memory.upload("table", table)
    r.run(
        "rotate_heads", "RotaryParams",
        x=x, x_token=groups * (heads + 2) * width, x_group=(heads + 2) * width, x_head=width,
        out=r.room("out", tokens, groups, heads, width), out_token=groups * heads * width,
        out_group=heads * width, out_head=width, cos=cos, sin=cos + 4 * (width // 2),
        table_stride=width, tokens=tokens, groups=groups, heads=heads, head_dim=width,
        conjugate=conjugate,
    )  # fmt: skip
    a, b = np.split(r.values["x"][:, :, :heads], 2, axis=-1)
    cosines, sines = np.split(r.rounded(table)[:, None, None], 2, axis=-1)
    sines = -sines if conjugate else sines
    exact = np.concatenate([a * cosines - b * sines, b * cosines + a * sines], -1)
    found = r.found("out").reshape(exact.shape)
    assert_close("out", found, exact, dtype)
    if dtype != "float32":  # with other roundings half of the elements would be others
        assert (found == r.rounded(exact)).mean() > 0.95


Check = Callable[[Kernels, np.random.Generator], Any]


def _each_type(check: Callable[..., None], *arguments: Any, **more: Any) -> Check:
    def run(kernels: Kernels, rng: np.random.Generator) -> None:
        for dtype in UNITS:
            check(kernels, rng, *arguments, dtype=dtype, **more)

    return run


def small_suite() -> dict[str, Check]:
    """All paths of the launchers, in small shapes; a mutant must fail one of them."""
    norm, gate = partial(_each_type, check_norm), partial(_each_type, check_swiglu)
    rotary = partial(_each_type, check_rotary)
    return {
        # 19 rows: three parts of the sum. 8 to 96 columns: a warp, of which lanes have nothing.
        "norm": norm(19, 40),
        "norm, residual": norm(17, 96, residual=True, adds=True),
        "norm, bias": norm(11, 8, residual=True, bias=True, adds=True),
        # 544 columns: in 16 bits 68 units of 64 threads, in float32 136 of 128.
        "wide norm": norm(2, 544, residual=True, bias=True),
        "swiglu": gate(5, 24),
        "swiglu, bias": gate(3, 64, bias=True),
        # 70 rows: three parts; 1,040 columns in units of 16 bytes: two blocks.
        "swiglu, parts": gate(70, 1040, bias=True, adds=True),
        "swiglu, units of 8 bytes": gate(3, 20, bias=True, gap=4),
        "swiglu, rows apart": gate(4, 32, gap=8),
        "swiglu, padded": gate(3, 20, bias=True, padding=4),
        "nothing": gate(0, 32),
        "rotary": rotary(5, 2, 3, 48),
        "rotary, conjugate": rotary(3, 1, 2, 16, conjugate=True),
    }
