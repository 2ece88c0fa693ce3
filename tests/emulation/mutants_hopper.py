"""Planted bugs in tiled attention's forward for Hopper, each behind a switch; see mutants.py."""

from __future__ import annotations

from .build import Mutant

_H, _C = "attention_flash_hopper.cu", "attention_flash_choice.cu"
_S, _G, _T = "attention_hopper.cuh", "attention_flash_hopper_backward.cu", "attention_tiles.cuh"


def _left_out(name: str, statement: str, anchor: str = "") -> Mutant:
    return Mutant(name, _H, statement, ";", anchor)


_VALUES = "start_columns<Math, kDim, S::kKeys>(out, probabilities, arena.values(value.stage));"
_SCORES = "start_rows<Math, kDim, kTileRows, S::kKeys>(s, queries, arena.keys(key.stage));"
_KEYS_WAIT = "ptx::barrier_wait(arena.keys_full(key.stage), key.parity);"
_VALUES_WAIT = "ptx::barrier_wait(arena.values_full(value.stage), value.parity);"

HOPPER_MUTANTS = [
    # ---- the producer
    Mutant("hopper: fewer bytes announced", _H, "S::kTileBytes", "S::kTileBytes - 16",
           "barrier_arrive_expect(full, S::kTileBytes)"),
    Mutant("hopper: always the first columns", _S, "c * R::kChunk", "0",
           "full, c * R::kChunk, head"),
    Mutant("hopper: chunks in one place", _S, "to + c * HopperTile<kDim, kRows>::kChunkBytes",
           "to"),
    _left_out("hopper: keys overwritten early",
              "ptx::barrier_wait(arena.keys_empty(key.stage), key.parity ^ 1);"),
    _left_out("hopper: values overwritten early",
              "ptx::barrier_wait(arena.values_empty(value.stage), value.parity ^ 1);"),
    _left_out("hopper: queries overwritten early",
              "ptx::barrier_wait(arena.queries_empty(), parity ^ 1);"),
    Mutant("hopper: values of the wrong block", _H, "(block - 1) * S::kKeys", "block * S::kKeys",
           "begin + (block - 1) * S::kKeys"),
    Mutant("hopper: wrong key head", _H, "work.head / group", "work.head % group"),
    # ---- the warp that cleans
    Mutant("hopper: one row too few is cleaned", _H, "(block - 1) * S::kKeys",
           "((block - 1) * S::kKeys - 1)", "work.tile.length - (block - 1) * S::kKeys"),
    Mutant("hopper: one row too many is cleaned", _H, "work.tile.length", "work.tile.length - 1",
           "from = (work.tile.length - (block"),
    Mutant("hopper: no sign", _H, "params.forward.scale < 0.f", "false"),
    Mutant("hopper: values past the segment stay", _H, "block == work.blocks && work.ragged",
           "false"),
    _left_out("hopper: no fence after zeros", "ptx::fence_async_proxy();",
              "ptx::fence_async_proxy();\n      }\n      __syncwarp();"),
    _left_out("hopper: no fence after the sign", "ptx::fence_async_proxy();",
              "ptx::fence_async_proxy();\n    }\n    __syncwarp();"),
    # Only here: the interpreter takes the lanes of a warp as ordered.
    _left_out("hopper: lanes still write zeros", "__syncwarp();",
              "ptx::fence_async_proxy();\n      }\n      __syncwarp();"),
    _left_out("hopper: lanes still change the sign", "__syncwarp();",
              "ptx::fence_async_proxy();\n    }\n    __syncwarp();"),
    _left_out("hopper: cleaner does not wait", _VALUES_WAIT,
              f"{_VALUES_WAIT}\n      if (block == "),
    Mutant("hopper: cleaner's phase of queries", _H, "parity", "parity ^ 1",
           "ptx::barrier_wait(arena.queries_full(), parity)"),
    # ---- the consumers
    _left_out("hopper: zeros not waited for",
              "if (work.ragged) ptx::barrier_wait(arena.values_clean(value.stage), value.parity);"),
    Mutant("hopper: the sign not waited for", _H,
           "p.scale < 0.f ? arena.queries_clean() : arena.queries_full()",
           "arena.queries_full()"),
    _left_out("hopper: queries not waited for", "ptx::barrier_wait(queries_ready, parity);",
              f"ptx::barrier_wait(queries_ready, parity);\n    {_KEYS_WAIT}"),
    _left_out("hopper: first keys not waited for", _KEYS_WAIT, f"{_KEYS_WAIT}\n    start_rows"),
    _left_out("hopper: keys not waited for", _KEYS_WAIT, f"{_KEYS_WAIT}\n      ptx::named"),
    _left_out("hopper: values not waited for", _VALUES_WAIT,
              f"{_VALUES_WAIT}\n      start_columns"),
    _left_out("hopper: first scores not finished", "ptx::wgmma_wait<0>();",
              f"{_SCORES}\n    ptx::wgmma_wait<0>();"),
    Mutant("hopper: scores not finished", _H, "ptx::wgmma_wait<1>();", "ptx::wgmma_wait<2>();"),
    _left_out("hopper: results not finished", "ptx::wgmma_wait<0>();",
              "softmax(block);\n      ptx::wgmma_wait<0>();"),
    _left_out("hopper: last results not finished", "ptx::wgmma_wait<0>();",
              f"{_VALUES}\n    ptx::wgmma_wait<0>();"),
    Mutant("hopper: probabilities change under way", _H, "softmax(block);",
           "softmax(block); pack<Math, S::kKeys>(probabilities, s);",
           "softmax(block);\n      ptx::wgmma_wait<0>();"),
    Mutant("hopper: values released too early", _H, _VALUES,
           f"release(arena.values_empty(value.stage)); {_VALUES}", f"{_VALUES}\n      ptx::named"),
    _left_out("hopper: keys never released", "release(arena.keys_empty(key.stage));",
              "release(arena.keys_empty(key.stage));\n      key.advance();\n      softmax(block);"),
    Mutant("hopper: every lane releases", _S, "threadIdx.x % kWarpSize == 0", "true"),
    Mutant("hopper: phase does not turn", _S, "parity ^= 1", "parity ^= 0",
           "stage = 0, parity ^= 1"),
    Mutant("hopper: always the first keys", _H, "key.stage", "0",
           "arena.keys(key.stage));\n      ptx::barrier_wait"),
    _left_out("hopper: queries never released", "release(arena.queries_empty());",
              "release(arena.queries_empty());\n    parity ^= 1;\n    //"),
    _left_out("hopper: an idle warpgroup keeps values", "release(arena.values_empty(value.stage));",
              "release(arena.values_empty(value.stage));\n        value.advance();\n      }\n"
              "      work = next;"),
    _left_out("hopper: an idle warpgroup keeps its turn",
              "ptx::named_barrier_arrive(kTurn + 1 - consumer, kPlayers);",
              "ptx::named_barrier_arrive(kTurn + 1 - consumer, kPlayers);\n        }"),
    Mutant("hopper: a warpgroup with one query is idle", _H, "work.tile.first + consumer * 64",
           "work.tile.first + consumer * 64 + 1"),
    Mutant("hopper: no fence before scores", _S, "ptx::wgmma_fence();", ";",
           "(b_rows);\n  ptx::wgmma_fence();"),
    Mutant("hopper: no fence before values", _S, "ptx::wgmma_fence();", ";",
           "ptx::wgmma_results(c);\n  ptx::wgmma_fence();"),
    Mutant("hopper: half the depth", _S, "d < R::kDepth", "d < R::kDepth / 2"),
    Mutant("hopper: scores added to the old", _S, "d > 0", "true"),
    Mutant("hopper: half a step of keys", _S, "n * R::kRowBytes", "n * R::kRowBytes / 2",
           "b + n * R::kRowBytes"),
    Mutant("hopper: all take the first queries", _H,
           "arena.queries() + consumer * 64 * S::kRowBytes", "arena.queries()"),
    Mutant("hopper: keys past the segment", _H, "work.ragged", "false",
           "block + 1 == work.blocks && (work.ragged || p.causal)"),
    Mutant("hopper: no causal mask", _H, "p.causal", "false",
           "block + 1 == work.blocks && (work.ragged || p.causal)"),
    Mutant("hopper: mask of the wrong block", _H, "block + 1 == work.blocks",
           "block == work.blocks"),
    Mutant("hopper: results staged in one place", _H, "warp_row * kPitch<kDim>", "0",
           "arena.staging() + warp_row * kPitch<kDim>"),
    Mutant("hopper: sums not corrected", _H, "sum[r] * correction[r]", "sum[r]"),
    Mutant("hopper: rows' corrections swapped", _H, "correction[i % 4 / 2]",
           "correction[1 - i % 4 / 2]"),
    # ---- turns, barriers, registers, the order of the work
    _left_out("hopper: nobody has the first turn",
              "if (consumer == 1) ptx::named_barrier_arrive(kTurn, kPlayers);"),
    Mutant("hopper: the turn is kept", _H, "kTurn + 1 - consumer", "kTurn + consumer",
           "named_barrier_arrive(kTurn + 1 - consumer, kPlayers);\n      ptx::wgmma"),
    Mutant("hopper: too few readers of values", _H, "kWarps + 1", "kWarps",
           "values_empty(i), kWarps + 1"),
    Mutant("hopper: too many readers of keys", _H, "kWarps", "kWarps + 1",
           "keys_empty(i), kWarps)"),
    _left_out("hopper: barriers unknown to TMA", "ptx::fence_barrier_init();"),
    _left_out("hopper: no barrier after the barriers", "__syncthreads();",
              "arena.init();\n  }\n  __syncthreads();"),
    _left_out("hopper: registers never given", "ptx::give_registers<S::kProducerRegisters>();"),
    Mutant("hopper: a block skips a tile", _S, "gridDim.x - 1 - blockIdx.x",
           "gridDim.x - blockIdx.x"),
    # ---- the launch
    Mutant("hopper: strides in elements", _S, "token_stride * 2", "token_stride",
           "cuuint64_t(token_stride * 2)"),
    Mutant("hopper: a token past the end", _S, "tokens", "tokens + 1", "cuuint64_t(tokens)}"),
]  # fmt: skip

#: What test_hopper_attention.py notices.
CHOICE_MUTANTS = [
    Mutant("choice: any GPU", _C, "capability == 90", "true"),
    Mutant("choice: a stride of 0", _C, "stride > 0", "stride >= 0"),
    Mutant("choice: a stride of 8 bytes", _C, "stride % 8", "stride % 4"),
    Mutant("choice: any stride", _C, "stride < int64_t{1} << 39", "true"),
    Mutant("choice: any address", _C, "reinterpret_cast<uintptr_t>(x.data) % 16", "0"),
    Mutant("choice: one head must have a stride", _C, "size == 1", "false"),
    Mutant("choice: values not looked at", _C, "describes(p.v, p.tokens, p.kv_heads)", "true"),
    Mutant("choice: dout not looked at", _C,
           "describes(p.dout, p.forward.tokens, p.forward.heads)", "true"),
]  # fmt: skip

#: Of vision_attention on compute capability 9.0: what test_kernels.py's cases notice.
TURN_MUTANTS = [
    Mutant("choice: queries as they were", _C,
           "turned.forward.q = turned_rows(f, p.turned_queries);", ";"),
    Mutant("choice: keys as they were", _C, "turned.forward.k = turned_rows(f, p.turned);", ";"),
    Mutant("choice: queries as they were, backward", _C,
           "turned.backward.forward.q = turned_rows(f, p.turned_queries);", ";"),
    Mutant("choice: keys as they were, backward", _C,
           "turned.backward.forward.k = turned_rows(f, p.turned);", ";"),
    Mutant("choice: keys turned over queries", _C, "keys", "queries", "p.k, keys, stream"),
    Mutant("choice: keys for queries", _C, "p.q", "p.k", "p.q, queries, stream"),
    Mutant("choice: workspace not needed", _C, "p.turned_queries == nullptr", "false",
           "p.turned_queries == nullptr || !hopper_takes("),
    Mutant("choice: workspace not needed, backward", _C, "p.turned_queries == nullptr", "false",
           "p.turned_queries == nullptr || !hopper_takes_gradients("),
    Mutant("choice: workspace not used", _C, "!hopper_takes(turned.forward, capability)", "true"),
    Mutant("choice: workspace not used, backward", _C,
           "!hopper_takes_gradients(turned.backward, capability)", "true"),
    Mutant("gradients: dk not turned back", _G, "p.rotary != nullptr", "false",
           "if (p.rotary != nullptr) {\n      store_rows_back<Math, kDim>(blocks_of<kDim>(dk)"),
    Mutant("gradients: dq not turned back", _G, "p.rotary != nullptr", "false",
           "if (p.rotary != nullptr) {\n      store_rows_back<Math, kDim>(blocks_of<kDim>(dq)"),
    Mutant("gradients: dk back by the first key's angles", _G, "token", "work.tile.begin",
           "p.rotary, token,\n                                  rows_of(to_dk"),
    Mutant("gradients: dq back by the first query's angles", _G, "token", "work.tile.begin",
           "p.rotary, token,\n                                  rows_of(to, "),
    Mutant("gradients: lanes left over turn too", _T, "index >= kAll", "false"),
]  # fmt: skip
