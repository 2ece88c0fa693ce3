// How q, k, v and dout lie in the panels that gemm() reads, for both kinds of Math, and how results
// leave. Included by kernel.cpp only.
//
//   pack_rows   [n tokens, dim], A of a product over dim: one element per step of dim, broadcast
//   pack_lanes  [dim, 64 tokens], B of a product over dim: tokens in lanes
//   pack_depth  [n tokens, dim], B of a product over tokens: dim in lanes
//
// Fp32 panels hold floats, whatever the storage type was; Bf16Pairs panels hold pairs of what is
// multiplied and added in one step.
#pragma once
#include "common/params.h"
#include "cpu/gemm.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

constexpr int kBlock = 64;  // queries in lanes; also keys per step of the online softmax
// fp32 rows of one block of queries are read once, so where they are; more often: packed, because
// rows a token apart fall into few sets of the cache.
constexpr int64_t kInPlaceRows = 64;

VLMK_INLINE int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
VLMK_INLINE int vectors_of(int64_t n) { return static_cast<int>((n + kWidth - 1) / kWidth); }
// Leading dimension of packed rows: whole cache lines.
VLMK_INLINE int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }
template <class Math>
VLMK_INLINE int steps_of(int64_t n) {
  return static_cast<int>((n + Math::kStep - 1) / Math::kStep);
}

// The rows of one head at consecutive places of a segment: row i is order[i], or i without an
// order.
template <class T>
struct Rows {
  T* data;
  ptrdiff_t stride;
  const int32_t* order = nullptr;

  VLMK_MEMBER T* operator[](int64_t i) const { return data + (order ? order[i] : i) * stride; }
  VLMK_MEMBER Rows from(int64_t i) const {
    return order ? Rows{data, stride, order + i} : Rows{data + i * stride, stride};
  }
};

template <class T>
VLMK_INLINE Rows<T> rows_of(const HeadsView& x, const int32_t* order, int64_t place, int64_t head) {
  return Rows<T>{static_cast<T*>(x.data) + head * x.head_stride, x.token_stride, order}.from(place);
}

template <class Math>
struct Panel {
  const typename Math::Element* data;
  ptrdiff_t ld;
};

// rows [n, dim] -> dst [n, padded(dim)], zeros behind dim.
template <class T>
VLMK_NOINLINE void pack_depth(const Rows<T>& rows, int64_t n, int64_t dim, float* dst) {
  const int64_t ld = padded(dim), whole = dim / kWidth * kWidth;
  for (int64_t i = 0; i < n; ++i, dst += ld) {
    T* row = rows[i];
    int64_t d = 0;
    for (; d < whole; d += kWidth) store(dst + d, load(row + d));
    if (d < dim) {
      store(dst + d, load_n(row + d, static_cast<int>(dim - d)));
      d += kWidth;
    }
    for (; d < ld; d += kWidth) store(dst + d, set1(0.f));
  }
}

template <class T>
VLMK_INLINE Panel<Fp32> pack_rows(Fp32, const Rows<const T>& rows, int64_t n, int64_t dim,
                                  float* dst) {
  if constexpr (std::is_same<T, float>::value) {
    const bool dense = rows.stride == padded(dim);
    if ((n <= kInPlaceRows || dense) && !rows.order) return {rows.data, rows.stride};
  }
  pack_depth(rows, n, dim, dst);
  return {dst, padded(dim)};
}

// rows [n <= 64, dim] -> dst [dim, 64] times sign (1 or -1); zeros in the lanes from n to a whole
// vector.
template <class T>
VLMK_NOINLINE void pack_lanes(const Rows<T>& rows, int64_t n, int64_t dim, float sign, float* dst) {
  const Vec factor = set1(sign);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t present = minimum(kWidth, n - i);
    for (int64_t d = 0; d < dim; d += kWidth) {
      const int64_t columns = minimum(kWidth, dim - d);
      Vec r[kWidth];
      if (present == kWidth && columns == kWidth) {
#pragma GCC unroll 16
        for (int j = 0; j < kWidth; ++j) r[j] = load(rows[i + j] + d);
      } else {
        for (int j = 0; j < kWidth; ++j) {
          r[j] = j < present ? load_n(rows[i + j] + d, static_cast<int>(columns)) : set1(0.f);
        }
      }
      transpose(r);
      float* to = dst + d * kBlock + i;
      if (columns == kWidth) {
#pragma GCC unroll 16
        for (int j = 0; j < kWidth; ++j) store(to + j * kBlock, r[j] * factor);
      } else {
        for (int j = 0; j < columns; ++j) store(to + j * kBlock, r[j] * factor);
      }
    }
  }
}

#if defined(__AVX512BF16__)
// Up to 32 bf16 of a row from element d on, zeros behind dim.
VLMK_INLINE __m512i load_row(const BFloat16* row, int64_t d, int64_t dim) {
  const int64_t left = dim - d;
  const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
  return _mm512_maskz_loadu_epi16(mask, row + d);
}

VLMK_INLINE Panel<Bf16Pairs> pack_rows(Bf16Pairs, const Rows<const BFloat16>& rows, int64_t n,
                                       int64_t dim, uint32_t* dst) {
  const bool dense = rows.stride == padded(dim);
  if ((n <= kInPlaceRows || dense) && dim % 2 == 0 && rows.stride % 2 == 0 && !rows.order) {
    return {reinterpret_cast<const uint32_t*>(rows.data), rows.stride / 2};
  }
  const int64_t ld = padded(steps_of<Bf16Pairs>(dim));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = 0; d < ld; d += 16) {
      _mm512_storeu_si512(dst + i * ld + d, load_row(rows[i], minimum(2 * d, dim), dim));
    }
  }
  return {dst, ld};
}

// dst [dim / 2, 64]: pairs along dim.
VLMK_NOINLINE void pack_lanes(const Rows<const BFloat16>& rows, int64_t n, int64_t dim, float sign,
                              uint32_t* dst) {
  const __m512i flip = _mm512_set1_epi32(sign < 0 ? static_cast<int>(0x80008000u) : 0);
  const int64_t pairs = steps_of<Bf16Pairs>(dim);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t present = minimum(kWidth, n - i);
    for (int64_t d = 0; d < pairs; d += kWidth) {
      Vec r[kWidth];
      for (int j = 0; j < kWidth; ++j) {
        r[j] = j < present
                   ? _mm512_castsi512_ps(_mm512_xor_si512(flip, load_row(rows[i + j], 2 * d, dim)))
                   : set1(0.f);
      }
      transpose(r);
      const int64_t columns = minimum(kWidth, pairs - d);
      for (int j = 0; j < columns; ++j) {
        _mm512_storeu_ps(reinterpret_cast<float*>(dst + (d + j) * kBlock + i), r[j]);
      }
    }
  }
}

// dst [n / 2, padded(dim)]: pairs along the tokens.
VLMK_NOINLINE void pack_depth(const Rows<const BFloat16>& rows, int64_t n, int64_t dim,
                              uint32_t* dst) {
  const int64_t ld = padded(dim);
  for (int64_t i = 0; i < n; i += 2, dst += ld) {
    const BFloat16* a = rows[i];
    const BFloat16* b = i + 1 < n ? rows[i + 1] : nullptr;
    for (int64_t d = 0; d < ld; d += 16) {
      const int64_t left = dim - d;
      const __mmask16 mask = left >= 16 ? 0xffff : first_lanes(static_cast<int>(left));
      const __m256i low = _mm256_maskz_loadu_epi16(mask, a + d);
      const __m256i high = b ? _mm256_maskz_loadu_epi16(mask, b + d) : _mm256_setzero_si256();
      _mm512_storeu_si512(dst + d, interleave(low, high));
    }
  }
}

#endif

VLMK_INLINE void copy(const float* src, int64_t n, float* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = src[i];
}

// src [n, padded(dim)], row i times scale[i] (or scale[0] if kOneScale) -> rows [n, dim].
// `non_temporal`: rows are whole lines then.
template <bool kOneScale, class T>
VLMK_NOINLINE void store_rows(const float* src, int64_t ld, int64_t n, int64_t dim,
                              const float* scale, const Rows<T>& rows, bool non_temporal) {
  const int64_t whole = dim / kWidth * kWidth;
  if constexpr (std::is_same<T, float>::value) {
    if (non_temporal) {
      for (int64_t i = 0; i < n; ++i, src += ld) {
        T* row = rows[i];
        const Vec s = set1(scale[kOneScale ? 0 : i]);
        for (int64_t d = 0; d < whole; d += kWidth) stream(row + d, load(src + d) * s);
      }
      return;
    }
  }
  for (int64_t i = 0; i < n; ++i, src += ld) {
    T* row = rows[i];
    const Vec s = set1(scale[kOneScale ? 0 : i]);
    for (int64_t d = 0; d < whole; d += kWidth) store(row + d, load(src + d) * s);
    if (whole < dim) {
      store_n(row + whole, load(src + whole) * s, static_cast<int>(dim - whole));
    }
  }
}

// store_rows as the epilogue of a product.
template <bool kOneScale, class T>
struct RowEpilogue : Epilogue {
  Rows<T> rows;
  int64_t dim;
  const float* scale;
  bool non_temporal;

  RowEpilogue(const Rows<T>& rows, int64_t dim, const float* scale, bool non_temporal)
      : Epilogue{&RowEpilogue::store_piece},
        rows(rows),
        dim(dim),
        scale(scale),
        non_temporal(non_temporal) {}

  static void store_piece(const Epilogue& epilogue, const float* piece, int row, int n, int column,
                          int vectors) {
    const auto& self = static_cast<const RowEpilogue&>(epilogue);
    Rows<T> to = self.rows.from(row);
    to.data += column;
    const int64_t columns = minimum(vectors * kWidth, self.dim - column);
    store_rows<kOneScale>(piece, vectors * kWidth, n, columns, self.scale + (kOneScale ? 0 : row),
                          to, self.non_temporal);
  }
};

// Whether rows of x may be written by non-temporal stores: whole, aligned cache lines.
VLMK_INLINE bool whole_lines(const HeadsView& x, int64_t dim) {
  return (reinterpret_cast<uintptr_t>(x.data) % 64 | static_cast<uint64_t>(dim % 16) |
          static_cast<uint64_t>(x.token_stride % 16) | static_cast<uint64_t>(x.head_stride % 16)) ==
         0;
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
