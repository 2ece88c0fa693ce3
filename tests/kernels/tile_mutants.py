"""Mutants of attention and products on AMX tiles, and of what stands in for their instructions."""

from __future__ import annotations

from functools import partial

from tests.cuda.mutants.mutant import Mutant

I = partial(Mutant, "instructions")  # noqa: E741
A = partial(Mutant, "attention")
P = partial(Mutant, "product")

#: In the order of their numbers in a build, from 1 on.
MUTANTS = [
    # ---- the stand-in
    I("load without its stride", "tile-load-row", "static_cast<const char*>(rows) + i * 64"),
    I("store without its stride", "tile-store-row", "static_cast<char*>(rows) + i * 64"),
    I("small results kept", "tile-dot-mode", "_mm_setcsr(kMasked | kDenormalsAreZero);"),
    I("small operands kept", "tile-dot-mode", "_mm_setcsr(kMasked | kFlushToZero);"),
    I("rounded towards zero", "tile-dot-mode", "_mm_setcsr(kMasked | 0xe040);"),
    I("products rounded", "tile-dot-fma", "high = upper(x, T{}) * upper(y, T{}) + high;"),
    I("upper elements twice", "tile-dot-fma", "high = fma(upper(x, T{}), upper(x, T{}), high);"),
    I("chains added one by one", "tile-dot-sum", "store(c[i], load(c[i]) + low + high);"),
    I("C forgotten", "tile-dot-sum", "store(c[i], low + high);"),
    I("mode kept", "tile-dot-restore", ""),
    # ---- products
    A("never from zero", "tiles-add", "true"),
    A("always from zero", "tiles-add", "false"),
    A("last step of the depth", "tiles-depth", "k + 1 < steps"),
    A("left operand's depth", "tiles-left", "a.rows"),
    A("left operand read behind its last step", "tiles-left", "a.rows + 64 * k"),
    A("second columns", "tiles-second-columns",
      "if (kRight || kReload) tile_load<7>(right, 4 * ldb);"),
    A("third columns", "tiles-third-columns", "tile_load<6>(right, 4 * ldb);"),
    A("fourth columns", "tiles-fourth-columns", "tile_load<7>(right + kTile, 4 * ldb);"),
    A("second rows", "tiles-second-rows", "if (kLeft) tile_load<5>(rows, a.bytes);"),
    A("dot 1", "tiles-dot-1", "tile_dot<Word<T>, 1, 4, 6>();"),
    A("dot 2", "tiles-dot-2", "tile_dot<Word<T>, 2, 4, 6>();"),
    A("dot 3", "tiles-dot-3", "if (kUse[3]) tile_dot<Word<T>, 3, 5, 6>();"),
    A("store 1", "tiles-store-1", ""),
    A("store 2", "tiles-store-2", "if (kUse[2]) tile_store<2>(at(0), 4 * ldc);"),
    A("store 3", "tiles-store-3", ""),
    A("odd rows", "strip-rows", "false"),
    A("no last part of the left", "tiles-20"),
    A("no middle part of the left", "tiles-10"),
    A("no product of middle parts", "tiles-11"),
    A("no middle part of the right", "tiles-01"),
    A("no last part of the right", "tiles-02"),
    # ---- operands
    A("permuted rows in place", "left-in-place", "in_place && dim >= 32 && n % kTile == 0"),
    A("an element behind the row", "pack-row-left",
      "_mm512_maskz_loadu_epi16(first_words(dim - d + 1), row + d)"),
    A("an element short", "pack-row-left",
      "_mm512_maskz_loadu_epi16(first_words(dim - d - 1), row + d)"),
    A("tokens behind the last", "right-rows", "i < n"),
    A("all in the first block", "right-block", "dst + i % kBlock"),
    A("multiplied twice", "right-mask", "first_words(dim - begin)"),
    A("an element of the row's end short", "pack-depth-left", "first_words(dim_ - whole_ - 1)"),
    A("pairs behind the tokens", "pack-depth-tokens", "next_ >= n_"),
    A("floats' pairs behind the tokens", "right-depth", "i < n"),
    A("rotated rows where results come", "rotated-buffer", "result"),
    A("rotated rows too close", "rotary-stride", "padded(p.head_dim)"),
    # ---- softmax
    A("rows reduced in another order", "reduce-rows",
      "fold(fold(r[i], r[i + 8]), fold(r[i + 4], r[i + 12]))"),
    A("keys behind the last", "mask-rows", ""),
    A("a later key seen", "forward-allowed",
      "strip_.causal ? minimum(strip_.allowed + row_ + 1, kBlock) : strip_.allowed"),
    A("sums not moved", "forward-moves", "return;"),
    A("exponentials relative to the first keys", "slack", "strip_.first ? 0xffff : 0"),
    A("a key behind the last", "gradient-both", "true"),
    A("pairs behind the keys", "gradient-clear", "false"),
    A("transposed to the same rows", "transpose-pairs",
      "for (int i = 0; i < kTile; ++i) store(to + i * kParts<T> * kBlock / 2, r[i]);"),
    A("one dS for two blocks", "backward-ds", "ds"),
    A("dS of half a block", "backward-block-end", "if (end != key_end) return;"),
    A("half of the row's dot", "dots-depth", "d < dim / 2 && row + i < n"),
    A("queries behind the last", "backward-lanes", "vectors_of(queries)"),
    A("one shared dq for all heads", "shared-dq", "shared.dq + q0 * padded(p.head_dim)"),
    # ---- results past the caches
    A("heads gathered in one place", "gather-head",
      "{buffer, static_cast<ptrdiff_t>(work.chunk * p.head_dim)}"),
    A("gathered and not written", "gather-last", "return;"),
    # ---- products of matrices
    P("no last part", "part-last", "return {{first, second, _mm512_setzero_si512()}};"),
    P("the first part thrice", "part-left", "x"),
    P("no last part of A", "parts-20", ""),
    P("no middle part of A", "parts-10", ""),
    P("no product of middle parts", "parts-11", ""),
    P("no middle part of B", "parts-01", ""),
    P("no last part of B", "parts-02", ""),
    P("all packed the other way", "pack-transposed", "true"),
    P("only the last panel", "panel-add", "p.add"),
    P("bias in every panel", "panel-bias", "p.bias != nullptr"),
    P("only the last part of the depth", "depth-sums", "nullptr"),
    P("not added to C", "finish-add", ""),
    P("whole vectors past the last column", "finish-stream", "streams"),
]  # fmt: skip
