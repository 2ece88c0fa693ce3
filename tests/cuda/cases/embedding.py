"""Runs the host launchers of csrc/cuda/embedding on a fake GPU and checks what they wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.cudasim.floats import DTYPES, from_float, same_bits, to_float
from tools.cudasim.ptx.ptxtypes import Array

from ..kernels import Kernels
from ..params import fill


def convert(bits: Array, dtype: str, to: str) -> Array:
    return bits if dtype == to else from_float(to_float(bits, dtype), to)


@dataclass
class Pack:
    """Random inputs. The text ids lie in [0, vocabulary); `share` of the positions are visual."""

    rng: np.random.Generator
    positions: int
    hidden: int
    dtype: str
    vocabulary: int = 11
    share: float = 0.5
    misalign: int = 0  # bytes that table, visual and outputs are off a multiple of 256
    visual_dtype: str = ""  # where it is not that of the table

    def __post_init__(self) -> None:
        is_visual = self.rng.random(self.positions) < self.share
        if 0 < self.share < 1 and self.positions > 1:
            is_visual[0] = is_visual[-1] = True  # a placeholder at both ends
        self.index = np.where(is_visual, np.cumsum(is_visual) - 1, -1).astype(np.int32)
        self.visual_rows = int(is_visual.sum()) + 2  # the last two are named by no position
        # An id at a visual row must not be used. The text ids go round, so that few positions
        # hold all of them, both ends of a range included.
        self.ids = np.full(self.positions, 1 << 40)
        text = np.flatnonzero(~is_visual)
        self.ids[text] = (self.rng.integers(self.vocabulary) + np.arange(len(text))) % (
            self.vocabulary
        )
        self.table = self.random(self.vocabulary)
        self.visual_dtype = self.visual_dtype or self.dtype
        self.visual = self.random(self.visual_rows, self.visual_dtype)

    def random(self, rows: int, dtype: str = "") -> Array:
        return from_float(self.rng.standard_normal((rows, self.hidden)), dtype or self.dtype)

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.table.itemsize

    @property
    def types(self) -> dict[str, int]:
        """The codes of table_dtype and visual_dtype."""
        return {
            "table_dtype": DTYPES[self.dtype][0],
            "visual_dtype": DTYPES[self.visual_dtype][0],
        }

    def shard(self, shard: tuple[int, int] | None) -> tuple[int, int]:
        rank, size = shard or (0, 1)
        rows = self.positions // size
        return rank * rows, rows


def check_forward(
    kernels: Kernels,
    pack: Pack,
    *,
    shard: tuple[int, int] | None = None,
    vocab_range: tuple[int, int] | None = None,
    with_visual: bool = True,
    far: int = 0,
    out_dtype: str = "",
) -> Any:
    """visual_embedding's forward against indexing in numpy, bit for bit.

    With `far`, ids and indices are that much larger and the pointers that many rows back: every
    byte offset is computed as for a table of gigabytes, without having one.
    """
    first, rows = pack.shard(shard)
    start, end = vocab_range or (0, pack.vocabulary)
    out_dtype = out_dtype or pack.dtype
    device = kernels.device()
    memory = device.memory
    table = pack.table[start:end]
    back = far * pack.row_bytes
    visual = memory.upload("visual", pack.visual, pack.misalign) - back if with_visual else 0
    params = fill(
        "EmbeddingParams",
        ids=memory.upload("ids", pack.ids + far),
        visual_index=memory.upload(
            "visual_index", np.where(pack.index < 0, -1, pack.index + far).astype(np.int32)
        ),
        table=(memory.upload("table", table, pack.misalign) - back) % (1 << 64),
        visual=visual % (1 << 64),
        out=memory.reserve("out", (rows, pack.hidden), DTYPES[out_dtype][1], pack.misalign),
        first=first,
        rows=rows,
        hidden=pack.hidden,
        **pack.types,
        out_dtype=DTYPES[out_dtype][0],
        vocab_start=start,
        vocab_rows=end - start + far,
        visual_rows=pack.visual_rows + far if with_visual else -1,
        partial=vocab_range is not None,
    )
    assert kernels.run(device, "forward", params) == 0, "forward"
    words = convert(table, pack.dtype, out_dtype)
    images = convert(pack.visual, pack.visual_dtype, out_dtype)
    want = np.zeros((rows, pack.hidden), words.dtype)
    for i in range(rows):
        index, token = pack.index[first + i], pack.ids[first + i]
        if index >= 0:
            if with_visual:
                want[i] = images[index]
        elif start <= token < end:
            want[i] = words[token - start]
    same_bits(memory.array("out"), want, "out")
    return device


def check_scatter(
    kernels: Kernels,
    pack: Pack,
    *,
    shard: tuple[int, int] | None,
    with_visual: bool,
    in_place: bool = False,
) -> None:
    """scatter_visual's forward, into another tensor or in place, and its gradient of the
    embeddings without visual."""
    first, rows = pack.shard(shard)
    device = kernels.device()
    memory = device.memory
    base = pack.random(rows)
    table = memory.upload("embeddings", base, pack.misalign)
    params = fill(
        "EmbeddingParams",
        ids=None,
        visual_index=memory.upload("visual_index", pack.index),
        table=table,
        visual=memory.upload("visual", pack.visual, pack.misalign) if with_visual else None,
        out=table if in_place else memory.reserve("out", base.shape, base.dtype, pack.misalign),
        first=first,
        rows=rows,
        hidden=pack.hidden,
        **pack.types,
        out_dtype=DTYPES[pack.dtype][0],
        vocab_start=0,
        vocab_rows=0,
        visual_rows=pack.visual_rows if with_visual else -1,
        partial=False,
    )
    assert kernels.run(device, "forward", params) == 0, "forward"
    want = base.copy()
    for i in range(rows):
        index = pack.index[first + i]
        if index >= 0:
            want[i] = pack.visual[index] if with_visual else 0
    same_bits(memory.array("embeddings" if in_place else "out"), want, "out")


def check_add(
    kernels: Kernels, pack: Pack, *, shard: tuple[int, int] | None = None, far: int = 0
) -> None:
    """add_visual_: sums rounded once at visual rows, the others as they were; `far` as above."""
    first, rows = pack.shard(shard)
    device = kernels.device()
    memory = device.memory
    before = pack.random(rows)
    index = np.where(pack.index < 0, -1, pack.index + far).astype(np.int32)
    visual = memory.upload("visual", pack.visual, pack.misalign) - far * pack.row_bytes
    params = fill(
        "EmbeddingAddParams",
        visual_index=memory.upload("visual_index", index),
        visual=visual % (1 << 64),
        out=memory.upload("out", before, pack.misalign),
        first=first,
        rows=rows,
        hidden=pack.hidden,
        visual_rows=pack.visual_rows + far,
        dtype=DTYPES[pack.dtype][0],
    )
    assert kernels.run(device, "add", params) == 0, "add"
    here = pack.index[first : first + rows]
    want = before.copy()
    sums = to_float(before[here >= 0], pack.dtype) + to_float(
        pack.visual[here[here >= 0]], pack.dtype
    )
    want[here >= 0] = from_float(sums, pack.dtype)
    same_bits(memory.array("out"), want, "out")


def check_gather(
    kernels: Kernels, pack: Pack, *, shard: tuple[int, int] | None = None, out_dtype: str = ""
) -> Any:
    """dvisual: each row from the one position that names it, zeros elsewhere."""
    first, rows = pack.shard(shard)
    out_dtype = out_dtype or pack.dtype
    device = kernels.device()
    memory = device.memory
    grad = pack.random(rows)
    shape = (pack.visual_rows, pack.hidden)
    params = fill(
        "EmbeddingGatherParams",
        visual_index=memory.upload("visual_index", pack.index),
        grad=memory.upload("grad", grad, pack.misalign),
        inverse=memory.upload("inverse", np.full(pack.visual_rows, -1, np.int32)),
        dvisual=memory.reserve("dvisual", shape, DTYPES[out_dtype][1], pack.misalign),
        first=first,
        rows=rows,
        hidden=pack.hidden,
        visual_rows=pack.visual_rows,
        grad_dtype=DTYPES[pack.dtype][0],
        dvisual_dtype=DTYPES[out_dtype][0],
    )
    assert kernels.run(device, "gather", params) == 0, "gather"
    moved = convert(grad, pack.dtype, out_dtype)
    want = np.zeros(shape, moved.dtype)
    for i in range(rows):
        index = pack.index[first + i]
        if index >= 0:
            want[index] = moved[i]
    same_bits(memory.array("dvisual"), want, "dvisual")
    return device


def check_reduce(
    kernels: Kernels, pack: Pack, *, out_dtype: str = "", accumulate: bool = False
) -> None:
    """dweight: fp32 sums in the order of positions, those of long runs in 16 parts, rounded once,
    bit for bit."""
    out_dtype = out_dtype or pack.dtype
    device = kernels.device()
    memory = device.memory
    grad = pack.random(pack.positions)
    before = pack.random(pack.vocabulary, out_dtype)
    if not accumulate:
        before = np.zeros_like(before)
    raw = np.where(pack.index < 0, pack.ids, pack.vocabulary)
    order = np.argsort(raw, kind="stable").astype(np.int64)
    params = fill(
        "EmbeddingReduceParams",
        keys=memory.upload("keys", raw[order].astype(np.int64)),
        order=memory.upload("order", order),
        grad=memory.upload("grad", grad, pack.misalign),
        dweight=memory.upload("dweight", before, pack.misalign),
        count=pack.positions,
        hidden=pack.hidden,
        vocab_rows=pack.vocabulary,
        grad_dtype=DTYPES[pack.dtype][0],
        dweight_dtype=DTYPES[out_dtype][0],
        accumulate=accumulate,
    )
    assert kernels.run(device, "reduce", params) == 0, "reduce"
    sums = np.zeros((pack.vocabulary, pack.hidden), np.float32)
    for token in range(pack.vocabulary):
        run = to_float(grad[raw == token], pack.dtype)
        part = len(run) if len(run) <= 64 else -(-len(run) // 16)
        for begin in range(0, len(run), max(part, 1)):
            of_part = np.zeros(pack.hidden, np.float32)
            for row in run[begin : begin + part]:
                of_part += row
            sums[token] += of_part
    if accumulate:
        sums = to_float(before, out_dtype) + sums
    same_bits(memory.array("dweight"), from_float(sums, out_dtype), "dweight")


Check = Callable[[Kernels, np.random.Generator], Any]


def _forward_edges(kernels: Kernels, rng: np.random.Generator) -> None:
    """A pack of visual rows only, one of text only, one row, and a shard of none."""
    for positions, share in ((5, 1.0), (5, 0.0), (1, 1.0), (0, 0.5)):
        check_forward(kernels, Pack(rng, positions, 16, "bfloat16", share=share))


def _forward_shards(kernels: Kernels, rng: np.random.Generator) -> None:
    """Both halves, with a range that leaves ids on both sides."""
    pack = Pack(rng, 36, 72, "float16", vocabulary=5)
    for rank in range(2):
        check_forward(kernels, pack, shard=(rank, 2), vocab_range=(1, 4))


def _scatter_shards(kernels: Kernels, rng: np.random.Generator) -> None:
    pack = Pack(rng, 12, 24, "float32")
    check_scatter(kernels, pack, shard=(2, 3), with_visual=True)
    check_scatter(kernels, pack, shard=(1, 3), with_visual=False)
    check_scatter(kernels, pack, shard=(0, 3), with_visual=True, in_place=True)


def _forward_converted(kernels: Kernels, rng: np.random.Generator) -> None:
    """Four elements at a time with a batch that ends inside, and one; every type on every side."""
    wide = Pack(rng, 19, 1096, "bfloat16", visual_dtype="float32")
    check_forward(kernels, wide, out_dtype="float32")
    check_forward(kernels, wide, out_dtype="bfloat16", shard=None, vocab_range=(2, 8))
    narrow = Pack(rng, 7, 33, "float32", visual_dtype="float16", misalign=4)
    check_forward(kernels, narrow, out_dtype="float16")
    check_forward(kernels, narrow, out_dtype="float32")
    check_forward(kernels, Pack(rng, 5, 33, "float32"), out_dtype="bfloat16")
    check_forward(kernels, Pack(rng, 6, 8, "float16"), out_dtype="float32", with_visual=False)


def _gather_converted(kernels: Kernels, rng: np.random.Generator) -> None:
    check_gather(kernels, Pack(rng, 24, 40, "float32"), shard=(1, 2), out_dtype="bfloat16")
    check_gather(kernels, Pack(rng, 9, 5, "bfloat16"), out_dtype="float32")


def _reduce_converted(kernels: Kernels, rng: np.random.Generator) -> None:
    """Into a float32 gradient that holds something, as Megatron's main_grad does."""
    for dtype, hidden, misalign in (("bfloat16", 1032, 0), ("float32", 20, 0), ("float16", 7, 4)):
        pack = Pack(rng, 17, hidden, dtype, vocabulary=3, misalign=misalign)
        check_reduce(kernels, pack, out_dtype="float32", accumulate=True)
    check_reduce(kernels, Pack(rng, 12, 12, "float32", vocabulary=3), out_dtype="bfloat16")
    check_reduce(kernels, Pack(rng, 12, 16, "float16", vocabulary=3), out_dtype="float32")


def _reduce_short_and_long(kernels: Kernels, rng: np.random.Generator) -> None:
    """Runs of 64 and 65 rows, in both orders."""
    for first in (64, 65):
        pack = Pack(rng, 129, 24, "bfloat16", vocabulary=2, share=0.0)
        pack.ids = (np.arange(129) >= first).astype(np.int64)
        check_reduce(kernels, pack, out_dtype="float32", accumulate=True)


def _reduce_long(kernels: Kernels, rng: np.random.Generator) -> None:
    """Of several parts and of fewer than there are warps; 66 units of columns; added to."""
    check_reduce(kernels, Pack(rng, 260, 264, "float32", vocabulary=1, share=0.0))
    pack = Pack(rng, 300, 7, "float16", vocabulary=2, share=0.4)
    check_reduce(kernels, pack, out_dtype="float32", accumulate=True)


def _add_narrow(kernels: Kernels, rng: np.random.Generator) -> None:
    """One element at a time; a row, and a shard, of none."""
    check_add(kernels, Pack(rng, 11, 150, "float16", misalign=2))
    check_add(kernels, Pack(rng, 9, 33, "float32"), shard=(1, 3))
    for positions, share in ((5, 1.0), (5, 0.0), (1, 1.0), (0, 0.5)):
        check_add(kernels, Pack(rng, positions, 16, "bfloat16", share=share))


def small_suite() -> dict[str, Check]:
    """All paths of the three launchers, in small shapes; a mutant must fail one of them."""
    far = (1 << 31) - 100  # the largest index of an int32
    return {
        # 37 rows: three blocks of 16 rows, the last with a ragged warp. 168 units of 16 bytes:
        # one full batch of loads, and one that ends inside the batch.
        "forward": lambda k, r: check_forward(k, Pack(r, 37, 1344, "bfloat16")),
        "forward, shards and vocabulary range": _forward_shards,
        "forward, 4-byte path": lambda k, r: check_forward(
            k, Pack(r, 9, 33, "float32"), with_visual=False
        ),
        "forward, 2-byte path": lambda k, r: check_forward(
            k, Pack(r, 9, 64, "bfloat16", misalign=2)
        ),
        "forward, far": lambda k, r: check_forward(k, Pack(r, 8, 16, "float32"), far=far),
        "forward, edges": _forward_edges,
        "scatter": _scatter_shards,
        # 170 units: a full batch of four a lane and one that ends inside. 10 rows: three blocks.
        "add": lambda k, r: check_add(k, Pack(r, 20, 680, "bfloat16"), shard=(1, 2)),
        "add, float32": lambda k, r: check_add(k, Pack(r, 6, 24, "float32", share=0.7)),
        "add, far": lambda k, r: check_add(k, Pack(r, 8, 16, "float32"), far=far),
        "add, narrow": _add_narrow,
        "gather": lambda k, r: check_gather(k, Pack(r, 40, 40, "bfloat16"), shard=(1, 2)),
        "gather, one column": lambda k, r: check_gather(k, Pack(r, 150, 1, "float16", share=0.1)),
        "reduce": lambda k, r: check_reduce(k, Pack(r, 29, 1040, "bfloat16", vocabulary=4)),
        "reduce, scalar": lambda k, r: check_reduce(k, Pack(r, 31, 131, "float16", vocabulary=2)),
        # Text only: the last run ends where the entries do.
        "reduce, float32": lambda k, r: check_reduce(
            k, Pack(r, 13, 520, "float32", vocabulary=2, share=0.0)
        ),
        "reduce, short and long": _reduce_short_and_long,
        "reduce, long runs": _reduce_long,
        "forward, converted": _forward_converted,
        "gather, converted": _gather_converted,
        "reduce, converted and added": _reduce_converted,
    }
