"""Planted bugs, all of a source built into one library, each behind a switch.

Run on the checks of tests/ptxsim; test_mutants.py asks that each be noticed. Bugs inside
primitives.cuh are not among them: that file is replaced here, tests/ptxsim looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptxsim.ptxtypes import SimError

from .build import Mutant
from .device import EmulatedKernels
from .mutants_hopper import HOPPER_MUTANTS
from .mutants_hopper_backward import HOPPER_GRAD_MUTANTS

_W, _R, _E = "attention_window.cuh", "attention_rows.cuh", "embedding.cu"
_T, _F, _B = "attention_tiles.cuh", "attention_flash.cuh", "attention_flash_backward.cuh"
_V = "attention_flash_vision.cu"

WINDOW_MUTANTS = [
    Mutant("keys beyond the window", _W, "key < length && (!p.causal || key <= row + e / 2 * 8)",
           "!p.causal || key <= row + e / 2 * 8"),
    Mutant("rows read past the window", _W,
           "ptx::copy_async(tile + row * S::kPitch + unit * 16,\n"
           "                    from + rows.of(inside ? row : 0) * x.token_stride + unit * 8, "
           "inside);",
           "ptx::copy_async(tile + row * S::kPitch + unit * 16, "
           "from + row * x.token_stride + unit * 8, true);"),
    Mutant("values not waited for", _W, "ptx::wait_copies<0>();", ";",
           "ptx::wait_copies<0>();\n  __syncthreads();\n  float out"),
    Mutant("no barrier before values", _W, "__syncthreads();", ";",
           "__syncthreads();\n  float out"),
    Mutant("no barrier before keys", _W, "__syncthreads();", ";",
           "ptx::wait_copies<1>();\n  }\n  __syncthreads();"),
    Mutant("one group too few", _W, "ptx::wait_copies<1>();", "ptx::wait_copies<2>();",
           "} else {\n    ptx::wait_copies<1>();"),
    Mutant("maximum over half a row", _W, "top[r] = fmaxf(top[r], ptx::exchange(top[r], 2));", ";"),
    Mutant("sum over half a row", _W, "sum[r] += ptx::exchange(sum[r], 1);", ";"),
    Mutant("exchange by some lanes", _W, "sum[r] += ptx::exchange(sum[r], 2);",
           "if (row < length) sum[r] += ptx::exchange(sum[r], 2);"),
    Mutant("sign of the scale", _W, "s[n][e] * scale.sign", "s[n][e]",
           "s[n][e] * scale.sign : -INFINITY"),
    Mutant("natural exponent", _W, "fabsf(scale) * 1.44269504f", "fabsf(scale)"),
    Mutant("operand halves swapped", _W,
           "a[1] = Math::pack(c0[2], c0[3]);\n  a[2] = Math::pack(c1[0], c1[1]);",
           "a[2] = Math::pack(c0[2], c0[3]); a[1] = Math::pack(c1[0], c1[1]);"),
    Mutant("statistics of another window", _W, "head * p.tokens + window.begin + row + r * 8",
           "head * p.tokens + row + r * 8"),
    Mutant("dS not awaited", _W, "__syncthreads();", ";", "__syncthreads();  // dS is whole"),
    Mutant("next head too early", _W, "__syncthreads();", ";",
           "__syncthreads();  // before the next head"),
    Mutant("delta left out", _W, "dp[n][e] - delta[query]", "dp[n][e]"),
    Mutant("delta of half a row", _W, "sum + ptx::exchange(sum, 1)", "sum"),
    Mutant("statistics of 8 rows twice", _W, "first + lane / 2", "first + lane / 4"),
    Mutant("keys beyond the window, backward", _W, "mine < length && (!p.causal || mine <= query)",
           "!p.causal || mine <= query"),
    Mutant("wrong key head", _W, "head / (p.heads / p.kv_heads)", "head % p.kv_heads"),
    Mutant("store past the window", _W, "r < length", "r <= length",
           "const bool inside = r < length;\n    ptx::store"),
    Mutant("second part of dq at the first's place", _W, "column * 2", "0",
           "load_shared(tile + r * kPitch + column * 2"),
    Mutant("staged over rows still read", _W, "__syncwarp();", ";",
           "__syncwarp();\n#pragma unroll\n  for (int n = 0; n < kColumns; ++n) {\n    const"),
    Mutant("staged rows read too early", _W, "__syncwarp();", ";",
           "__syncwarp();\n}"),
    Mutant("staged in another warp's rows", _W, "tile + (row + lane / 4) * kPitch",
           "tile + (row / 32 * 32 + lane / 4) * kPitch"),
    Mutant("values not transposed", _W,
           "ptx::load_matrices_transposed(right, a_piece<kPitch>(b, row, column + n * 8));",
           "ptx::load_matrices(right, a_piece<kPitch>(b, row, column + n * 8));"),
    Mutant("shared memory for two tiles", _W, "S::kForwardShared", "2 * S::kTile",
           "S::kForwardShared + Rows"),
    Mutant("first head only", _W, "p.forward.segments * p.forward.heads", "p.forward.segments"),
]  # fmt: skip

#: Of what vision_attention adds.
VISION_MUTANTS = [
    Mutant("place for token", _R, "p.order[window.begin + row]",
           "static_cast<int>(window.begin) + row"),
    Mutant("order of another window", _R, "static_cast<int>(window.begin) + row", "row",
           "int token = static_cast<int>(window.begin) + row"),
    Mutant("tokens not awaited", _R, "__syncthreads();", ";",
           "[row] = token;\n    }\n    __syncthreads();"),
    Mutant("angles of the place", _W, "rows.of(on ? row : 0)", "(on ? row : 0)"),
    Mutant("turned the other way", _R, "x2[e] * s", "-x2[e] * s", "y1[e] = x1[e] * c - x2[e] * s"),
    Mutant("gradients not turned back", _R, "-__uint_as_float(sines[2 * w + e])",
           "__uint_as_float(sines[2 * w + e])"),
    Mutant("sines for cosines", _R, "at + kDim / 8 + i", "at + i"),
    Mutant("other columns' angles", _W, "index % kPairs * 8", "index % kPairs * 4"),
    Mutant("turned before all has come", _W, "__syncthreads();", ";",
           "__syncthreads();  // queries and keys are there, to be turned\n    turns"),
    Mutant("keys not turned", _W, "turns.template apply<Math>(keys);", ";",
           "turns.template apply<Math>(keys);\n  } else"),
    Mutant("keys not turned, backward", _W, "turns.template apply<Math>(keys);", ";",
           "turns.template apply<Math>(keys);  // once"),
    Mutant("half a row written", _W, "ptx::store(to + kPairs, b, inside);", ";"),
    Mutant("gradients past the window", _W, "r < length", "r <= length",
           "const bool inside = r < length;\n    const int token"),
    Mutant("no room for the tokens", _W, "Rows::kShared * kKeys", "0",
           "S::kForwardShared + Rows::kShared * kKeys"),
]  # fmt: skip

#: Of tiled attention. tests/ptxsim/flash_mutants.py has more, of which many change no statement.
FLASH_MUTANTS = [
    Mutant("tiles: keys not awaited", _F, "ptx::wait_copies<0>();", ";"),
    Mutant("tiles: no barrier before keys", _F, "__syncthreads();", ";",
           "__syncthreads();  // this block of keys is here"),
    Mutant("tiles: next keys to the same buffer", _F, "(stage ^ 1)", "stage"),
    Mutant("tiles: next keys are the first", _F, "next * p.k.token_stride", "0",
           "keys + next * p.k.token_stride"),
    Mutant("tiles: keys past the segment", _F, "next > tile.length", "false"),
    Mutant("tiles: mask one key too late", _T, "min(mine + 1, length)", "min(mine + 2, length)"),
    Mutant("tiles: causal warps leave too early", _F, "key >= first + S::kBlocks * 16",
           "key >= first"),
    Mutant("tiles: sums not corrected", _F, "sum[m][r] * correction + part", "sum[m][r] + part"),
    Mutant("tiles: maximum over half a row", _F,
           "highest = fmaxf(highest, ptx::exchange(highest, 2));", ";"),
    Mutant("tiles: statistics of the wrong head", _F, "head * p.tokens + tile.begin + query",
           "kv_head * p.tokens + tile.begin + query"),
    Mutant("tiles: no barrier before queries", _B, "__syncthreads();", ";",
           "__syncthreads();  // these queries are here"),
    Mutant("tiles: no barrier before keys, backward", _B, "__syncthreads();", ";",
           "__syncthreads();  // this block of keys is here"),
    Mutant("tiles: first head of the group only", _B, "kv_head * group + head",
           "kv_head * group", "kv_head * group + head, query);"),
    Mutant("tiles: delta left out of dk", _B, "(e % 2 ? delta.y : delta.x)", "0.f"),
    Mutant("tiles: delta left out of dq", _B, "delta[m][e / 2]", "0.f",
           "(ds[m][n][e] - delta[m][e / 2])"),
    Mutant("tiles: sums of half a row", _B, "sum += ptx::exchange(sum, 2);", ";"),
    Mutant("tiles: keys past the segment, backward", _B, "after > tile.length", "false"),
    Mutant("tiles: rows read past the segment", _T, "row + i < length", "true",
           "source, row + i < length);"),
    Mutant("tiles: store past the segment", _T, "row < length", "row <= length",
           "const bool inside = row < length;\n    ptx::store("),
    Mutant("tiles: shortest first", _T, "work < kBuckets ? kBuckets - work : 0",
           "work < kBuckets ? work : 0"),
    Mutant("tiles: the list's end unwritten", _T, "i < total", "i < used",
           "i = used + threadIdx.x; i < total"),
    Mutant("tiles: scan without its own", _T, "before -= sum;", ";"),
    Mutant("tiles: natural exponent", _T, "1.44269504f", "1.f"),
]  # fmt: skip

#: Of VISION_MUTANTS: in what turns a row, which tiled attention shares.
TURN_MUTANTS = [
    m
    for m in VISION_MUTANTS
    if m.name in ("turned the other way", "gradients not turned back", "sines for cosines")
]

#: Of what vision_attention adds to tiled attention.
FLASH_VISION_MUTANTS = [
    Mutant("turned tiles: queries as they were", _F, "turns.template apply<Math, false>(mine);",
           ";"),
    Mutant("turned tiles: queries turned twice", _V, "turned.backward.forward.q = f.q;",
           "turned.backward.forward.k = f.q;"),
    Mutant("turned tiles: queries not awaited", _F, "ptx::wait_copies<1>();", ";"),
    Mutant("turned tiles: other warps' copies not awaited", _F, "__syncthreads();", ";",
           "__syncthreads();  // the queries are here, to be turned"),
    Mutant("turned tiles: angles of the first tile", _F, "tile.begin + first",
           "tile.begin + warp_row", "turns.load(p.rotary, tile.begin + first"),
    Mutant("turned tiles: values of the first head", _F, "rows_of(p.v, tile.begin, kv_head)",
           "rows_of(p.v, tile.begin, 0)"),
    Mutant("turned tiles: keys as they were, backward", _B,
           "turns.template apply<Math, false>(my_keys);", ";"),
    Mutant("turned tiles: queries as they were, backward", _B,
           "turns.template apply<Math, false>(my_queries);", ";"),
    Mutant("turned tiles: keys not awaited, backward", _B, "ptx::wait_copies<1>();", ";",
           "ptx::wait_copies<1>();\n    __syncthreads();  // the keys"),
    Mutant("turned tiles: other warps' keys not awaited", _B, "__syncthreads();", ";",
           "__syncthreads();  // the keys are here, to be turned"),
    Mutant("turned tiles: other warps' queries not awaited", _B, "__syncthreads();", ";",
           "__syncthreads();  // the queries are here, to be turned"),
    Mutant("turned tiles: dk back by the first key's angles", _B, "token", "tile.begin",
           "p.rotary, token,\n                                rows_of(to_dk,"),
    Mutant("turned tiles: dq back by the first query's angles", _B, "token", "tile.begin",
           "p.rotary, token,\n                                rows_of(dq"),
    Mutant("turned tiles: gradients not turned back", _T,
           "turns.template apply<Math, true>(rows);", ";"),
    Mutant("turned tiles: written before turned back", _T, "__syncwarp();", ";",
           "__syncwarp();\n  write_rows"),
    Mutant("turned tiles: turned back before staged", _T, "__syncwarp();", ";",
           "__syncwarp();\n}\n\n// Writes kRows staged rows"),
    Mutant("turned tiles: first half twice", _T, "ptx::load_shared(at + kDim, b);",
           "ptx::load_shared(at, b);"),
    Mutant("turned tiles: second half over the first", _T, "at + kDim", "at",
           "ptx::store_shared(at + kDim, b)"),
    Mutant("turned tiles: one token's angles", _T, "token + row", "token",
           "(table, token + row, index"),
    Mutant("turned tiles: other columns' angles", _T, "index % kPairs * kColumns",
           "index % kPairs * 4", "token + row, index % kPairs * kColumns"),
    Mutant("turned tiles: angles past the segment", _T, "row < length", "true",
           "on = row < length &&"),
    Mutant("turn_rows: turned twice", _V, "turn.template apply<Math, false>(a[h], b[h]);",
           "turn.template apply<Math, false>(a[h], b[h]);"
           " turn.template apply<Math, false>(a[h], b[h]);"),
    Mutant("turn_rows: half a row", _V,
           "ptx::store(reinterpret_cast<Unit*>(to + kDim / 2), b[h], on);", ";"),
    Mutant("turn_rows: heads past the last", _V, "inside && head + h < p.heads", "inside",
           "inside && head + h < p.heads;\n    turn.template"),
    Mutant("turn_rows: first heads only", _V, "blockIdx.x % groups * kTurnHeads",
           "blockIdx.x % groups"),
    Mutant("turn_rows: tokens past the last", _V, "token < p.tokens", "true"),
    Mutant("turn_rows: threads left over turn too", _V, "row < S::kTokens", "true",
           "inside = row < S::kTokens"),
    Mutant("turn_rows: angles of the block's first tokens", _V, "token", "row",
           "p.rotary, token, column"),
    Mutant("turn_rows: heads overlap", _V, "turned = turned_rows(p, workspace);",
           "turned = turned_rows(p, workspace); turned.head_stride -= kDim;"),
    Mutant("turn_rows: last block missing", _V, "(p.tokens + kTokens - 1) / kTokens",
           "p.tokens / kTokens"),
    Mutant("turn_rows: keys for queries", _V, "f.q", "f.k", "<Math, kDim>(f, f.q"),
]  # fmt: skip

EMBEDDING_MUTANTS = [
    Mutant("one row too many", _E, "rows - first", "rows - first + 1", "rows - first;"),
    Mutant("rows of a warp overlap", _E, "kRowsPerWarp", "3", "kWarpSize) * kRowsPerWarp;"),
    Mutant("load past the row", _E, "c < units", "c <= units", "nullptr && c < units);"),
    Mutant("store past the row", _E, "c < units", "c <= units", "k, c, c < units);"),
    Mutant("null source is read", _E, "from != nullptr", "true", "from != nullptr && c"),
    Mutant("one row for all", _E, "ptx::broadcast(mine, k)", "ptx::broadcast(mine, 0)"),
    Mutant("32-bit offset", _E, "index * visual_bytes",
           "static_cast<int32_t>(static_cast<uint32_t>(index) * "
           "static_cast<uint32_t>(visual_bytes))", "+ index * visual_bytes;"),
    Mutant("range start ignored", _E, "static_cast<uint64_t>(p.vocab_start)", "uint64_t{0}"),
    Mutant("range end off by one", _E, "row >= static_cast<uint64_t>(p.vocab_rows)",
           "row > static_cast<uint64_t>(p.vocab_rows)"),
    Mutant("row 0 taken for none", _E, "row < 0", "row <= 0", "row < 0 ? nullptr"),
    Mutant("position for row", _E, "static_cast<int>(i)", "static_cast<int>(position)",
           "static_cast<int>(i));"),
    Mutant("shard ignored", _E, "p.first + i", "i", "position = p.first + i;\n    const int32_t"),
    Mutant("sentinel not skipped", _E, "key >= p.vocab_rows", "key > p.vocab_rows"),
    Mutant("all entries start runs", _E, "p.keys[j - 1] == key", "false"),
    Mutant("run past the end", _E, "k + u < p.count", "true"),
    Mutant("runs not told apart", _E, "p.keys[k + u] == key", "true"),
    Mutant("same row again", _E, "p.order[k + u]", "p.order[k]"),
    Mutant("first tile only", _E, "kThreads", "0", "blockIdx.y) * kThreads"),
    Mutant("low half twice", _E, "words[w] >> 16", "words[w]"),
    Mutant("table's type for visual rows", _E, "p.visual_dtype", "p.table_dtype",
           "? p.visual_dtype : p"),
    Mutant("last block missing", _E, "(work + per_block - 1) / per_block", "work / per_block"),
    Mutant("16 bytes where 4 are aligned", _E, "bits % 16 == 0", "bits % 4 == 0"),
]  # fmt: skip

MUTANTS = [
    *WINDOW_MUTANTS,
    *VISION_MUTANTS,
    *FLASH_MUTANTS,
    *HOPPER_MUTANTS,
    *HOPPER_GRAD_MUTANTS,
    *FLASH_VISION_MUTANTS,
    *EMBEDDING_MUTANTS,
]  # number n is MUTANTS[n - 1]


def killed_by(
    suite: dict[str, Callable[..., Any]], kernels: EmulatedKernels, rng: np.random.Generator
) -> str | None:
    """The first check of the suite that fails, and how; None where all pass."""
    for name, check in suite.items():
        try:
            check(kernels, rng)
        except (SimError, AssertionError) as error:
            return f"{name}: {str(error).splitlines()[0][:150]}"
    return None
