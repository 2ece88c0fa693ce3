// Small matrix products C = A B on packed fp32 panels in cache: the one compute primitive of the
// attention kernels. Included after simd.h, inside an ISA translation unit.
//
// Speed of light: a tile of R rows x V vectors does R*V FMAs per step of the depth for V loads and R
// broadcasts. Two FMAs and two loads a cycle, latency 4: R*V >= 8 chains, R*V >= R+V loads.
#pragma once
#include "cpu/simd.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// What a tile starts from: 0, C, or C with row i multiplied by row_scale[i].
enum class Start { kZero, kAdd, kScale };

// AVX-512: 6 x 4 accumulators + 4 of B + 1 broadcast = 29 of 32 registers.
// AVX2, SSE2 and NEON: 6 x 2 + 2 + 1 = 15 of 16 (NEON has 32).
constexpr int kMaxTileVectors = kWidth == 16 ? 4 : 2;
constexpr int tile_rows(int vectors) { return vectors == 1 ? 12 : 6; }  // 1 vector: more chains

// A's element (row i, step k): a[i * lda + k], or a[k * lda + i] if kByColumns.
struct GemmArgs {
  const float* a;
  ptrdiff_t lda;
  const float* b;  // (step k, column j): b[k * ldb + j]
  ptrdiff_t ldb;
  float* c;  // (row i, column j): c[i * ldc + j]
  ptrdiff_t ldc;
  int rows;
  int vectors;  // of columns
  int depth;
  Start start;
  const float* row_scale;  // [rows], for Start::kScale
};

template <bool kByColumns, int kRows, int kVectors>
VLMK_NOINLINE void tile(const GemmArgs& g, int row, int column) {
  Vec acc[kRows][kVectors];
  float* c = g.c + row * g.ldc + column;
  if (g.start == Start::kZero) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) acc[i][j] = set1(0.f);
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec s = set1(g.start == Start::kScale ? g.row_scale[row + i] : 1.f);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) acc[i][j] = load(c + i * g.ldc + j * kWidth) * s;
    }
  }
  const ptrdiff_t lda = g.lda, ldb = g.ldb;
  const float* a = g.a + (kByColumns ? row : row * lda);
  const float* b = g.b + column;
  const int depth = g.depth;
#pragma GCC unroll 2
  for (int k = 0; k < depth; ++k) {
    Vec y[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) y[j] = load(b + j * kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec x = set1(kByColumns ? a[i] : a[i * lda]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) acc[i][j] = fma(x, y[j], acc[i][j]);
    }
    a += kByColumns ? lda : 1;
    b += ldb;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(c + i * g.ldc + j * kWidth, acc[i][j]);
  }
}

template <bool kByColumns, int kVectors>
VLMK_INLINE void column_group(const GemmArgs& g, int column) {
  constexpr int kRows = tile_rows(kVectors);
  int row = 0;
  for (; row + kRows <= g.rows; row += kRows) tile<kByColumns, kRows, kVectors>(g, row, column);
  if (kRows > 6 && row + 6 <= g.rows) {
    tile<kByColumns, 6, kVectors>(g, row, column);
    row += 6;
  }
  if (row + 4 <= g.rows) {
    tile<kByColumns, 4, kVectors>(g, row, column);
    row += 4;
  }
  if (row + 2 <= g.rows) {
    tile<kByColumns, 2, kVectors>(g, row, column);
    row += 2;
  }
  if (row < g.rows) tile<kByColumns, 1, kVectors>(g, row, column);
}

// Every element of C is one sum over the depth in order, whatever the tiling: results don't depend
// on how rows and columns are split.
template <bool kByColumns>
VLMK_NOINLINE void gemm(const GemmArgs& g) {
  int done = 0;
  for (int groups = (g.vectors + kMaxTileVectors - 1) / kMaxTileVectors; groups > 0; --groups) {
    const int left = g.vectors - done;
    const int vectors = (left + groups - 1) / groups;  // even groups: 5 = 3 + 2, not 4 + 1
    const int column = done * kWidth;
    if constexpr (kMaxTileVectors == 4) {
      if (vectors == 4) column_group<kByColumns, 4>(g, column);
      if (vectors == 3) column_group<kByColumns, 3>(g, column);
    }
    if (vectors == 2) column_group<kByColumns, 2>(g, column);
    if (vectors == 1) column_group<kByColumns, 1>(g, column);
    done += vectors;
  }
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
