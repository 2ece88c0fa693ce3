"""Mutants of attention on AMX tiles, and of what stands in for the tile instructions."""

from __future__ import annotations

from functools import partial

from tests.cuda.mutants.mutant import Mutant

I = partial(Mutant, "instructions")  # noqa: E741
A = partial(Mutant, "attention")

#: In the order of their numbers in a build, from 1 on.
MUTANTS = [
    # ---- the stand-in
    I("load without its stride", "tile-load-row", "static_cast<const char*>(rows) + i * 64"),
    I("store without its stride", "tile-store-row", "static_cast<char*>(rows) + i * 64"),
    I("small results kept", "tile-dot-mode", "_mm_setcsr(kMasked | kDenormalsAreZero);"),
    I("small operands kept", "tile-dot-mode", "_mm_setcsr(kMasked | kFlushToZero);"),
    I("rounded towards zero", "tile-dot-mode", "_mm_setcsr(kMasked | 0xe040);"),
    I("products rounded", "tile-dot-fma", "high = upper(x) * upper(y) + high;"),
    I("upper elements twice", "tile-dot-fma", "high = fma(upper(x), upper(x), high);"),
    I("chains added one by one", "tile-dot-sum", "store(c[i], load(c[i]) + low + high);"),
    I("C forgotten", "tile-dot-sum", "store(c[i], low + high);"),
    I("mode kept", "tile-dot-restore", ""),
    # ---- products
    A("never from zero", "tile-gemm-start", "false"),
    A("always from zero", "tile-gemm-start", "true"),
    A("last step of the depth", "tile-gemm-depth", "k + kTile < g.depth"),
    A("left operand's depth", "tile-gemm-left", "g.a + row * g.lda"),
    A("left operand's rows", "tile-gemm-left", "g.a + k"),
    A("right operand's depth", "tile-gemm-right", "g.b + column"),
    A("right operand's columns", "tile-gemm-right", "g.b + k * g.ldb"),
    A("second columns", "tile-gemm-second-columns", "tile_load<7>(b, ldb);"),
    A("second rows", "tile-gemm-second-rows", "tile_load<5>(a, lda);"),
    A("dot 1", "tile-gemm-dot-1", "tile_dot<1, 4, 6>();"),
    A("dot 2", "tile-gemm-dot-2", "tile_dot<2, 4, 6>();"),
    A("dot 3", "tile-gemm-dot-3", "if (kColumns == 2) tile_dot<3, 5, 6>();"),
    A("store 1", "tile-gemm-store-1", ""),
    A("store 2", "tile-gemm-store-2", "if (kRows == 2) tile_store<2>(c(0, 0), ldc);"),
    A("odd columns", "tile-gemm-last-column", "false"),
    A("odd rows", "tile-gemm-last-row", "false"),
    A("not scaled", "tile-gemm-scale", ""),
    A("scaled by the first lanes", "tile-gemm-scale",
      "store(c, load(c) * load(g.row_scale));"),
    A("sum not continued", "tile-gemm-add", "Start::kZero"),
    # ---- panels
    A("an element behind the row", "pack-row-left", "dim - d + 1"),
    A("an element short", "pack-row-left", "dim - d - 1"),
    A("lanes behind the queries", "pack-lanes-tokens", "i < n"),
    A("the last pairs", "pack-lanes-pairs", "d < dim / 2 - 15"),
    A("a token behind the segment", "pack-pairs-token",
      "token <= n ? _mm256_maskz_loadu_epi16(mask, rows[token] + d) : _mm256_setzero_si256()"),
    A("rows behind the queries", "pack-depth-tokens", "i < n"),
    A("all in the first block", "pack-transposed-block", "dst + i % kBlock / 2"),
    A("both halves of a block in the first", "pack-transposed-block",
      "dst + i / kBlock * pairs * ld"),
    A("the next tokens again", "pack-transposed-load",
      "_mm512_castsi512_ps(load_pairs(rows, n, i + j, d, dim))"),
    A("rotated rows too close", "rotary-stride", "padded(p.head_dim)"),
    # ---- softmax
    A("probabilities behind the keys", "forward-clear", ""),
    A("gradients behind the keys", "backward-clear", ""),
    A("half a tile cleared", "clear-rows", "i % 8 != 0"),
    A("queries behind the last", "backward-lanes", "vectors_of(queries)"),
    A("heads of a shared dq overlap", "shared-dq",
      "shared.dq + (head * item.length + q0) * padded(p.head_dim)"),
]  # fmt: skip
