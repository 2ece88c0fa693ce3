"""Runs the launchers of csrc/cuda/attention/*/vision.cu on a fake GPU, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tools.cudasim.floats import from_float, to_float
from tools.cudasim.ptx.ptxtypes import Array

from ..kernels import Kernels
from .window import assert_statistics, attend, run_attention

Round = Callable[[Array], Array]


def rotate(x: Array, table: Array, back: bool = False) -> Array:
    """x [P, H, D], the halves of a head paired; table [P, D]: cosines, then sines."""
    cosine, sine = np.split(table[:, None], 2, -1)
    a, b = np.split(x, 2, -1)
    sine = -sine if back else sine
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)


@dataclass
class VisionCase:
    """Random inputs: qkv [P, 3, H, D], or [P, H, 3, D] as Megatron keeps it."""

    rng: np.random.Generator
    lengths: list[int]
    heads: int
    dim: int
    dtype: str = "bfloat16"
    permuted: bool = True
    megatron: bool = False
    scale: float = 0.125
    max_seqlen: int | None = None
    causal: ClassVar[bool] = False
    written: ClassVar[None] = None
    parts: int = 1
    fused: bool = False

    def __post_init__(self) -> None:
        self.tokens, self.kv_heads = sum(self.lengths), self.heads
        self.cu_seqlens = np.cumsum([0, *self.lengths]).astype(np.int32)
        self.order = self.rng.permutation(self.tokens).astype(np.int32)
        if not self.permuted:
            self.order = np.arange(self.tokens, dtype=np.int32)
        angles = self.rng.uniform(-np.pi, np.pi, (self.tokens, self.dim // 2))
        self.table = np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
        shape = (self.tokens, self.heads, self.dim)
        self.q, self.k, self.v, self.dout = (
            from_float(self.rng.standard_normal(shape), self.dtype) for _ in range(4)
        )

    def rounded(self, x: Array) -> Array:
        """To dtype and back."""
        return to_float(from_float(x, self.dtype), self.dtype).astype(np.float64)

    @property
    def axis(self) -> int:
        """Where q, k and v are stacked."""
        return 2 if self.megatron else 1

    def _views(self, address: int, names: Sequence[str]) -> dict[str, Any]:
        """Of parts of [P, 3, H, D], or of [P, H, 3, D]."""
        row = self.heads * self.dim
        step, head = (self.dim, 3 * self.dim) if self.megatron else (row, self.dim)
        return {name: (address + 2 * i * step, 3 * row, head) for i, name in enumerate(names)}

    def inputs(self, memory: Any) -> dict[str, Any]:
        stacked = np.stack([self.q, self.k, self.v], self.axis)
        return self._views(memory.upload("qkv", stacked), "qkv")

    def gradients(self, memory: Any) -> dict[str, Any]:
        address = memory.reserve("dqkv", (self.tokens, 3 * self.heads, self.dim), self.q.dtype)
        return self._views(address, ("dq", "dk", "dv"))

    def read_gradients(self, memory: Any) -> dict[str, Array]:
        shape = (self.heads, 3) if self.megatron else (3, self.heads)
        stacked = memory.array("dqkv").reshape(self.tokens, *shape, self.dim)
        return {n: stacked.take(i, self.axis) for i, n in enumerate(("dq", "dk", "dv"))}

    def outputs(self, rounded: Round, rounded_rows: Round | None = None) -> dict[str, Array]:
        """out, dq, dk and dv in float64; `rounded` is applied wherever plain torch stores, or
        `rounded_rows` to rotated rows and `rounded` to the rest."""
        q, k, v, dout = (
            to_float(x, self.dtype).astype(np.float64) for x in (self.q, self.k, self.v, self.dout)
        )
        table, order = self.table.astype(np.float64), self.order
        rows = [*((rounded_rows or rounded)(rotate(x, table)) for x in (q, k)), v, dout]
        actual = attend(*(x[order] for x in rows), self.cu_seqlens, self.scale, False, rounded)
        result = {name: np.empty_like(q) for name in ("out", "dq", "dk", "dv")}
        for name in result:
            result[name][order] = actual[name]
        for name in ("dq", "dk"):
            result[name] = rounded(rotate(result[name], table, back=True))
        others = ("row_max", "row_sum", "dq terms", "dk terms")
        return result | {name: actual[name] for name in others}


def _exact(x: Array) -> Array:
    return x


def check_vision(
    kernels: Kernels, case: VisionCase, tiled: bool = False, queries: bool = False
) -> Any:
    """Forward and backward; errors at most twice those of plain torch, relative to the norm, which
    takes some 20 rows: of fewer plain torch's error is luck. Tiled attention takes the sum of
    out * dout for that of p * dp, which differ by float32's rounding of the terms that dq and dk
    are differences of: plain torch's are exactly 0 for a segment of 1. `queries`: see
    run_attention."""
    device, ours = run_attention(kernels, case, tiled=tiled, queries=queries)
    exact, plain = case.outputs(_exact), case.outputs(case.rounded)
    for name in ("out", "dq", "dk", "dv"):
        error, allowed = (
            np.linalg.norm(x - exact[name])
            for x in (to_float(ours[name], case.dtype).astype(np.float64), plain[name])
        )
        # Written so that a NaN fails. A window of one patch has no gradient but noise.
        tiny = 1e-6 * np.sqrt(exact[name].size)
        if tiled and name in ("dq", "dk"):
            tiny += 2.0**-20 * np.sqrt(exact[f"{name} terms"].sum())
        assert error <= 2 * allowed + tiny, (
            f"{name}: error {error:.3e}, plain torch's {allowed:.3e}"
        )
    # Of rounded rows; an element close to halfway may be rounded to either side, a unit apart.
    unit = 2.0**-7 if case.dtype == "bfloat16" else 2.0**-10
    q, k = (
        np.abs(rotate(to_float(x, case.dtype), case.table)).max(initial=0) for x in (case.q, case.k)
    )
    statistics = case.outputs(_exact, rounded_rows=case.rounded)
    assert_statistics(case, ours["stats"], statistics, score_error=unit * q * k)
    return device


def check_tiled(kernels: Kernels, *arguments: Any, queries: bool = False, **options: Any) -> Any:
    """check_vision of rows that are not permuted, by the tiled kernels."""
    case = VisionCase(*arguments, **options, permuted=False)
    return check_vision(kernels, case, tiled=True, queries=queries)


Check = Callable[[Kernels, np.random.Generator], Any]


def small_suite() -> dict[str, Check]:
    """Every path in small shapes; a mutant must fail one of them."""
    return {
        "windows, permuted": lambda k, r: check_vision(k, VisionCase(r, [64, 21, 0, 1], 1, 80)),
        "Megatron's order, two heads": lambda k, r: check_vision(
            k, VisionCase(r, [33], 2, 80, "float16", megatron=True, scale=-0.3)
        ),
        "in window order": lambda k, r: check_vision(
            k, VisionCase(r, [17, 5], 1, 80, permuted=False)
        ),
    }


def tiled_suite(dim: int = 80, queries: bool = False) -> dict[str, Check]:
    """The same for segments of any length."""
    return {
        "two tiles, ragged": lambda k, r: check_tiled(k, r, [1, 0, 129], 1, dim, queries=queries),
        "Megatron's order, five heads": lambda k, r: check_tiled(
            k, r, [30, 3], 5, dim, "float16", megatron=True, scale=-0.3, queries=queries
        ),
    }
