"""Runs the host launchers of csrc/cuda/attention on a fake GPU, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tools.cudasim.floats import DTYPES, from_float, to_float
from tools.cudasim.ptx.ptxtypes import Array
from vlmkernels._native import _C

from ..kernels import Kernels
from ..params import fill

TILE_ROWS, DQ_ROWS = _C.TILE_ROWS, _C.DQ_ROWS  # of tiled attention


@dataclass
class Case:
    """Random inputs."""

    rng: np.random.Generator
    lengths: list[int]
    heads: int
    kv_heads: int
    dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    scale: float = 0.125
    max_seqlen: int | None = None
    shift: float = 0.0  # of q up and of k down: scores far below zero
    written: Array | None = None  # to cu_seqlens after tiles were listed
    fused: bool = False  # the backward of one kernel
    parts: int = 1  # blocks for the heads that share a key, in sm90's backward
    permuted: ClassVar[bool] = False
    table: ClassVar[None] = None

    def __post_init__(self) -> None:
        self.tokens = sum(self.lengths)
        self.cu_seqlens = np.cumsum([0, *self.lengths]).astype(np.int32)
        self.q, self.dout = self._random(self.heads, self.shift), self._random(self.heads)
        self.k, self.v = self._random(self.kv_heads, -self.shift), self._random(self.kv_heads)

    def _random(self, heads: int, shift: float = 0.0) -> Array:
        values = self.rng.standard_normal((self.tokens, heads, self.dim)) + shift
        return from_float(values, self.dtype)

    def inputs(self, memory: Any) -> dict[str, Any]:
        """Views of q, k and v: each for itself, or where each has as many heads as parts of one
        tensor [T, 3, H, D], as a fused projection leaves them."""
        arrays = {"q": self.q, "k": self.k, "v": self.v}
        if self.heads == 1 or self.heads != self.kv_heads:
            return {n: view(memory.upload(n, x), x.shape[1], self.dim) for n, x in arrays.items()}
        fused = memory.upload("qkv", np.stack(list(arrays.values()), 1))
        row = self.heads * self.dim
        return {name: (fused + 2 * row * i, 3 * row, self.dim) for i, name in enumerate(arrays)}

    def gradients(self, memory: Any) -> dict[str, Any]:
        """Views of dq, dk and dv."""
        return {
            f"d{n}": view(memory.reserve(f"d{n}", x.shape, x.dtype), x.shape[1], self.dim)
            for n, x in (("q", self.q), ("k", self.k), ("v", self.v))
        }

    def read_gradients(self, memory: Any) -> dict[str, Array]:
        return {name: memory.array(name) for name in ("dq", "dk", "dv")}

    def exact(self) -> dict[str, Array]:
        """attend's results in float64."""
        q, k, v, dout = (
            to_float(x, self.dtype).astype(np.float64) for x in (self.q, self.k, self.v, self.dout)
        )
        return attend(q, k, v, dout, self.cu_seqlens, self.scale, self.causal)


def attend(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    cu_seqlens: Array,
    scale: float,
    causal: bool,
    rounded: Callable[[Array], Array] = lambda x: x,
) -> dict[str, Array]:
    """out, dq, dk and dv, the forward's statistics, and squares of the terms that dq and dk are
    differences of; `rounded` is applied wherever plain torch stores."""
    tokens, heads = q.shape[:2]
    group = heads // k.shape[1]
    result = {n: np.zeros_like(x) for n, x in (("out", q), ("dq", q), ("dk", k), ("dv", v))}
    result |= {"dq terms": np.zeros_like(q), "dk terms": np.zeros_like(k)}
    row_max, row_sum = np.zeros((heads, tokens)), np.zeros((heads, tokens))
    sign = -1.0 if scale < 0 else 1.0
    for begin, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        for h in range(heads if end > begin else 0):
            rows, kv = slice(begin, end), h // group
            s = rounded(q[rows, h] @ k[rows, kv].T * sign)
            if causal:
                s[np.triu_indices(end - begin, 1)] = -np.inf
            top = s.max(1, keepdims=True)
            e = np.exp(rounded((s - top) * abs(scale)))
            p = rounded(e / e.sum(1, keepdims=True))
            result["out"][rows, h] = rounded(p @ v[rows, kv])
            dp = rounded(dout[rows, h] @ v[rows, kv].T)
            delta = (p * dp).sum(1, keepdims=True)
            ds = rounded(rounded(p * (dp - delta)) * scale)
            terms = (p * (np.abs(dp) + np.abs(delta)) * scale) ** 2
            result["dq terms"][rows, h] = terms @ k[rows, kv] ** 2
            result["dk terms"][rows, kv] += terms.T @ q[rows, h] ** 2
            result["dq"][rows, h] = rounded(ds @ k[rows, kv])
            result["dk"][rows, kv] += rounded(ds.T @ q[rows, h])
            result["dv"][rows, kv] += rounded(p.T @ dout[rows, h])
            row_max[h, rows], row_sum[h, rows] = top[:, 0], e.sum(1)
    return {**result, "row_max": row_max, "row_sum": row_sum}


def view(address: int, heads: int, dim: int) -> Any:
    return (address, heads * dim, dim)


def run_attention(
    kernels: Kernels, case: Any, backward: bool = True, tiled: bool = False, queries: bool = False
) -> tuple[Any, dict[str, Array]]:
    """Runs forward and backward of a Case or a VisionCase.

    Args:
        tiled: with workspace for segments of any length.
        queries: with workspace for rotated queries, as on compute capability 9.0; all of it must be
            written.

    Returns:
        The device, and what was written: out, stats, dq, dk, dv and the lists of tiles.
    """
    device = kernels.device()
    memory = device.memory
    shape = (case.tokens, case.heads, case.dim)
    stats_shape = (2, case.heads, case.tokens)
    stats = memory.reserve("stats", stats_shape, np.float32)
    names = ["out", "stats"]

    segments = {
        "cu_seqlens": memory.upload("cu_seqlens", case.cu_seqlens),
        "segments": len(case.cu_seqlens) - 1,
        "tokens": case.tokens,
        "max_seqlen": max(case.lengths) if case.max_seqlen is None else case.max_seqlen,
        "causal": case.causal,
        "tiles": None,
    }
    if tiled:
        if case.lengths:  # else no kernel runs
            names.append("tiles")
        most = case.tokens // TILE_ROWS + len(case.lengths)
        segments["tiles"] = memory.reserve("tiles", (2 * most + 1, 4), np.int32)
        lists = fill("TileListParams", **segments, vision=case.table is not None)
        code = kernels.run(device, "tiles", lists)
        assert code == 0, f"the list of tiles returned cudaError_t {code}"
        if case.written is not None:
            segments["cu_seqlens"] = memory.upload("cu_seqlens, written to", case.written)

    def workspace(way: str) -> dict[str, Any]:
        element = DTYPES[case.dtype][1]
        wanted = {"rotated_k": tiled and case.table is not None, "rotated_q": queries}
        if queries:
            names.append(f"rotated_q, {way}")
        return {
            name: memory.reserve(f"{name}, {way}", shape, element) if on else None
            for name, on in wanted.items()
        }

    forward = fill(
        "AttentionParams",
        dtype=DTYPES[case.dtype][0],
        **case.inputs(memory),
        out=view(memory.reserve("out", shape, DTYPES[case.dtype][1]), case.heads, case.dim),
        row_max=stats,
        row_sum=stats + 4 * case.heads * case.tokens,
        **segments,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.dim,
        scale=case.scale,
        order=memory.upload("order", case.order) if case.permuted else None,
        rotary=None if case.table is None else memory.upload("table", case.table),
        q_group_gap=0,
        probabilities=None,
        **workspace("forward"),
    )
    code = kernels.run(device, "forward", forward)
    assert code == 0, f"forward returned cudaError_t {code}"
    gradients: dict[str, Array] = {}
    if backward:
        for name, address in workspace("backward").items():
            setattr(forward, name, address)
        sums = memory.reserve("lse_delta", stats_shape, np.float32) if tiled else None
        parts = case.heads * (case.tokens // DQ_ROWS + len(case.lengths))
        shape = (parts, DQ_ROWS, case.dim)
        sums_shape = (case.parts, 2, case.tokens, case.kv_heads, case.dim)
        dkv = memory.reserve("dkv_parts", sums_shape, np.float32) if case.parts > 1 else None
        grads = fill(
            "AttentionGradParams",
            forward=forward,
            dout=view(memory.upload("dout", case.dout), case.heads, case.dim),
            **case.gradients(memory),
            lse_delta=sums,
            dkv_parts=dkv,
            group_parts=case.parts,
            dq_sum=memory.reserve("dq_sum", shape, np.float32) if case.fused else None,
            done=memory.upload("done", np.zeros(parts, np.int32)) if case.fused else None,
        )
        code = kernels.run(device, "backward", grads)
        assert code == 0, f"backward returned cudaError_t {code}"
        gradients = case.read_gradients(memory)
    return device, {**{name: memory.array(name) for name in names}, **gradients}


def check_window(kernels: Kernels, case: Case) -> Any:
    """Forward and backward; errors at most a few roundings of the type, relative to the norm."""
    device, actual = run_attention(kernels, case)
    exact = case.exact()
    assert_statistics(case, actual["stats"], exact)
    for name in ("out", "dq", "dk", "dv"):
        assert_close(case, name, actual[name], exact[name], exact.get(f"{name} terms"))
    return device


def assert_statistics(
    case: Any, actual: Array, exact: dict[str, Array], score_error: float = 0
) -> None:
    """row_max and row_sum; a score's rounding, which grows with it, is in its exponential.
    `score_error`: by how much a score, not yet scaled, may differ besides."""
    largest = np.abs(exact["row_max"]).max(initial=0) * abs(case.scale)
    for name, ours in zip(("row_max", "row_sum"), actual, strict=True):
        error = np.abs(ours - exact[name]).max(initial=0)
        relative = 1e-5 + (2.0**-24 * largest if name == "row_sum" else 0)
        allowed = relative * max(np.abs(exact[name]).max(initial=0), 1)
        if name == "row_max":
            allowed += score_error
        else:  # of differences of two scores
            allowed += 2 * score_error * abs(case.scale) * np.abs(exact[name]).max(initial=0)
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def assert_close(
    case: Case, name: str, bits: Array, exact: Array, squares: Array | None = None
) -> None:
    """P, dS, out and the result are rounded to the 16-bit type, half a unit each: relative to the
    result or, where that is a difference of larger terms, to them."""
    ours = to_float(bits, case.dtype).astype(np.float64)
    unit = 2.0**-9 if case.dtype == "bfloat16" else 2.0**-12
    error = np.linalg.norm(ours - exact)
    size = np.linalg.norm(exact) + (0 if squares is None else np.sqrt(squares.sum()))
    allowed = 3 * unit * size + 2e-3 * unit
    if error <= allowed:  # not "error > allowed: fail", so that a NaN fails
        return
    worst = np.unravel_index(np.abs(ours - exact).argmax(), exact.shape)
    raise AssertionError(
        f"{name}: error {error:.3e}, allowed {allowed:.3e}; the worst element "
        f"{tuple(int(i) for i in worst)}: {ours[worst]!r} for {exact[worst]!r}"
    )


Check = Callable[[Kernels, np.random.Generator], Any]


def small_suite() -> dict[str, Check]:
    """Every path in small shapes; a mutant must fail one of them."""
    return {
        "windows": lambda k, r: check_window(k, Case(r, [64, 21, 0, 1], 1, 1, 80)),
        "gqa, causal, negative scale": lambda k, r: check_window(
            k, Case(r, [33], 4, 2, 80, "float16", causal=True, scale=-0.3)
        ),
        # Rows of zeros behind the window would have probabilities of infinity.
        "scores far below zero": lambda k, r: check_window(
            k, Case(r, [21], 1, 1, 80, scale=0.3, shift=4.0)
        ),
    }
