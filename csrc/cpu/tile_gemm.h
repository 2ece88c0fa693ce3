// gemm() of gemm.h on tiles. Included inside an ISA translation unit.
//
// Speed of light: tile_dot takes 16 cycles for 16 x 16 x 32 multiply-adds, a load of a tile 8. Two
// by two tiles of C take 4 loads (32 cycles) for 4 products (64) in each step of the depth.
#pragma once
#include "cpu/gemm.h"
#include "cpu/tile.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// Elements are pairs of bf16, as of Bf16Pairs. Operands are read in whole tiles: behind the depth,
// both hold zeros up to a multiple of 16 elements; behind A's rows and B's columns is anything.
struct Bf16Tiles {
  using Element = uint32_t;
  static constexpr int kStep = 2;
  static constexpr bool kTiled = true;
  static VLMK_MEMBER Vec pair(Vec even, Vec odd) { return pair_bf16(even, odd); }
};

template <int kRows, int kColumns>  // tiles of C, 1 or 2
VLMK_INLINE void tile_block(const GemmArgs<Bf16Tiles>& g, int row, int column,
                            Prefetcher& prefetcher) {
  // A window's rows are 3 KB for each step of its products: these are what fits in between.
  constexpr int kPrefetchesPerStep = 8;
  const ptrdiff_t lda = 4 * g.lda, ldb = 4 * g.ldb, ldc = 4 * g.ldc;  // bytes
  const auto c = [&](int i, int j) { return g.c + (row + i * kTile) * g.ldc + column + j * kTile; };
  if (g.start == Start::kZero) {  // mutant: tile-gemm-start
    tile_zero<0>();
    if (kColumns == 2) tile_zero<1>();
    if (kRows == 2) tile_zero<2>();
    if (kRows == 2 && kColumns == 2) tile_zero<3>();
  } else {
    tile_load<0>(c(0, 0), ldc);
    if (kColumns == 2) tile_load<1>(c(0, 1), ldc);
    if (kRows == 2) tile_load<2>(c(1, 0), ldc);
    if (kRows == 2 && kColumns == 2) tile_load<3>(c(1, 1), ldc);
  }
  for (int k = 0; k < g.depth; k += kTile) {       // mutant: tile-gemm-depth
    const uint32_t* a = g.a + row * g.lda + k;     // mutant: tile-gemm-left
    const uint32_t* b = g.b + k * g.ldb + column;  // mutant: tile-gemm-right
    tile_load<4>(a, lda);
    tile_load<6>(b, ldb);
    tile_dot<0, 4, 6>();
    if (kColumns == 2) {
      tile_load<7>(b + kTile, ldb);  // mutant: tile-gemm-second-columns
      tile_dot<1, 4, 7>();           // mutant: tile-gemm-dot-1
    }
    if (kRows == 2) {
      tile_load<5>(a + kTile * g.lda, lda);    // mutant: tile-gemm-second-rows
      tile_dot<2, 5, 6>();                     // mutant: tile-gemm-dot-2
      if (kColumns == 2) tile_dot<3, 5, 7>();  // mutant: tile-gemm-dot-3
    }
    for (int i = 0; i < kPrefetchesPerStep && prefetcher.busy(); ++i) prefetcher.step();
  }
  tile_store<0>(c(0, 0), ldc);
  if (kColumns == 2) tile_store<1>(c(0, 1), ldc);  // mutant: tile-gemm-store-1
  if (kRows == 2) tile_store<2>(c(1, 0), ldc);     // mutant: tile-gemm-store-2
  if (kRows == 2 && kColumns == 2) tile_store<3>(c(1, 1), ldc);
}

template <int kRows>
VLMK_INLINE void tile_rows_of(const GemmArgs<Bf16Tiles>& g, int row, Prefetcher& prefetcher) {
  const int columns = g.vectors * kWidth;
  int column = 0;
  for (; column + 2 * kTile <= columns; column += 2 * kTile) {
    tile_block<kRows, 2>(g, row, column, prefetcher);
  }
  if (column < columns) {  // mutant: tile-gemm-last-column
    tile_block<kRows, 1>(g, row, column, prefetcher);
  }
}

template <>
__attribute__((noinline)) void gemm<Bf16Tiles, false>(const GemmArgs<Bf16Tiles>& g,
                                                      Prefetcher& prefetcher) {
  int row = 0;
  for (; row + kTile < g.rows; row += 2 * kTile) tile_rows_of<2>(g, row, prefetcher);
  if (row < g.rows) tile_rows_of<1>(g, row, prefetcher);  // mutant: tile-gemm-last-row
}

// A tile has no rows in columns, so this is C^T = B^T A^T: B is given transposed, (step k, column
// j): b[j * ldb + k], and C comes transposed, (row i, column j): c[j * ldc + i].
template <>
__attribute__((noinline)) void gemm<Bf16Tiles, true>(const GemmArgs<Bf16Tiles>& g,
                                                     Prefetcher& prefetcher) {
  const int lanes = (g.rows + kWidth - 1) / kWidth, columns = g.vectors * kWidth;
  for (int j = 0; g.start == Start::kScale && j < columns; ++j) {
    for (int i = 0; i < lanes * kWidth; i += kWidth) {
      float* c = g.c + j * g.ldc + i;
      store(c, load(c) * load(g.row_scale + i));  // mutant: tile-gemm-scale
    }
  }
  const Start start =
      g.start == Start::kZero ? Start::kZero : Start::kAdd;  // mutant: tile-gemm-add
  gemm<Bf16Tiles, false>(
      {g.b, g.ldb, g.a, g.lda, g.c, g.ldc, columns, lanes, g.depth, start, nullptr}, prefetcher);
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
