"""Runs the host launchers of csrc/cuda/attention/sm80 and sm90 on a fake GPU, against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from tools.cudasim.floats import from_float, same_bits, to_float
from tools.cudasim.ptx.ptxtypes import Array
from vlmkernels.attention.reference import varlen_attention_reference

from ..kernels import Kernels
from .window import TILE_ROWS, Case, assert_close, assert_statistics, run_attention

run_flash = partial(run_attention, tiled=True)


def plain_torch(case: Case) -> dict[str, Array]:
    """float64 values of the same results from the plain reference at the case's dtype."""
    dtype = getattr(torch, case.dtype)
    q, k, v, dout = (
        torch.from_numpy(x.view(np.int16)).view(dtype) for x in (case.q, case.k, case.v, case.dout)
    )
    for x in (q, k, v):
        x.requires_grad_()
    cu_seqlens = torch.from_numpy(case.cu_seqlens)
    kw = {"causal": case.causal, "scale": case.scale}
    out = varlen_attention_reference(q, k, v, cu_seqlens, **kw)
    grads = torch.autograd.grad(out, (q, k, v), dout, materialize_grads=True)
    names = ("out", "dq", "dk", "dv")
    return {n: x.detach().double().numpy() for n, x in zip(names, (out, *grads), strict=True)}


def assert_no_worse(
    case: Case, name: str, bits: Array, plain: Array, exact: Array, squares: Array | None
) -> None:
    """An error of at most twice plain torch's, half a unit of the type, and float32's rounding of
    the terms that dq and dk are differences of: plain torch's are exactly 0 for a segment of 1."""
    ours = to_float(bits, case.dtype).astype(np.float64)
    unit = 2.0**-9 if case.dtype == "bfloat16" else 2.0**-12
    error = np.linalg.norm(ours - exact)
    allowed = 2 * np.linalg.norm(plain - exact) + unit * np.linalg.norm(exact)
    if squares is not None:
        allowed += 2.0**-20 * np.sqrt(squares.sum())
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e} beside plain torch"


def check_flash(kernels: Kernels, case: Case, backward: bool = True) -> dict[str, Array]:
    """Errors at most a few roundings of the type, relative to the norm, and twice those of plain
    torch; tiles with the most work first."""
    _, actual = run_flash(kernels, case, backward)
    exact, plain = case.exact(), plain_torch(case)
    for name in ("out", "dq", "dk", "dv") if backward else ("out",):
        squares = exact.get(f"{name} terms")
        assert_no_worse(case, name, actual[name], plain[name], exact[name], squares)
    assert_close(case, "out", actual["out"], exact["out"])
    assert_statistics(case, actual["stats"], exact)
    if backward:
        for name in ("dq", "dk", "dv"):
            assert_close(case, name, actual[name], exact[name], exact.get(f"{name} terms"))
    *entries, counts = actual["tiles"]
    of_queries, of_keys = np.split(np.array(entries), 2)
    check_tiles(case, of_queries, False)
    check_tiles(case, of_keys, True)
    # What blocks have taken is counted from 0 again.
    used = sum(-(-length // TILE_ROWS) for length in case.lengths)
    assert counts[:3].tolist() == [0, used, used], f"counts of tiles {counts}"
    return actual


def check_neighbours(
    kernels: Kernels,
    rng: np.random.Generator,
    dim: int,
    causal: bool = False,
    backward: bool = False,
    **more: Any,
) -> None:
    """A segment's results are the same bits when the segments beside it hold no numbers."""
    case = Case(rng, [40, 130, 100], 1, 1, dim, causal=causal, **more)
    _, alone = run_flash(kernels, case, backward)
    local = slice(40, 170)
    for array in (case.q, case.k, case.v, case.dout):
        array[:40] = from_float(np.array(np.nan), case.dtype)
        array[170:] = from_float(np.array(np.inf), case.dtype)
    _, among = run_flash(kernels, case, backward)
    for name in ("out", "dq", "dk", "dv") if backward else ("out",):
        same_bits(among[name][local], alone[name][local], name)
    same_bits(among["stats"][:, :, local], alone["stats"][:, :, local], "stats")


def check_tiles(case: Case, entries: Array, of_keys: bool) -> None:
    """Every tile of every segment once, those with more work before those with less; of keys a
    segment's tiles in their order."""
    expected, work = [], []
    for begin, length in zip(case.cu_seqlens, case.lengths, strict=False):
        for first in range(0, length, TILE_ROWS):
            expected.append((int(begin), length, first))
    used = [tuple(int(x) for x in entry[:3]) for entry in entries if entry[1]]
    assert not entries[len(used) :].any(), "an empty entry is not at the end"
    assert sorted(used) == expected, f"tiles {sorted(used)}, expected {expected}"
    if of_keys:
        of_segments = sorted(used, key=lambda tile: tile[0])  # stable
        assert of_segments == expected, f"tiles of keys {used}"
    for _, length, first in used:
        tiles = -(-length // TILE_ROWS)
        place = first // TILE_ROWS
        work.append(tiles if not case.causal else tiles - place if of_keys else place + 1)
    assert work == sorted(work, reverse=True), f"work of the tiles in order: {work}"


Check = Callable[[Kernels, np.random.Generator], Any]


def sm90_suite(dim: int = 80) -> dict[str, Check]:
    """Every path of the forward for sm_90a: the emulated GPU has 3 multiprocessors, each of which
    works on several tiles and goes round its rings of keys and values."""
    return {
        "ragged": lambda k, r: check_flash(k, Case(r, [1, 0, 193, 130], 1, 1, dim), False),
        "causal, negative scale": lambda k, r: check_flash(
            k, Case(r, [20, 300, 140], 1, 1, dim, "float16", causal=True, scale=-0.3), False
        ),
        "groups of heads": lambda k, r: check_flash(k, Case(r, [30], 4, 2, dim), False),
        "scores far below zero": lambda k, r: check_flash(
            k, Case(r, [40], 4, 2, dim, scale=0.12, shift=4.0), False
        ),
        "neighbours": lambda k, r: check_neighbours(k, r, dim),
        "causal neighbours": lambda k, r: check_neighbours(k, r, dim, causal=True),
        "rounds": lambda k, r: check_flash(k, Case(r, [650, 128, 140], 2, 2, dim), False),
    }


def sm90_grad_suite(dim: int = 80, **more: Any) -> dict[str, Check]:
    """Every path of a backward for sm_90a: its rings have 3 or 4 stages of 64 rows."""
    dtype = "bfloat16" if more.get("fused") else "float16"
    return {
        "causal, negative scale, groups": lambda k, r: check_flash(
            k, Case(r, [20, 140], 2, 1, dim, dtype, causal=True, scale=-0.3, **more)
        ),
        "ragged, rounds": lambda k, r: check_flash(k, Case(r, [1, 0, 260, 65], 1, 1, dim, **more)),
        "groups, scores far below zero": lambda k, r: check_flash(
            k, Case(r, [40], 4, 2, dim, scale=0.12, shift=4.0, **more)
        ),
        "neighbours": lambda k, r: check_neighbours(k, r, dim, backward=True, **more),
    }


def small_suite(dim: int = 80) -> dict[str, Check]:
    """Every path in small shapes; a mutant must fail one of them."""
    return {
        "two tiles, ragged": lambda k, r: check_flash(k, Case(r, [1, 0, 150, 130], 1, 1, dim)),
        "causal, negative scale": lambda k, r: check_flash(
            k, Case(r, [20, 140], 1, 1, dim, "float16", causal=True, scale=-0.3)
        ),
        "groups of heads": lambda k, r: check_flash(k, Case(r, [30], 4, 2, dim)),
        "scores far below zero": lambda k, r: check_flash(
            k, Case(r, [40], 4, 2, dim, scale=0.12, shift=4.0)
        ),
    }
