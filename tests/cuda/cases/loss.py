"""Runs the launcher of csrc/cuda/loss on a fake GPU, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.cudasim.floats import DTYPES, from_float, to_float
from tools.cudasim.ptx.ptxtypes import Array

from ..kernels import Kernels
from ..params import fill

LOWEST = np.finfo(np.float32).min


@dataclass
class Chunk:
    """Random logits of `rows` rows, in blocks of so many columns each."""

    rng: np.random.Generator
    rows: int
    blocks: Sequence[int]
    dtype: str = "bfloat16"
    misalign: int = 0  # bytes that each block is off a multiple of 256
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    first_class: int = 0  # classes below and above are other ranks'
    more_classes: int = 0

    def __post_init__(self) -> None:
        self.columns = sum(self.blocks)
        self.classes = self.first_class + self.columns + self.more_classes
        spread = 3 * self.rng.standard_normal((self.rows, self.columns))
        self.bits = from_float(spread, self.dtype)
        self.targets = self.rng.integers(0, self.classes, self.rows)
        ends = self.first_class, self.first_class + self.columns - 1
        self.targets[:2] = ends[: self.rows]
        self.scale = self.rng.uniform(-1, 2, self.rows).astype(np.float32)

    def statistics(self, kind: Any) -> Array:
        """[4, rows] of all columns."""
        x = to_float(self.bits, self.dtype).astype(kind)
        largest = np.maximum(x.max(1), LOWEST)
        place = self.targets - self.first_class
        here = (place >= 0) & (place < self.columns)
        at_target = np.where(here, x[np.arange(self.rows), np.where(here, place, 0)], 0)
        return np.stack([largest, np.exp(x - largest[:, None]).sum(1), at_target, x.sum(1)])

    def gradient(self, kind: Any) -> Array:
        gained, lost = self.terms(kind)
        return (gained - lost) * self.scale[:, None].astype(kind)

    def terms(self, kind: Any) -> tuple[Array, Array]:
        """What the gradient is the difference of, times the row's factor."""
        x = to_float(self.bits, self.dtype).astype(kind)
        largest, total = self.statistics(kind)[:2, :, None].astype(kind)
        two_z, smoothing = kind(2 * self.z_loss), kind(self.label_smoothing)
        slope = (1 + two_z * (largest + np.log(total))) / total
        here = self.targets[:, None] == self.first_class + np.arange(self.columns)
        return np.exp(x - largest) * slope, smoothing / kind(self.classes) + here * (1 - smoothing)


def assert_accurate(
    name: str, ours: Array, plain: Array, exact: Array, dtype: str, terms: Array
) -> None:
    """Of each row: at most twice the error of plain float32, half a unit of the type for each
    element, and what plain float32 may be free of: half a unit of it for the row's factor and four
    of `terms`, which cancel in the result."""
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}[dtype]
    assert ours.shape == exact.shape, f"{name}: {ours.shape}"
    for row in range(len(exact)):
        error, others = (np.linalg.norm(a[row] - exact[row]) for a in (ours, plain))
        allowed = 2 * others + (unit + 2.0**-24) * np.linalg.norm(exact[row])
        allowed += 2.0**-22 * np.linalg.norm(terms[row])
        assert error <= allowed, f"{name}[{row}]: error {error:.3e}, allowed {allowed:.3e}"


def run_loss(
    kernels: Kernels, chunk: Chunk, at_once: bool, device: Any = None
) -> tuple[list[Array], Array]:
    """The statistics and the gradient; in one launch, or block by block as the op does."""
    device = device or kernels.device()
    memory = device.memory
    cuts = np.cumsum([0, *chunk.blocks])
    start = (np.full(chunk.rows, LOWEST), *np.zeros((3, chunk.rows)))
    names = ("row_max", "row_sum", "target_logit", "logit_sum")
    common: dict[str, Any] = {
        name: memory.upload(name, values.astype(np.float32))
        for name, values in zip(names, start, strict=True)
    }
    common["targets"] = memory.upload("targets", chunk.targets.astype(np.int64))
    scale = memory.upload("scale", chunk.scale)
    logits = [
        memory.upload(f"logits {i}", np.ascontiguousarray(chunk.bits[:, a:b]), chunk.misalign)
        for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))
    ]

    def launch(i: int, scale: int | None, statistics: bool) -> None:
        params = fill(
            "CrossEntropyParams",
            **common,
            logits=logits[i],
            scale=scale,
            rows=chunk.rows,
            columns=chunk.blocks[i],
            first_class=chunk.first_class + int(cuts[i]),
            classes=chunk.classes,
            label_smoothing=chunk.label_smoothing,
            z_loss=chunk.z_loss,
            statistics=statistics,
            dtype=DTYPES[chunk.dtype][0],
        )
        assert kernels.run(device, "loss", params) == 0, "loss"

    if at_once:
        launch(0, scale, True)
    else:
        for i in range(len(logits)):
            launch(i, None, True)
        for i in reversed(range(len(logits))):
            launch(i, scale, False)
    parts = [memory.array(f"logits {i}") for i in range(len(logits))]
    return [memory.array(name) for name in names], np.concatenate(parts, 1)


def check_loss(kernels: Kernels, chunk: Chunk, at_once: bool = True) -> None:
    statistics, bits = run_loss(kernels, chunk, at_once)
    exact, plain = chunk.statistics(np.float64), chunk.statistics(np.float32)
    assert (statistics[0] == plain[0]).all(), "row_max"
    assert (statistics[2] == plain[2]).all(), "target_logit"
    # Each addition and each exponential rounds; a thread adds 8 units a batch, ten levels follow.
    units = 2.0**-24 * (40 + chunk.columns / 128)
    size = np.abs(to_float(chunk.bits, chunk.dtype)).sum(1)
    for name, i, scale in (("row_sum", 1, exact[1]), ("logit_sum", 3, size)):
        error = np.abs(statistics[i] - exact[i]) / np.maximum(scale, 1e-30)
        assert (error <= units).all(), f"{name}: error {error.max():.2e}, allowed {units:.2e}"
    want = from_float(chunk.gradient(np.float32), chunk.dtype)
    ours, theirs = (to_float(x, chunk.dtype).astype(np.float64) for x in (bits, want))
    terms = sum(chunk.terms(np.float64)) * np.abs(chunk.scale[:, None])
    assert_accurate("gradient", ours, theirs, chunk.gradient(np.float64), chunk.dtype, terms)


def check_not_numbers(kernels: Kernels, rng: np.random.Generator) -> None:
    """NaN makes its row's sum and gradient NaN and no other's; -inf is a probability of zero, and
    logits below those of all floats' exponentials are told apart."""
    chunk = Chunk(rng, 4, [300], "float32", label_smoothing=0.1)
    chunk.bits[1, 299] = np.nan
    chunk.bits[2, :150] = -np.inf
    chunk.bits[3] -= 3000
    statistics, bits = run_loss(kernels, chunk, True)
    assert np.isnan(statistics[1]).tolist() == [False, True, False, False]
    assert np.isnan(bits).any(1).tolist() == [False, True, False, False]
    assert np.isfinite(statistics[0]).all()
    even = -0.1 / 300 * chunk.scale[2]
    left = np.delete(bits[2, :150], chunk.targets[2] if chunk.targets[2] < 150 else [])
    assert np.abs(left - even).max() <= abs(even) * 2.0**-22
    keep = chunk.bits[3:].astype(np.float64)
    assert statistics[0][3] == keep.max()
    total = np.exp(keep - keep.max()).sum()
    assert abs(statistics[1][3] / total - 1) < 1e-5


Check = Callable[[Kernels, np.random.Generator], Any]
ROUND = {"label_smoothing": 0.1, "z_loss": 1e-3}


def _blocks(kernels: Kernels, rng: np.random.Generator) -> None:
    """A part of the vocabulary in three blocks, aligned and not, of both ends and of one class."""
    chunk = Chunk(rng, 5, [264, 1, 331], first_class=40, more_classes=7, **ROUND)
    check_loss(kernels, chunk, at_once=False)
    check_loss(kernels, Chunk(rng, 3, [9], "float16", first_class=3), at_once=False)


def _few(kernels: Kernels, rng: np.random.Generator) -> None:
    """Fewer classes than a unit, no row, and targets that are all of other ranks."""
    for columns in (1, 3, 7):
        check_loss(kernels, Chunk(rng, 3, [columns], "float16", misalign=2, **ROUND))
    check_loss(kernels, Chunk(rng, 0, [16]))
    chunk = Chunk(rng, 2, [100], "float32", first_class=50, more_classes=50)
    chunk.targets[:] = 49, 150
    check_loss(kernels, chunk)


def _again(kernels: Kernels, rng: np.random.Generator) -> None:
    """The same bits."""
    chunk = Chunk(rng, 2, [1100], "float32", **ROUND)
    (first, bits), (second, others) = (run_loss(kernels, chunk, True) for _ in range(2))
    assert (bits == others).all()
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


def small_suite() -> dict[str, Check]:
    """All paths of the launcher, in small shapes; a mutant must fail one of them."""
    return {
        # 128 threads, 131 units: a batch that ends inside, the first row aligned, the others not.
        "row": lambda k, r: check_loss(k, Chunk(r, 3, [1053])),
        "smoothing": lambda k, r: check_loss(k, Chunk(r, 2, [520], "float16", **ROUND)),
        # 512 threads, 4,614 units: two full batches and one that ends inside.
        "long row": lambda k, r: check_loss(k, Chunk(r, 2, [18459], "float32", 4, **ROUND)),
        "blocks": _blocks,
        "few": _few,
        "again": _again,
        "not numbers": check_not_numbers,
    }
