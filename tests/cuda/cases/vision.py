"""Runs the launchers of csrc/cuda/attention/*/vision.cu on a fake GPU, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.cudasim.floats import DTYPES, from_float, to_float
from tools.cudasim.ptx.ptxtypes import Array

from ..kernels import Kernels
from ..params import fill
from .window import attend

Round = Callable[[Array], Array]
TILE_ROWS = 128  # of tiled attention


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

    def __post_init__(self) -> None:
        self.patches = sum(self.lengths)
        self.cu_seqlens = np.cumsum([0, *self.lengths]).astype(np.int32)
        self.order = self.rng.permutation(self.patches).astype(np.int32)
        if not self.permuted:
            self.order = np.arange(self.patches, dtype=np.int32)
        angles = self.rng.uniform(-np.pi, np.pi, (self.patches, self.dim // 2))
        self.table = np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
        shape = (self.patches, self.heads, self.dim)
        self.q, self.k, self.v, self.dout = (
            from_float(self.rng.standard_normal(shape), self.dtype) for _ in range(4)
        )

    @property
    def axis(self) -> int:
        """Where q, k and v are stacked."""
        return 2 if self.megatron else 1

    def outputs(self, rounded: Round) -> dict[str, Array]:
        """out, dq, dk and dv in float64; `rounded` is applied wherever plain torch stores."""
        q, k, v, dout = (
            to_float(x, self.dtype).astype(np.float64) for x in (self.q, self.k, self.v, self.dout)
        )
        table, order = self.table.astype(np.float64), self.order
        rows = [rounded(rotate(q, table)), rounded(rotate(k, table)), v, dout]
        found = attend(*(x[order] for x in rows), self.cu_seqlens, self.scale, False, rounded)
        result = {name: np.empty_like(q) for name in ("out", "dq", "dk", "dv")}
        for name in result:
            result[name][order] = found[name]
        for name in ("dq", "dk"):
            result[name] = rounded(rotate(result[name], table, back=True))
        others = ("row_max", "row_sum", "dq terms", "dk terms")
        return result | {name: found[name] for name in others}


def check_vision(
    kernels: Kernels, case: VisionCase, tiled: bool = False, queries: bool = False
) -> Any:
    """Forward and backward; errors at most twice those of plain torch, relative to the norm. Tiled
    attention takes the sum of out * dout for that of p * dp, which differ by float32's rounding of
    the terms that dq and dk are differences of: plain torch's are exactly 0 for a segment of 1.
    `queries`: with workspace for them, as on compute capability 9.0; all of it must be used."""
    device = kernels.device()
    memory = device.memory
    stacked = np.stack([case.q, case.k, case.v], case.axis)
    element = DTYPES[case.dtype][1]
    strides = np.array(stacked.strides) // stacked.itemsize
    head = int(strides[1 if case.megatron else 2])

    def views(address: int) -> list[Any]:
        step = int(strides[case.axis]) * stacked.itemsize
        return [(address + i * step, int(strides[0]), head) for i in range(3)]

    def dense(address: int) -> Any:
        return (address, case.heads * case.dim, case.dim)

    shape = (case.patches, case.heads, case.dim)
    q, k, v = views(memory.upload("qkv", stacked))
    stats = memory.reserve("stats", (2, case.heads, case.patches), np.float32)
    forward = fill(
        "AttentionParams",
        dtype=DTYPES[case.dtype][0],
        q=q,
        k=k,
        v=v,
        out=dense(memory.reserve("out", shape, element)),
        row_max=stats,
        row_sum=stats + 4 * case.heads * case.patches,
        cu_seqlens=memory.upload("cu_seqlens", case.cu_seqlens),
        segments=len(case.lengths),
        tokens=case.patches,
        heads=case.heads,
        kv_heads=case.heads,
        head_dim=case.dim,
        scale=case.scale,
        causal=False,
        order=memory.upload("order", case.order) if case.permuted else None,
        rotary=memory.upload("table", case.table),
        max_seqlen=max(case.lengths) if case.max_seqlen is None else case.max_seqlen,
        tiles=None,
        rotated_k=None,
        rotated_q=None,
    )
    most = case.patches // TILE_ROWS + len(case.lengths)
    rotated = (case.heads, case.patches, case.dim)
    if tiled:
        forward.tiles = memory.reserve("tiles", (1, most, 4), np.int32)
        forward.rotated_k = memory.reserve("rotated k", rotated, element)
        forward.rotated_q = memory.reserve("rotated q", rotated, element) if queries else None
    code = kernels.run(device, "forward", forward)
    assert code == 0, f"forward returned cudaError_t {code}"
    if queries:
        memory.array("rotated q")
    lse_delta = None
    if tiled:
        forward.tiles = memory.reserve("two lists", (2, most, 4), np.int32)
        forward.rotated_k = memory.reserve("rotated k, backward", rotated, element)
        if queries:
            forward.rotated_q = memory.reserve("rotated q, backward", rotated, element)
        lse_delta = memory.reserve("lse_delta", (2, case.heads, case.patches), np.float32)
    grads = fill(
        "AttentionGradParams",
        forward=forward,
        dout=dense(memory.upload("dout", case.dout)),
        **dict(
            zip(
                ("dq", "dk", "dv"),
                views(memory.reserve("dqkv", stacked.shape, element)),
                strict=True,
            )
        ),
        lse_delta=lse_delta,
    )
    code = kernels.run(device, "backward", grads)
    assert code == 0, f"backward returned cudaError_t {code}"
    if queries:
        memory.array("rotated q, backward")

    exact = case.outputs(lambda x: x)
    plain = case.outputs(lambda x: to_float(from_float(x, case.dtype), case.dtype).astype(float))
    ours = dict(zip(("dq", "dk", "dv"), np.moveaxis(memory.array("dqkv"), case.axis, 0)))  # noqa: B905
    ours["out"] = memory.array("out")
    for name, bits in ours.items():
        error, allowed = (
            np.linalg.norm(x - exact[name])
            for x in (to_float(bits, case.dtype).astype(np.float64), plain[name])
        )
        # Written so that a NaN fails. A window of one patch has no gradient but noise.
        tiny = 1e-6 * np.sqrt(exact[name].size)
        if tiled and name in ("dq", "dk"):
            tiny += 2.0**-20 * np.sqrt(exact[f"{name} terms"].sum())
        assert error <= 2 * allowed + tiny, (
            f"{name}: error {error:.3e}, plain torch's {allowed:.3e}"
        )
    for name, found in zip(("row_max", "row_sum"), memory.array("stats"), strict=True):
        # Of products of rows that were rounded.
        error = np.abs(found - exact[name]).max(initial=0)
        allowed = 2 * np.abs(plain[name] - exact[name]).max(initial=0)
        assert error <= allowed + 1e-5 * np.abs(exact[name]).max(initial=0), f"{name}: {error:.2e}"
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
