// Attention on tiles (cpu/tile.h), of fp32 by parts (cpu/parts.h): operands, products and results
// of both directions. T is the type. Included by kernel.cpp only.
//
// A row of an operand has its parts one behind the other.
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
#include "cpu/parts.h"
#include "cpu/tile.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// What with_rotated() makes rows for.
struct Pairs {
  static constexpr int kStep = 2;
};
template <class T>
using RotatedFor = std::conditional_t<std::is_same_v<T, float>, Fp32, Pairs>;

template <class T>
constexpr int kParts = Parts<T>::kCount;

// Where rotated rows are kept that become a left operand: where it is, which they are already, or,
// if they have parts, where a result comes later.
template <class T>
VLMK_INLINE void* rotated_buffer(uint32_t* left, float* result) {
  return kParts<T> == 1 ? static_cast<void*>(left) : result;  // mutant: rotated-buffer
}

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
// in buffer [n up to 16, parts, 32 * dim_steps(dim)], where those of 16 bits may be already.
template <class T>
VLMK_INLINE Left left_rows(const Rows<const T>& rows, int64_t n, int64_t dim, bool in_place,
                           uint32_t* buffer) {
  const int64_t steps = dim_steps(dim), ld = 16 * steps;
  if constexpr (kParts<T> == 1) {
    if (in_place && !rows.order && dim >= 32 && n % kTile == 0) {  // mutant: left-in-place
      return {reinterpret_cast<const char*>(rows.data), 2 * rows.stride,
              2 * step_begin(steps - 1, dim)};
    }
  }
  uint32_t* to = buffer;
  for (int64_t i = 0; i < n; ++i, to += kParts<T> * ld) {
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t begin = step_begin(step, dim);
      __m512i parts[kParts<T>];
      Parts<T>::load(rows[i] + begin, first_words(dim - begin), parts);
      for (int part = 0; part < kParts<T>; ++part) {
        _mm512_storeu_si512(to + part * ld + 16 * step, parts[part]);
      }
    }
  }
  return {reinterpret_cast<const char*>(buffer), 4 * kParts<T> * ld};
}

// 16 rows, `present` of them, from element `begin` on, those of the mask, as 16 pairs along dim
// [16, parts, kRow], rows in lanes. sign: its bit flips theirs.
template <class T>
VLMK_INLINE void transpose_rows(const Rows<const T>& rows, int64_t present, int64_t begin,
                                __mmask32 mask, float sign, uint32_t* to) {
  const __m512i flip = _mm512_set1_epi32(sign < 0 ? static_cast<int>(0x80008000u) : 0);
  Vec r[kTile];
  for (int j = 0; j < kTile; ++j) {
    r[j] = set1(0.f);
    if (j >= present) continue;
    r[j] = _mm512_castsi512_ps(
        _mm512_xor_si512(flip, _mm512_maskz_loadu_epi16(mask, rows[j] + begin)));
  }
  transpose(r);
  for (int j = 0; j < kTile; ++j) store(reinterpret_cast<float*>(to + j * kBlock), r[j]);
}
VLMK_INLINE void transpose_rows(const Rows<const float>& rows, int64_t present, int64_t begin,
                                __mmask32 mask, float sign, uint32_t* to) {
  constexpr int64_t kCount = Parts<float>::kCount;
  const Vec factor = set1(sign);
  for (int half = 0; half < 2; ++half, begin += kWidth, mask >>= kWidth) {
    Vec r[kTile];
    for (int j = 0; j < kTile; ++j) {
      r[j] = set1(0.f);
      if (j >= present) continue;
      r[j] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), rows[j] + begin) * factor;
    }
    transpose_to_pairs(r, [&](int, const __m512i(&parts)[kCount]) __attribute__((always_inline)) {
      for (const __m512i& part : parts) {
        _mm512_storeu_si512(to, part);
        to += kBlock;
      }
    });
  }
}

// n rows as right operand of a product over dim, times sign (1 or -1): dst, for every 64 rows
// [16 * dim_steps(dim), parts, 64], pairs along dim, rows in lanes, 0 behind n up to 32.
template <class T>
VLMK_NOINLINE void pack_right_rows(const Rows<const T>& rows, int64_t n, int64_t dim, float sign,
                                   uint32_t* dst, Prefetcher& prefetcher) {
  constexpr int64_t kRow = kParts<T> * kBlock;
  const int steps = dim_steps(dim);
  for (int64_t i = 0; i < whole_tiles(n); i += kTile) {  // mutant: right-rows
    // mutant: right-block
    uint32_t* block = dst + i / kBlock * kRow * kTile * steps + i % kBlock;
    for (int step = 0; step < steps; ++step) {
      const int64_t begin = step_begin(step, dim), done = 32 * step - begin;
      const __mmask32 mask = first_words(dim - begin) >> done << done;  // mutant: right-mask
      transpose_rows(rows.from(i), n - i, begin, mask, sign, block + kTile * step * kRow);
      prefetcher.fetch(6);
    }
  }
}

// n rows as right operand of a product over rows: dst [n / 2, parts, padded(dim)], pairs along the
// rows; behind the last one it stands again, since what multiplies it is 0.
template <class T>
VLMK_INLINE void pack_right_depth(const Rows<const T>& rows, int64_t n, int64_t dim, uint32_t* dst,
                                  const Fetch& fetch) {
  if constexpr (kParts<T> == 1) {
    pack_depth(rows, n, dim, dst, fetch);
  } else {
    const int64_t ld = padded(dim);
    for (int64_t i = 0; i < whole_tiles(n); i += 2, dst += kParts<T> * ld) {  // mutant: right-depth
      const T *even = rows[minimum(i, n - 1)], *odd = rows[minimum(i + 1, n - 1)];
      for (int64_t d = 0; d < ld; d += kWidth) {
        __m512i parts[kParts<T>];
        Parts<T>::load_pairs(even + d, odd + d, static_cast<__mmask16>(first_words(dim - d)),
                             parts);
        for (int part = 0; part < kParts<T>; ++part) {
          _mm512_storeu_si512(dst + part * ld + d, parts[part]);
        }
      }
      fetch();
    }
  }
}

// ---- products

// What tiles multiply of T.
template <class T>
using Word = std::conditional_t<std::is_same_v<T, float>, BFloat16, T>;

// C [16 * kRows, 16 * kColumns] of as many rows of a, over `steps` times 32 elements: kRows 1 with
// up to 4 columns, or 2 with up to 2. beside() is called after every few products, for the vectors
// to do meanwhile.
template <class T, int kRows, int kColumns, class Beside>
VLMK_INLINE void multiply_tiles(const Left& a, const uint32_t* b, ptrdiff_t ldb, float* c,
                                ptrdiff_t ldc, int steps, bool add, const Beside& beside) {
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
  constexpr bool kReload = kOne && kUse[2];  // more columns than registers
  const ptrdiff_t left_part = a.bytes / kParts<T>, right_part = ldb / kParts<T>;
  // New: whether the registers hold another part.
  const auto multiply = [&](const char* rows, auto new_rows, const uint32_t* right,
                            auto new_right) __attribute__((always_inline)) {
    constexpr bool kLeft = decltype(new_rows)::value, kRight = decltype(new_right)::value;
    if (kLeft) tile_load<4>(rows, a.bytes);
    if (kRight || kReload) tile_load<6>(right, 4 * ldb);
    tile_dot<Word<T>, 0, 4, 6>();
    if (kUse[1]) {
      if (kRight || kReload) tile_load<7>(right + kTile, 4 * ldb);  // mutant: tiles-second-columns
      tile_dot<Word<T>, 1, 4, 7>();                                 // mutant: tiles-dot-1
    }
    if (kOne && kUse[2]) {
      tile_load<6>(right + 2 * kTile, 4 * ldb);  // mutant: tiles-third-columns
      tile_dot<Word<T>, 2, 4, 6>();
    }
    if (kOne && kUse[3]) {
      tile_load<7>(right + 3 * kTile, 4 * ldb);  // mutant: tiles-fourth-columns
      tile_dot<Word<T>, 3, 4, 7>();
    }
    if (!kOne) {
      if (kLeft) tile_load<5>(rows + kTile * a.bytes, a.bytes);  // mutant: tiles-second-rows
      tile_dot<Word<T>, 2, 5, 6>();                              // mutant: tiles-dot-2
      if (kUse[3]) tile_dot<Word<T>, 3, 5, 7>();                 // mutant: tiles-dot-3
    }
    beside();
  };
  const std::true_type changed{};
  const std::false_type same{};
  for (int k = 0; k < steps; ++k, b += kTile * ldb) {     // mutant: tiles-depth
    const char* rows = a.rows + minimum(64 * k, a.last);  // mutant: tiles-left
    multiply(rows, changed, b, changed);
    if constexpr (kParts<T> == 3) {  // the other pairs, each with a part of the one before it
      multiply(rows + 2 * left_part, changed, b, same);           // mutant: tiles-20
      multiply(rows + left_part, changed, b, same);               // mutant: tiles-10
      multiply(rows + left_part, same, b + right_part, changed);  // mutant: tiles-11
      multiply(rows, changed, b + right_part, same);              // mutant: tiles-01
      multiply(rows, same, b + 2 * right_part, changed);          // mutant: tiles-02
    }
  }
  tile_store<0>(at(0), 4 * ldc);
  if (kUse[1]) tile_store<1>(at(1), 4 * ldc);  // mutant: tiles-store-1
  if (kUse[2]) tile_store<2>(at(2), 4 * ldc);  // mutant: tiles-store-2
  if (kUse[3]) tile_store<3>(at(3), 4 * ldc);  // mutant: tiles-store-3
}

// C [rows, columns] (+)= a b, both up to whole tiles; of more than 32 rows, the first 32.
template <class T, class Beside>
VLMK_NOINLINE void multiply_strip(const Left& a, int64_t rows, const uint32_t* b, ptrdiff_t ldb,
                                  float* c, ptrdiff_t ldc, int64_t columns, int steps, bool add,
                                  const Beside& beside) {
  int left = static_cast<int>(columns / kTile);
  while (left > 0) {
    int now = left < 2 ? 1 : 2;
    if (rows > kTile) {  // mutant: strip-rows
      if (now == 2) multiply_tiles<T, 2, 2>(a, b, ldb, c, ldc, steps, add, beside);
      if (now == 1) multiply_tiles<T, 2, 1>(a, b, ldb, c, ldc, steps, add, beside);
    } else {
      now = left == 5 ? 3 : left < 4 ? left : 4;  // not 4 + 1
      if (now == 4) multiply_tiles<T, 1, 4>(a, b, ldb, c, ldc, steps, add, beside);
      if (now == 3) multiply_tiles<T, 1, 3>(a, b, ldb, c, ldc, steps, add, beside);
      if (now == 2) multiply_tiles<T, 1, 2>(a, b, ldb, c, ldc, steps, add, beside);
      if (now == 1) multiply_tiles<T, 1, 1>(a, b, ldb, c, ldc, steps, add, beside);
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
