"""Planted bugs in the backward for sm_90a: each changes one thing, and must be noticed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .attention_cases import Case
from .flash_build import HOPPER_BACKWARD, HOPPER_SHARED, SHARED, Change, copy_sources
from .flash_cases import Check, FlashKernels, check_flash, check_neighbours
from .parser import parse_ptx
from .ptxtypes import SimError
from .toolchain import build_kernels

DIM = 80


def _run(lengths: list[int], heads: int = 1, kv_heads: int = 1, **more: Any) -> Check:
    def check(kernels: FlashKernels, rng: np.random.Generator) -> None:
        check_flash(kernels, Case(rng, list(lengths), heads, kv_heads, DIM, **more))

    return check


#: What a mutant is run on. The GPU has 3 multiprocessors, the rings 4 stages of 64 rows.
CHECKS: dict[str, Check] = {
    "one": _run([70]),
    "tiles": _run([150]),
    "rounds": _run([260, 65], 1, 1),
    "causal": _run([200], causal=True),
    "idle": _run([30] * 5),
    "negative": _run([40], scale=-0.3),
    "groups": _run([30], 4, 2),
    "idle groups": _run([20], 8, 1),
    "causal groups": _run([140], 2, 1, causal=True),
    "causal rounds": _run([130] * 2, 2, 1, causal=True),
    "low": _run([40], 4, 2, scale=0.12, shift=4.0),
    "neighbours": lambda k, r: check_neighbours(k, r, DIM, backward=True),
}


@dataclass
class HopperGradMutant:
    """A change, what shows it, and whether make test plants it."""

    name: str
    text: str
    new: str
    check: str = "tiles"
    quick: bool = False
    file: str = HOPPER_BACKWARD

    @property
    def change(self) -> Change:
        return self.file, self.text, self.new

    def must_be_noticed(
        self, kernels: FlashKernels, folder: Path, rng: np.random.Generator
    ) -> None:
        """Builds the backward with it, in bf16, and prints what its check says."""
        cuda = copy_sources(folder, DIM, ("Bf16Math",), [self.change])
        build = build_kernels(cuda / HOPPER_BACKWARD, folder / "backward", [kernels.architecture])
        changed = FlashKernels(
            kernels.builds | {"backward": build},
            kernels.launchers,
            kernels.runtime,
            kernels.architecture,
        )
        ptx = parse_ptx(build.ptx[kernels.architecture])
        changed.modules = kernels.modules | {"backward": ptx}
        with pytest.raises((SimError, AssertionError)) as noticed:
            CHECKS[self.check](changed, rng)
        print(noticed.value)


M = HopperGradMutant
FULL = "ptx::barrier_wait(arena.full(ring.stage), ring.parity);"
EMPTY = "ptx::barrier_wait(arena.empty(ring.stage), ring.parity ^ 1);"
SKIP = "if (skipped) pass();\n    start_scores"

MUTANTS = [
    # ---- the producer
    M("fewer bytes announced", "arena.full(ring.stage), 2 * S::kStreamBytes",
      "arena.full(ring.stage), 2 * S::kStreamBytes - 16"),
    M("more bytes announced", "arena.full(ring.stage), 2 * S::kStreamBytes",
      "arena.full(ring.stage), 2 * S::kStreamBytes + 16"),
    M("half of the resident bytes announced", "2 * S::kResidentBytes);", "S::kResidentBytes);"),
    M("stages overwritten early", f"{EMPTY}\n        ptx::barrier_arrive",
      "ptx::barrier_arrive", "rounds"),
    M("resident rows overwritten early",
      "ptx::barrier_wait(arena.resident_empty(), parity ^ 1);", "", "rounds"),
    M("producer waits for the wrong phase", f"{EMPTY}\n        ptx::barrier_arrive",
      f"{EMPTY.replace(' ^ 1', '')}\n        ptx::barrier_arrive"),
    M("producer's phase of resident rows", "arena.resident_empty(), parity ^ 1",
      "arena.resident_empty(), parity", "rounds"),
    M("one tensor twice", "maps.stream[i],", "maps.stream[0],"),
    M("resident tensor twice", "maps.resident[i],", "maps.resident[0],"),
    M("stream's boxes in one place", "(arena.stream(i, ring.stage)",
      "(arena.stream(0, ring.stage)"),
    M("first head of the group", "work.stream_head + head,", "work.stream_head,", "groups"),
    M("keys of the query's head", "item.head / group, 1, 0, 0", "item.head % group, 1, 0, 0",
      "groups"),
    M("queries of the key's head", "item.head * group, group", "item.head, group", "groups"),
    M("resident rows of the segment's start", "work.head, begin + work.tile.first",
      "work.head, begin"),
    M("causal queries see too few keys", "item.tile.first + kTileRows)", "item.tile.first)",
      "causal"),
    M("a step too few", "(end - work.first + kStep - 1) / kStep", "(end - work.first) / kStep"),
    M("tiles past the list", "params.tiles + 4 * (p.tokens / kTileRows + p.segments)",
      "params.tiles + 4 * (p.tokens / kTileRows + p.segments + 1)", "one"),
    # ---- the warps that follow
    M("rows past the segment stay", "if (left < S::kStep) {", "if (false) {", "neighbours"),
    M("one row too few is zeroed", "left * S::kRowBytes", "(left + 1) * S::kRowBytes",
      "neighbours"),
    M("one row too many is zeroed", "left * S::kRowBytes", "(left - 1) * S::kRowBytes"),
    M("one tensor is zeroed", "(which, ring.stage) + c * kChunkBytes",
      "(0, ring.stage) + c * kChunkBytes", "neighbours"),
    M("one chunk is zeroed", "ring.stage) + c * kChunkBytes + at", "ring.stage) + at",
      "neighbours"),
    M("no fence after zeros", "ptx::fence_async_proxy();", "", quick=True),
    M("followers do not wait", FULL, ""),
    M("numbers overwritten early", f"{EMPTY}\n          ptx::store", "ptx::store", "rounds"),
    M("numbers past the segment", "lane < left ? from[0] : 0.f", "from[0]", "neighbours"),
    M("more numbers past the segment", "lane + kWarpSize < left ? from[kWarpSize] : 0.f",
      "from[kWarpSize]", "neighbours"),
    M("numbers of the first half twice", "from[kWarpSize] : 0.f", "from[0] : 0.f"),
    M("sums for maxima", "which * static_cast<int>(p.heads)", "0 * static_cast<int>(p.heads)"),
    M("numbers of one step", "rows + (all - left)", "rows"),
    M("numbers of one head", "--head, rows += p.tokens", "--head", "groups"),
    M("numbers of the tile's start", "(work.tile.begin + work.first + lane)",
      "(work.tile.begin + lane)", "causal"),
    M("numbers in one place", "(which * S::kStep + lane) * 4", "lane * 4"),
    M("more steps than the producer's", "rest = all - work.steps * S::kStep",
      "rest = all - work.tile.length", "causal"),
    # ---- the barriers
    M("one follower is enough", "ptx::barrier_init(ready(i), 2);",
      "ptx::barrier_init(ready(i), 1);"),
    M("too few readers of a stage", "ptx::barrier_init(empty(i), S::kConsumerWarps);",
      "ptx::barrier_init(empty(i), S::kConsumerWarps / 2);", "rounds"),
    M("too many readers of resident rows",
      "ptx::barrier_init(resident_empty(), S::kConsumerWarps);",
      "ptx::barrier_init(resident_empty(), S::kConsumerWarps + 1);", "rounds"),
    M("barriers unknown to TMA", "ptx::fence_barrier_init();", ""),
    M("no barrier after the barriers", "arena.init();\n  }\n  __syncthreads();",
      "arena.init();\n  }"),
    M("registers that are never given", "ptx::give_registers<S::kProducerRegisters>();", ""),
    M("one follower", "if (which == 0 || which == 1)", "if (which == 0)"),
    # ---- keys
    M("resident keys not waited for",
      "ptx::barrier_wait(arena.resident_full(), parity);\n    parity ^= 1;\n    if (work",
      "parity ^= 1;\n    if (work"),
    M("queries not waited for",
      "ptx::barrier_wait(arena.ready(ring.stage), ring.parity);\n      start_rows<Math, kDim, "
      "kTileRows, S::kStep>(s, keys", "start_rows<Math, kDim, kTileRows, S::kStep>(s, keys",
      quick=True),
    M("both warpgroups take the first keys",
      "keys = arena.resident(0) + consumer * 64 * S::kRowBytes", "keys = arena.resident(0)"),
    M("an idle warpgroup keeps the keys", "release(arena.resident_empty());\n#pragma", "#pragma",
      "idle"),
    M("an idle warpgroup counts one head", "i < work.heads * work.steps; ++i) pass();",
      "i < work.steps; ++i) pass();", "idle groups"),
    M("a warpgroup with some keys is idle",
      "if (work.tile.first + consumer * 64 >= work.tile.length)",
      "if (work.tile.first + consumer * 64 + 6 >= work.tile.length)", "one"),
    M("a step is skipped, and counted", "work.heads * (work.steps - skipped)",
      "work.heads * work.steps - skipped", "causal groups"),
    M("skipped once, not for each head", "        if (skipped) pass();\n", "", "causal groups"),
    M("first scores not finished",
      "start_scores();\n    ptx::wgmma_wait<0>();\n    ptx::wgmma_results(s);",
      "start_scores();\n    ptx::wgmma_results(s);", "one"),
    M("dP not finished", "ptx::wgmma_wait<1>();\n      ptx::wgmma_results(ds);",
      "ptx::wgmma_wait<2>();\n      ptx::wgmma_results(ds);", "one"),
    M("scores not finished", "ptx::wgmma_wait<1>();  // for all but dK", "ptx::wgmma_wait<2>();",
      "one"),
    M("dK not finished", "ptx::wgmma_wait<0>();\n      ptx::wgmma_results(dv);",
      "ptx::wgmma_wait<1>();\n      ptx::wgmma_results(dv);", "rounds"),
    M("last dK not finished", "ptx::wgmma_wait<0>();\n    ptx::wgmma_results(dv);",
      "ptx::wgmma_wait<1>();\n    ptx::wgmma_results(dv);", "one"),
    M("stages never released", "ptx::wgmma_results(dk);\n      release(arena.empty(now));",
      "ptx::wgmma_results(dk);", "rounds"),
    M("queries released before dK", "start_scores();\n      start_columns",
      "start_scores();\n      release(arena.empty(now));\n      start_columns", "rounds"),
    M("dK from the next queries", "(dk, differences, arena.stream(0, now))",
      "(dk, differences, arena.stream(0, ring.stage))"),
    M("dV from the queries", "(dv, probabilities, arena.stream(1, ring.stage))",
      "(dv, probabilities, arena.stream(0, ring.stage))"),
    M("dV of dS", "pack<Math, S::kStep>(differences, ds);\n    };",
      "pack<Math, S::kStep>(probabilities, ds);\n    };"),
    M("no causal mask", "p.causal && query < work", "false && query < work", "causal"),
    M("a query's own key masked", "i % 2 < seen +", "i % 2 <= seen +", "causal"),
    M("rows' numbers swapped", "e % 2 ? log_sum.y : log_sum.x", "e % 2 ? log_sum.x : log_sum.y"),
    M("delta of the log of sums", "(S::kStep + n * 8 + lane % 4 * 2) * 4",
      "(n * 8 + lane % 4 * 2) * 4"),
    M("dv scaled", "one[1][2] = {{1.f, 1.f}}", "one[1][2] = {{p.scale, p.scale}}"),
    M("results staged in one place",
      "values = arena.resident(1) + consumer * 64 * S::kRowBytes;\n  const uint32_t staging = "
      "arena.staging() + warp_row * kPitch<kDim>;",
      "values = arena.resident(1) + consumer * 64 * S::kRowBytes;\n  const uint32_t staging = "
      "arena.staging();"),
    # ---- queries
    M("keys not waited for",
      "ptx::barrier_wait(arena.ready(ring.stage), ring.parity);\n      start_rows<Math, kDim, "
      "kTileRows, S::kStep>(s, queries", "start_rows<Math, kDim, kTileRows, S::kStep>(s, queries"),
    M("dP from the keys", "(ds, douts, arena.stream(1, now))", "(ds, douts, arena.stream(0, now))"),
    M("dP of queries not finished", "ptx::wgmma_wait<1>();  // for dP", "ptx::wgmma_wait<2>();"),
    M("scores of queries not finished", "ptx::wgmma_wait<1>();  // for the scores",
      "ptx::wgmma_wait<2>();", quick=True),
    M("dQ not finished", "ptx::wgmma_wait<0>();\n        ptx::wgmma_results(dq);",
      "ptx::wgmma_wait<1>();\n        ptx::wgmma_results(dq);", "rounds"),
    M("dQ from the values", "(dq, differences, arena.stream(0, now))",
      "(dq, differences, arena.stream(1, now))"),
    M("a step too few if causal", "first_row / S::kStep + 1", "first_row / S::kStep", "causal"),
    M("steps that pass are kept", "int i = steps; i < work.steps", "int i = steps; i < steps",
      "causal rounds"),
    M("an idle warpgroup keeps the queries",
      "} else {\n      release(arena.resident_empty());\n    }", "}", "idle"),
    M("keys past the segment", " : work.tile.length) - key;", " : 1 << 20) - key;", "low"),
    M("a key too many if causal", "min(query + 1, work", "min(query + 2, work", "causal"),
    M("delta of the other row", "delta[e % 4 / 2]", "delta[1 - e % 4 / 2]"),
    M("sign of the scale",
      "douts = arena.resident(1) + consumer * 64 * S::kRowBytes;\n  const uint32_t staging = "
      "arena.staging() + warp_row * kPitch<kDim>;\n  const float exponent = p.scale < 0.f ? "
      "-exponent_of(p.scale)",
      "douts = arena.resident(1) + consumer * 64 * S::kRowBytes;\n  const uint32_t staging = "
      "arena.staging() + warp_row * kPitch<kDim>;\n  const float exponent = p.scale < 0.f ? "
      "exponent_of(p.scale)", "negative"),
    # ---- the launch
    M("values for dout", "{p.q, params.backward.dout, p.k", "{p.q, p.v, p.k"),
    M("key heads for query heads", "i < 2 ? p.heads : p.kv_heads", "p.kv_heads", "groups"),
    M("large boxes for the stream", "make_map<kDim, S::kStep>", "make_map<kDim, kTileRows>"),
    M("no sums of rows", "row_sums<Math, kDim>, (p.tokens + kSumRows - 1)",
      "row_sums<Math, kDim>, (p.tokens)"),
    # ---- what it shares with the forward
    M("depth's chunks of another tile", "chunk * HopperTile<kDim, kRowsB>::kChunkBytes",
      "chunk * HopperTile<kDim, kRowsA>::kChunkBytes", file=HOPPER_SHARED),
    M("scores added to the old", ", d > 0);", ", true);", file=HOPPER_SHARED),
    M("operands' halves exchanged", "blocks_of<kColumns>(c), n * 2)", "blocks_of<kColumns>(c), n)",
      file=HOPPER_SHARED),
    M("store past the segment", "const bool inside = row < length;\n    ptx::store(",
      "const bool inside = row <= length;\n    ptx::store(", "neighbours", file=SHARED),
]  # fmt: skip
