"""Planted bugs in tiled attention's backward for Hopper, each behind a switch; see mutants.py.

tests/ptxsim/flash_hopper_grad_mutants.py has more, most of them wrong values.
"""

from __future__ import annotations

from .build import Mutant

_G = "attention_flash_hopper_backward.cu"


def _left_out(name: str, statement: str, anchor: str = "") -> Mutant:
    return Mutant(f"gradients: {name}", _G, statement, ";", anchor)


def _changed(name: str, text: str, new: str, anchor: str = "") -> Mutant:
    return Mutant(f"gradients: {name}", _G, text, new, anchor)


_FENCE = "ptx::fence_async_proxy();"
_READY = "ptx::barrier_wait(arena.ready(ring.stage), ring.parity);"
_DQ = "start_columns<Math, kDim, S::kStep>(dq, differences, arena.stream(0, now));"

HOPPER_GRAD_MUTANTS = [
    # ---- the producer
    _changed("fewer bytes announced", "2 * S::kStreamBytes", "S::kStreamBytes",
             "arena.full(ring.stage), 2 * S::kStreamBytes"),
    _changed("fewer resident bytes announced", "2 * S::kResidentBytes", "S::kResidentBytes",
             "arena.resident_full(), 2 * S::kResidentBytes"),
    _left_out("stages overwritten early",
              "ptx::barrier_wait(arena.empty(ring.stage), ring.parity ^ 1);",
              "ptx::barrier_wait(arena.empty(ring.stage), ring.parity ^ 1);\n"
              "        ptx::barrier_arrive_expect"),
    _left_out("resident rows overwritten early",
              "ptx::barrier_wait(arena.resident_empty(), parity ^ 1);"),
    # ---- the warps that follow
    _changed("rows past the segment stay", "left < S::kStep", "false", "if (left < S::kStep) {"),
    _changed("one row too few is zeroed", "S::kRowBytes", "S::kRowBytes + S::kRowBytes",
             "left * S::kRowBytes"),
    _changed("one tensor is zeroed", "arena.stream(which, ring.stage) + c * kChunkBytes",
             "arena.stream(0, ring.stage) + c * kChunkBytes"),
    _left_out("no fence after zeros", _FENCE),
    _left_out("followers do not wait", "ptx::barrier_wait(arena.full(ring.stage), ring.parity);"),
    _left_out("numbers overwritten early",
              "ptx::barrier_wait(arena.empty(ring.stage), ring.parity ^ 1);",
              "ptx::barrier_wait(arena.empty(ring.stage), ring.parity ^ 1);\n"
              "          ptx::store_shared"),
    _changed("numbers past the segment", "lane + kWarpSize < left", "true"),
    _changed("numbers of one head", "rows += p.tokens", "rows += 0"),
    # ---- the barriers
    _changed("one follower is enough", "2", "1", "ptx::barrier_init(ready(i), 2);"),
    _changed("too few readers of a stage", "S::kConsumerWarps", "S::kConsumerWarps - 1",
             "ptx::barrier_init(empty(i), S::kConsumerWarps);"),
    _changed("too many readers of resident rows", "S::kConsumerWarps", "S::kConsumerWarps + 1",
             "ptx::barrier_init(resident_empty(), S::kConsumerWarps);"),
    _left_out("barriers unknown to TMA", "ptx::fence_barrier_init();"),
    _left_out("no barrier after the barriers", "__syncthreads();"),
    _left_out("registers never given", "ptx::give_registers<S::kProducerRegisters>();"),
    # ---- keys
    _left_out("resident keys not waited for",
              "ptx::barrier_wait(arena.resident_full(), parity);",
              "ptx::barrier_wait(arena.resident_full(), parity);\n    parity ^= 1;\n    if (work"),
    _left_out("queries not waited for", _READY,
              f"{_READY}\n      start_rows<Math, kDim, kTileRows, S::kStep>(s, keys"),
    _left_out("an idle warpgroup keeps the keys", "release(arena.resident_empty());",
              "release(arena.resident_empty());\n#pragma"),
    _left_out("an idle warpgroup keeps queries", "release(arena.empty(ring.stage));",
              "release(arena.empty(ring.stage));\n      ring.advance();\n    };"),
    _changed("a warpgroup with one key is idle", "work.tile.first + consumer * 64",
             "work.tile.first + consumer * 64 + 1", "if (work.tile.first + consumer * 64 >="),
    _changed("a step is always skipped", "p.causal ? consumer : 0", "consumer",
             "skipped = p.causal ? consumer : 0"),
    _left_out("first scores not finished", "ptx::wgmma_wait<0>();",
              "ptx::wgmma_wait<0>();\n    ptx::wgmma_results(s);"),
    _left_out("dP not finished", "ptx::wgmma_wait<1>();",
              "ptx::wgmma_wait<1>();\n      ptx::wgmma_results(ds);"),
    _left_out("scores not finished", "ptx::wgmma_wait<1>();",
              "ptx::wgmma_wait<1>();  // for all but dK"),
    _left_out("dK not finished", "ptx::wgmma_wait<0>();",
              "ptx::wgmma_wait<0>();\n      ptx::wgmma_results(dv);"),
    _left_out("last dK not finished", "ptx::wgmma_wait<0>();",
              "ptx::wgmma_wait<0>();\n    ptx::wgmma_results(dv);"),
    _left_out("stages never released", "release(arena.empty(now));",
              "ptx::wgmma_results(dk);\n      release(arena.empty(now));"),
    _changed("a query's own key masked", "i / 4 * 8 + i % 2 < seen + i % 4 / 2 * 8",
             "i / 4 * 8 + i % 2 <= seen + i % 4 / 2 * 8"),
    _changed("no causal mask", "p.causal", "false", "if (p.causal && query <"),
    _changed("delta left out of dk", "(e % 2 ? delta.y : delta.x)", "0.f"),
    _changed("dk of the absolute scale", "p.scale", "fabsf(p.scale)", "p.scale}}, one"),
    # ---- queries
    _left_out("resident queries not waited for",
              "ptx::barrier_wait(arena.resident_full(), parity);",
              "ptx::barrier_wait(arena.resident_full(), parity);\n    parity ^= 1;\n    if (steps"),
    _left_out("keys not waited for", _READY,
              f"{_READY}\n      start_rows<Math, kDim, kTileRows, S::kStep>(s, queries"),
    _left_out("dP of queries not finished", "ptx::wgmma_wait<1>();",
              "ptx::wgmma_wait<1>();  // for dP"),
    _left_out("scores of queries not finished", "ptx::wgmma_wait<1>();",
              "ptx::wgmma_wait<1>();  // for the scores"),
    _left_out("dQ not finished", "ptx::wgmma_wait<0>();",
              "ptx::wgmma_wait<0>();\n        ptx::wgmma_results(dq);"),
    _left_out("last dQ not finished", "ptx::wgmma_wait<0>();",
              "ptx::wgmma_wait<0>();\n      ptx::wgmma_results(dq);"),
    _changed("keys released before dQ", "pack<Math, S::kStep>(differences, ds);",
             "pack<Math, S::kStep>(differences, ds); release(arena.empty(now));",
             f"pack<Math, S::kStep>(differences, ds);\n        {_DQ}"),
    _left_out("an idle warpgroup keeps the queries", "release(arena.resident_empty());",
              "} else {\n      release(arena.resident_empty());"),
    _changed("a step too few if causal", "first_row / S::kStep + 1", "first_row / S::kStep"),
    _changed("keys past the segment", "work.tile.length", "1 << 20",
             " : work.tile.length) - key;"),
    _changed("a key too many if causal", "query + 1", "query + 2", "min(query + 1, work"),
    _changed("sign of the scale", "p.scale < 0.f ? -exponent_of(p.scale) : exponent_of(p.scale)",
             "exponent_of(p.scale)",
             "const uint32_t douts = arena.resident(1) + consumer * 64 * S::kRowBytes;\n"
             "  const uint32_t staging = arena.staging() + warp_row * kPitch<kDim>;\n"
             "  const float exponent = "
             "p.scale < 0.f ? -exponent_of(p.scale) : exponent_of(p.scale)"),
]  # fmt: skip
