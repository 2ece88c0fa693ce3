// Attention of bf16 and fp16 on tiles (cpu/tile.h): operands, products and results of both
// directions. T is the type. Included by kernel.cpp only.
//
// A left operand lies as tiles read it, so it may be where it is: rows of q, k, v and dout, rows of
// P and dS. A right operand holds pairs along the depth: pack_depth() and pack_right_rows() make
// it. Strips of queries or keys go through products and softmax one behind the other: tiles
// multiply for one while vectors work on another, and what a tile loads was stored a strip ago.
//
// Windows take as long as their rows take to arrive: a core has few line fills in flight, so the
// next rows are fetched a few lines at a time all the way, Prefetcher::fetch(). How many lines each
// phase fetches is about in proportion to its time, so that a window's are done when it is.
#pragma once

#include "cpu/attention/gather.inl"
#include "cpu/attention/pack.inl"
#include "cpu/attention/rotary.inl"
#include "cpu/tile.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// What with_rotated() makes rows for.
struct Pairs {
  static constexpr int kStep = 2;
};

// ---- operands

// Steps of 32 elements in which a product over head_dim goes.
VLMK_INLINE int dim_steps(int64_t dim) { return static_cast<int>((dim + 31) / 32); }
// Where a row is read from for a step. The last step ends where the row does: what an earlier one
// has multiplied is 0 in the right operand.
VLMK_INLINE int64_t step_begin(int64_t step, int64_t dim) {
  const int64_t last = dim > 32 ? dim - 32 : 0;
  return minimum(32 * step, last);
}

// Rows, of which a step reads 16 times 64 bytes.
struct Left {
  const char* rows;
  ptrdiff_t bytes;               // from row to row
  ptrdiff_t last = PTRDIFF_MAX;  // where in a row the last step reads

  VLMK_MEMBER Left from(int64_t row) const { return {rows + row * bytes, bytes, last}; }
};

// n rows as left operand: where they are if that is wanted and tiles read nothing else there, else
// in buffer [n up to 16, 32 * dim_steps(dim)], where they may be already.
template <class T>
VLMK_INLINE Left left_rows(const Rows<const T>& rows, int64_t n, int64_t dim, bool in_place,
                           T* buffer) {
  const int64_t steps = dim_steps(dim), ld = 32 * steps;
  if (in_place && !rows.order && dim >= 32 && n % kTile == 0) {  // mutant: left-in-place
    return {reinterpret_cast<const char*>(rows.data), 2 * rows.stride,
            2 * step_begin(steps - 1, dim)};
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t begin = step_begin(step, dim);
      _mm512_storeu_si512(buffer + i * ld + 32 * step, load_row(rows[i], begin, dim));
    }
  }
  return {reinterpret_cast<const char*>(buffer), 2 * ld};
}

// n rows as right operand of a product over dim, times sign (1 or -1): dst, for every 64 rows
// [16 * dim_steps(dim), 64], pairs along dim, rows in lanes, 0 behind n up to 32.
template <class T>
VLMK_NOINLINE void pack_right_rows(const Rows<const T>& rows, int64_t n, int64_t dim, float sign,
                                   uint32_t* dst, Prefetcher& prefetcher) {
  const int steps = dim_steps(dim);
  const __m512i flip = _mm512_set1_epi32(sign < 0 ? static_cast<int>(0x80008000u) : 0);
  for (int64_t i = 0; i < whole_tiles(n); i += kTile) {  // mutant: right-rows
    // mutant: right-block
    uint32_t* block = dst + i / kBlock * kBlock * kTile * steps + i % kBlock;
    const int64_t present = minimum(kTile, n - i);
    for (int step = 0; step < steps; ++step) {
      const int64_t begin = step_begin(step, dim), done = 32 * step - begin;
      const __mmask32 mask = first_words(dim - begin) >> done << done;  // mutant: right-mask
      Vec r[kTile];
      for (int j = 0; j < kTile; ++j) {
        r[j] = j < present ? _mm512_castsi512_ps(_mm512_xor_si512(
                                 flip, _mm512_maskz_loadu_epi16(mask, rows[i + j] + begin)))
                           : set1(0.f);
      }
      transpose(r);
      float* to = reinterpret_cast<float*>(block + kTile * step * kBlock);
      for (int j = 0; j < kTile; ++j) store(to + j * kBlock, r[j]);
      prefetcher.fetch(6);
    }
  }
}

// ---- products

// C [16 * kRows, 16 * kColumns] of as many rows of a, over `steps` times 32 elements: kRows 1 with
// up to 4 columns, or 2 with up to 2.
template <class T, int kRows, int kColumns>
VLMK_INLINE void multiply_tiles(const Left& a, const uint32_t* b, ptrdiff_t ldb, float* c,
                                ptrdiff_t ldc, int steps, bool add, Prefetcher& prefetcher) {
  constexpr bool kOne = kRows == 1;
  const auto at = [&](int tile) {  // registers 0 to 3, row by row
    return kOne ? c + tile * kTile : c + tile / 2 * kTile * ldc + tile % 2 * kTile;
  };
  constexpr bool kUse[] = {true, kColumns > 1, kOne ? kColumns > 2 : true,
                           kOne ? kColumns > 3 : kColumns > 1};
  if (add) {  // mutant: tiles-add
    tile_load<0>(at(0), 4 * ldc);
    if (kUse[1]) tile_load<1>(at(1), 4 * ldc);
    if (kUse[2]) tile_load<2>(at(2), 4 * ldc);
    if (kUse[3]) tile_load<3>(at(3), 4 * ldc);
  } else {
    tile_zero<0>();
    if (kUse[1]) tile_zero<1>();
    if (kUse[2]) tile_zero<2>();
    if (kUse[3]) tile_zero<3>();
  }
  for (int k = 0; k < steps; ++k, b += kTile * ldb) {     // mutant: tiles-depth
    const char* rows = a.rows + minimum(64 * k, a.last);  // mutant: tiles-left
    tile_load<4>(rows, a.bytes);
    tile_load<6>(b, 4 * ldb);
    tile_dot<T, 0, 4, 6>();
    if (kUse[1]) {
      tile_load<7>(b + kTile, 4 * ldb);  // mutant: tiles-second-columns
      tile_dot<T, 1, 4, 7>();            // mutant: tiles-dot-1
    }
    if (kOne && kUse[2]) {
      tile_load<6>(b + 2 * kTile, 4 * ldb);  // mutant: tiles-third-columns
      tile_dot<T, 2, 4, 6>();
    }
    if (kOne && kUse[3]) {
      tile_load<7>(b + 3 * kTile, 4 * ldb);  // mutant: tiles-fourth-columns
      tile_dot<T, 3, 4, 7>();
    }
    if (!kOne) {
      tile_load<5>(rows + kTile * a.bytes, a.bytes);  // mutant: tiles-second-rows
      tile_dot<T, 2, 5, 6>();                         // mutant: tiles-dot-2
      if (kUse[3]) tile_dot<T, 3, 5, 7>();            // mutant: tiles-dot-3
    }
    prefetcher.fetch(4);
  }
  tile_store<0>(at(0), 4 * ldc);
  if (kUse[1]) tile_store<1>(at(1), 4 * ldc);  // mutant: tiles-store-1
  if (kUse[2]) tile_store<2>(at(2), 4 * ldc);  // mutant: tiles-store-2
  if (kUse[3]) tile_store<3>(at(3), 4 * ldc);  // mutant: tiles-store-3
}

// C [rows, columns] (+)= a b, both up to whole tiles; of more than 32 rows, the first 32.
template <class T>
VLMK_NOINLINE void multiply_strip(const Left& a, int64_t rows, const uint32_t* b, ptrdiff_t ldb,
                                  float* c, ptrdiff_t ldc, int64_t columns, int steps, bool add,
                                  Prefetcher& prefetcher) {
  int left = static_cast<int>(columns / kTile);
  while (left > 0) {
    int now = left < 2 ? 1 : 2;
    if (rows > kTile) {  // mutant: strip-rows
      if (now == 2) multiply_tiles<T, 2, 2>(a, b, ldb, c, ldc, steps, add, prefetcher);
      if (now == 1) multiply_tiles<T, 2, 1>(a, b, ldb, c, ldc, steps, add, prefetcher);
    } else {
      now = left == 5 ? 3 : left < 4 ? left : 4;  // not 4 + 1
      if (now == 4) multiply_tiles<T, 1, 4>(a, b, ldb, c, ldc, steps, add, prefetcher);
      if (now == 3) multiply_tiles<T, 1, 3>(a, b, ldb, c, ldc, steps, add, prefetcher);
      if (now == 2) multiply_tiles<T, 1, 2>(a, b, ldb, c, ldc, steps, add, prefetcher);
      if (now == 1) multiply_tiles<T, 1, 1>(a, b, ldb, c, ldc, steps, add, prefetcher);
    }
    b += now * kTile;
    c += now * kTile;
    left -= now;
  }
}

// ---- rows

// Lane i: op over all lanes of r[i].
template <class Op>
VLMK_INLINE Vec reduce_rows(const Vec (&r)[kTile], Op op) {
  Vec w[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto fold = [&](Vec a, Vec b) {
      return op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    w[i] = fold(fold(r[i], r[i + 4]), fold(r[i + 8], r[i + 12]));  // mutant: reduce-rows
  }
  const auto fold = [&](Vec a, Vec b) {
    return op(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
  };
  return fold(fold(w[0], w[1]), fold(w[2], w[3]));
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
