"""Planted bugs in the forward for sm_90a: each changes one thing, and must be noticed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .attention_cases import Case
from .flash_build import HOPPER, HOPPER_SHARED, HOPPER_SOURCES, WARPGROUPS, Change, build_flash
from .flash_cases import Check, FlashKernels, check_flash, check_neighbours
from .ptxtypes import SimError

DIM = 80


def _run(lengths: list[int], heads: int = 1, kv_heads: int = 1, **more: Any) -> Check:
    def check(kernels: FlashKernels, rng: np.random.Generator) -> None:
        case = Case(rng, list(lengths), heads, kv_heads, DIM, **more)
        check_flash(kernels, case, backward=False)

    return check


#: What a mutant is run on. The GPU has 3 multiprocessors, the rings of keys and values 3 stages.
CHECKS: dict[str, Check] = {
    "ragged": _run([150]),
    "rounds": _run([500, 130], 2, 2),
    "many rounds": _run([900, 130], 2, 2),
    "one": _run([70]),
    "two": _run([256]),
    "causal": _run([200], causal=True),
    "idle": _run([30] * 10),
    "one query": _run([65]),
    "two and a bit": _run([270]),
    "negative": _run([70] * 4, scale=-0.3),
    "groups": _run([30], 4, 2),
    "low": _run([40], 4, 2, scale=0.12, shift=4.0),
    "neighbours": lambda k, r: check_neighbours(k, r, DIM),
}


@dataclass
class HopperMutant:
    """A change, what shows it, and whether make test plants it."""

    name: str
    text: str
    new: str
    check: str = "ragged"
    quick: bool = False
    file: str = HOPPER

    @property
    def change(self) -> Change:
        return self.file, self.text, self.new

    def must_be_noticed(self, runtime: Path, folder: Path, rng: np.random.Generator) -> None:
        """Builds it in bf16, and prints what its check says."""
        types, changes = ("Bf16Math",), [self.change]
        kernels = build_flash(folder, runtime, DIM, "90a", types, changes, HOPPER_SOURCES)
        with pytest.raises((SimError, AssertionError)) as noticed:
            CHECKS[self.check](kernels, rng)
        print(noticed.value)


FENCE = "ptx::fence_async_proxy();\n"
FIRST_SCORES = "(s, queries, arena.keys(key.stage));\n    ptx::wgmma_wait<0>();\n"
M = HopperMutant

MUTANTS = [
    # ---- the producer
    M("fewer bytes announced", "barrier_arrive_expect(full, S::kTileBytes)",
      "barrier_arrive_expect(full, S::kTileBytes - 16)", quick=True),
    M("more bytes announced", "barrier_arrive_expect(full, S::kTileBytes)",
      "barrier_arrive_expect(full, S::kTileBytes + 16)"),
    M("bytes of one chunk announced", "barrier_arrive_expect(full, S::kTileBytes)",
      "barrier_arrive_expect(full, S::kChunkBytes)"),
    M("always the first columns", "full, c * R::kChunk, head", "full, 0, head", file=HOPPER_SHARED),
    M("chunks in one place", "load_box(to + c * HopperTile<kDim, kRows>::kChunkBytes",
      "load_box(to", file=HOPPER_SHARED),
    M("keys overwritten early", "ptx::barrier_wait(arena.keys_empty(key.stage), key.parity ^ 1);",
      "", "rounds"),
    M("values overwritten early",
      "ptx::barrier_wait(arena.values_empty(value.stage), value.parity ^ 1);", "", "rounds"),
    M("queries overwritten early", "ptx::barrier_wait(arena.queries_empty(), parity ^ 1);", "",
      "rounds"),
    M("producer waits for the wrong phase", "arena.keys_empty(key.stage), key.parity ^ 1",
      "arena.keys_empty(key.stage), key.parity"),
    M("producer's phase of the queries", "arena.queries_empty(), parity ^ 1",
      "arena.queries_empty(), parity", "rounds"),
    M("values of the wrong block", "begin + (block - 1) * S::kKeys", "begin + block * S::kKeys"),
    M("keys to the values' barrier", "k, arena.keys_full(key.stage), kv_head",
      "k, arena.values_full(key.stage), kv_head"),
    M("wrong key head", "kv_head = work.head / group;", "kv_head = work.head % group;", "groups"),
    M("queries of the segment's start", "begin + work.tile.first);", "begin);"),
    # ---- the warp that cleans
    M("values past the segment stay", "block == work.blocks && work.ragged)", "false)",
      "neighbours"),
    M("one row too few is cleaned", "(block - 1) * S::kKeys) * S::kRowBytes;",
      "(block - 1) * S::kKeys + 1) * S::kRowBytes;", "neighbours"),
    M("one row too many is cleaned", "(block - 1) * S::kKeys) * S::kRowBytes;",
      "(block - 1) * S::kKeys - 1) * S::kRowBytes;"),
    M("one chunk is cleaned", "arena.values(value.stage) + c * S::kChunkBytes + at",
      "arena.values(value.stage) + at", "neighbours"),
    M("no fence after zeros", "uint4{0, 0, 0, 0});\n          }\n        }\n        " + FENCE,
      "uint4{0, 0, 0, 0});\n          }\n        }\n", "neighbours", quick=True),
    M("no fence after the sign", "arena.queries() + at, x);\n      }\n      " + FENCE,
      "arena.queries() + at, x);\n      }\n", "negative"),
    M("no sign", "if (params.forward.scale < 0.f) {", "if (false) {", "negative"),
    M("cleaner does not wait", "ptx::barrier_wait(arena.values_full(value.stage), value.parity);\n"
      "      if (block", "if (block", "neighbours"),
    M("cleaner of queries does not wait",
      "ptx::barrier_wait(arena.queries_full(), parity);\n    if", "if", "negative"),
    # ---- the consumers
    M("zeros are not waited for",
      "if (work.ragged) ptx::barrier_wait(arena.values_clean(value.stage), value.parity);", "",
      "neighbours", quick=True),
    M("the sign is not waited for", "p.scale < 0.f ? arena.queries_clean() : arena.queries_full()",
      "arena.queries_full()", "negative"),
    M("queries are not waited for",
      "ptx::barrier_wait(queries_ready, parity);\n    ptx::barrier_wait(arena.keys_full",
      "ptx::barrier_wait(arena.keys_full", "one"),
    M("first keys are not waited for",
      "ptx::barrier_wait(arena.keys_full(key.stage), key.parity);\n    start", "start", "one"),
    M("keys are not waited for",
      "ptx::barrier_wait(arena.keys_full(key.stage), key.parity);\n      ptx::named",
      "ptx::named", "two"),
    M("values are not waited for",
      "ptx::barrier_wait(arena.values_full(value.stage), value.parity);\n      start", "start",
      "two", quick=True),
    M("consumer's phase does not turn", "stage = 0, parity ^= 1;", "stage = 0;", "rounds",
      file=HOPPER_SHARED),
    M("a ring one stage longer", "++stage == kStages", "++stage == kStages + 1", "rounds",
      file=HOPPER_SHARED),
    M("first scores not finished", FIRST_SCORES, FIRST_SCORES.split("\n")[0] + "\n", "one"),
    M("scores not finished", "ptx::wgmma_wait<1>();", "ptx::wgmma_wait<2>();"),
    M("results not finished", "softmax(block);\n      ptx::wgmma_wait<0>();", "softmax(block);"),
    M("last results not finished",
      "arena.values(value.stage));\n    ptx::wgmma_wait<0>();", "arena.values(value.stage));",
      "one"),
    M("keys never released", "      release(arena.keys_empty(key.stage));\n      key.advance();\n"
      "      softmax(block);", "      key.advance();\n      softmax(block);", "rounds"),
    M("values released before their product",
      "value.parity);\n      start_columns<",
      "value.parity);\n      release(arena.values_empty(value.stage));\n      start_columns<",
      "rounds"),
    M("queries never released",
      "release(arena.queries_empty());\n    parity ^= 1;\n    //",
      "parity ^= 1;\n    //", "rounds"),
    M("an idle warpgroup keeps queries", "release(arena.queries_empty());\n      parity ^= 1;\n#pr",
      "parity ^= 1;\n#pr", "idle"),
    M("an idle warpgroup keeps its turn",
      "ptx::named_barrier_arrive(kTurn + 1 - consumer, kPlayers);\n        }", "}",
      "two and a bit"),
    M("a warpgroup with one query is idle", "work.tile.first + consumer * 64 >= work.tile.length",
      "work.tile.first + consumer * 64 + 1 >= work.tile.length", "one query"),
    M("idle, and then not", "      work = next;\n      continue;\n    }\n", "    }\n", "idle"),
    M("always the first keys", "(s, queries, arena.keys(key.stage));\n      ptx::barrier",
      "(s, queries, arena.keys(0));\n      ptx::barrier", "two"),
    M("values of the keys' stage",
      "(out, probabilities, arena.values(value.stage));\n      ptx::named",
      "(out, probabilities, arena.values(key.stage));\n      ptx::named", "two"),
    M("both warpgroups take the first queries", "arena.queries() + consumer * 64 * S::kRowBytes",
      "arena.queries()"),
    M("no fence before scores", "8 * R::kRowBytes>(b_rows);\n  ptx::wgmma_fence();",
      "8 * R::kRowBytes>(b_rows);", "one", file=HOPPER_SHARED),
    M("no fence before values", "ptx::wgmma_results(c);\n  ptx::wgmma_fence();",
      "ptx::wgmma_results(c);", "one", file=HOPPER_SHARED),
    M("scores' group is not ended", ", d > 0);\n  }\n  ptx::wgmma_commit();", ", d > 0);\n  }",
      "one", file=HOPPER_SHARED),
    M("scores added to the old", ", d > 0);", ", true);", "two", file=HOPPER_SHARED),
    M("half the depth", "d < R::kDepth; ++d", "d < R::kDepth / 2; ++d", "one",
      file=HOPPER_SHARED),
    M("8 rows in the place of 4",
      "matrix_descriptor<R::kRowBytes, 0, 8 * R::kRowBytes>(b_rows)",
      "matrix_descriptor<R::kRowBytes, 0, 4 * R::kRowBytes>(b_rows)", "one", file=HOPPER_SHARED),
    M("queries' rows of another swizzle",
      "matrix_descriptor<R::kRowBytes, 0, 8 * R::kRowBytes>(a_rows)",
      "matrix_descriptor<128, 0, 8 * R::kRowBytes>(a_rows)", "one", file=HOPPER_SHARED),
    M("values' chunks too near", "matrix_descriptor<R::kRowBytes, kChunkBytes, 8 *",
      "matrix_descriptor<R::kRowBytes, kChunkBytes / 2, 8 *", "one", file=HOPPER_SHARED),
    M("half a step of keys", "b + n * R::kRowBytes", "b + n * R::kRowBytes / 2", "one",
      file=HOPPER_SHARED),
    M("keys past the segment", "(work.ragged || p.causal)", "p.causal"),
    M("no causal mask", "(work.ragged || p.causal)", "work.ragged", "causal"),
    M("ragged only when all is", "blocks * S::kKeys > tile.length",
      "blocks * S::kKeys > tile.length + 127"),
    M("causal tiles end a block early", "min(tile.length, tile.first + kTileRows)",
      "min(tile.length, tile.first)", "causal"),
    M("mask of the wrong block", "block + 1 == work.blocks", "block == work.blocks"),
    M("sums not corrected", "sum[r] * correction[r] + part", "sum[r] + part"),
    M("results not corrected", "out[i] *= correction[i % 4 / 2];", "out[i] *= 1.f;"),
    M("rows' corrections swapped", "correction[i % 4 / 2];", "correction[1 - i % 4 / 2];"),
    M("maximum over half a row", "highest = fmaxf(highest, ptx::exchange(highest, 2));", ""),
    M("maximum forgotten", "float highest = top[r];", "float highest = -3e38f;"),
    M("statistics of the wrong head", "work.head * p.tokens + work.tile",
      "0 * p.tokens + work.tile", "groups"),
    M("results staged in one place", "arena.staging() + warp_row * kPitch<kDim>",
      "arena.staging()"),
    # ---- turns, barriers, registers, the order of the work
    M("nobody has the first turn",
      "if (consumer == 1) ptx::named_barrier_arrive(kTurn, kPlayers);", "", "two"),
    M("the turn is kept",
      "ptx::named_barrier_arrive(kTurn + 1 - consumer, kPlayers);\n      ptx::wgmma",
      "ptx::named_barrier_arrive(kTurn + consumer, kPlayers);\n      ptx::wgmma", "two"),
    M("too few readers of values", "ptx::barrier_init(values_empty(i), kWarps + 1);",
      "ptx::barrier_init(values_empty(i), kWarps);", "many rounds"),
    M("too many readers of keys", "ptx::barrier_init(keys_empty(i), kWarps);",
      "ptx::barrier_init(keys_empty(i), kWarps + 1);", "rounds"),
    M("barriers unknown to TMA", "ptx::fence_barrier_init();", "", "one"),
    M("no barrier after the barriers", "arena.init();\n  }\n  __syncthreads();",
      "arena.init();\n  }", "one"),
    M("registers that are never given", "ptx::give_registers<S::kProducerRegisters>();", "", "one"),
    M("a block skips a tile", "gridDim.x - 1 - blockIdx.x", "gridDim.x - blockIdx.x", "rounds",
      file=HOPPER_SHARED),
    M("heads and tiles exchanged", "static_cast<int>(place % heads)",
      "static_cast<int>(place / heads)", "groups", file=HOPPER_SHARED),
    # ---- the launch
    M("strides exchanged", "{cuuint64_t(head_stride * 2), cuuint64_t(token_stride * 2)}",
      "{cuuint64_t(token_stride * 2), cuuint64_t(head_stride * 2)}", "groups", file=HOPPER_SHARED),
    M("strides in elements", "cuuint64_t(token_stride * 2)}", "cuuint64_t(token_stride)}",
      file=HOPPER_SHARED),
    M("a token past the end", "{kDim, cuuint64_t(heads), cuuint64_t(tokens)}",
      "{kDim, cuuint64_t(heads), cuuint64_t(tokens + 1)}", file=HOPPER_SHARED),
    M("no swizzle", "R::kRowBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B",
      "CU_TENSOR_MAP_SWIZZLE_NONE", "one", file=HOPPER_SHARED),
    M("half a box", "box[] = {R::kChunk, 1, kRows}", "box[] = {R::kChunk, 1, kRows / 2}",
      "one", file=HOPPER_SHARED),
    M("keys' map for values", "(&v, p.dtype, p.v,", "(&v, p.dtype, p.k,", "one"),
    M("one block less", "items < processors ? items : processors",
      "items < processors ? items : processors / 4", "rounds", file=HOPPER_SHARED),
    # ---- hopper.cuh
    M("values not transposed", '", 1, 1, 1, 1;"', '", 1, 1, 1, 0;"', "one", file=WARPGROUPS),
    M("a wait that does not wait", "while (ended == 0)", "while (false)", "one", file=WARPGROUPS),
    M("swizzle codes exchanged", "row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3",
      "row_bytes == 128 ? 2 : row_bytes == 64 ? 1 : 3", "one", file=WARPGROUPS),
    M("addresses cut", "(address & 0x3ffff) >> 4", "(address & 0x1ffff) >> 4", "rounds",
      file=WARPGROUPS),
]  # fmt: skip
