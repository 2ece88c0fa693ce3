// How q, k, v and dout lie in the panels that gemm() reads, for both kinds of Math. Included by
// attention_kernel.inl only.
//
//   pack_rows   [n tokens, dim], A of a product over dim: one element per step of dim, broadcast
//   pack_lanes  [dim, 64 tokens], B of a product over dim: tokens in lanes
//   pack_depth  [n tokens, dim], B of a product over tokens: dim in lanes
//
// Fp32 panels hold floats, whatever the storage type was; Bf16Pairs panels hold pairs of what is
// multiplied and added in one step.
#pragma once
#include "cpu/gemm.h"
#include "params.h"

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

template <class T>
VLMK_INLINE T* rows_of(const HeadsView& x, int64_t token, int64_t head) {
  return static_cast<T*>(x.data) + token * x.token_stride + head * x.head_stride;
}

template <class Math>
struct Panel {
  const typename Math::Element* data;
  ptrdiff_t ld;
};

// src [n, dim] -> dst [n, padded(dim)], zeros behind dim.
template <class T>
VLMK_NOINLINE void pack_depth(const T* src, int64_t stride, int64_t n, int64_t dim, float* dst) {
  const int64_t ld = padded(dim), whole = dim / kWidth * kWidth;
  for (int64_t i = 0; i < n; ++i, src += stride, dst += ld) {
    int64_t d = 0;
    for (; d < whole; d += kWidth) store(dst + d, load(src + d));
    if (d < dim) {
      store(dst + d, load_n(src + d, static_cast<int>(dim - d)));
      d += kWidth;
    }
    for (; d < ld; d += kWidth) store(dst + d, set1(0.f));
  }
}

template <class T>
VLMK_INLINE Panel<Fp32> pack_rows(Fp32, const T* src, int64_t stride, int64_t n, int64_t dim,
                                  float* dst) {
  if constexpr (std::is_same<T, float>::value) {
    if (n <= kInPlaceRows) return {src, stride};
  }
  pack_depth(src, stride, n, dim, dst);
  return {dst, padded(dim)};
}

// src [n <= 64, dim] -> dst [dim, 64] times sign (1 or -1); zeros in the lanes from n to a whole
// vector.
template <class T>
VLMK_NOINLINE void pack_lanes(const T* src, int64_t stride, int64_t n, int64_t dim, float sign,
                              float* dst) {
  const Vec factor = set1(sign);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t rows = minimum(kWidth, n - i);
    for (int64_t d = 0; d < dim; d += kWidth) {
      const int64_t columns = minimum(kWidth, dim - d);
      const T* from = src + i * stride + d;
      Vec r[kWidth];
      if (rows == kWidth && columns == kWidth) {
#pragma GCC unroll 16
        for (int j = 0; j < kWidth; ++j) r[j] = load(from + j * stride);
      } else {
        for (int j = 0; j < kWidth; ++j) {
          r[j] = j < rows ? load_n(from + j * stride, static_cast<int>(columns)) : set1(0.f);
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

VLMK_INLINE Panel<Bf16Pairs> pack_rows(Bf16Pairs, const BFloat16* src, int64_t stride, int64_t n,
                                       int64_t dim, uint32_t* dst) {
  if (n <= kInPlaceRows && dim % 2 == 0 && stride % 2 == 0) {
    return {reinterpret_cast<const uint32_t*>(src), stride / 2};
  }
  const int64_t ld = padded(steps_of<Bf16Pairs>(dim));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = 0; d < ld; d += 16) {
      _mm512_storeu_si512(dst + i * ld + d, load_row(src + i * stride, minimum(2 * d, dim), dim));
    }
  }
  return {dst, ld};
}

// dst [dim / 2, 64]: pairs along dim.
VLMK_NOINLINE void pack_lanes(const BFloat16* src, int64_t stride, int64_t n, int64_t dim,
                              float sign, uint32_t* dst) {
  const __m512i flip = _mm512_set1_epi32(sign < 0 ? static_cast<int>(0x80008000u) : 0);
  const int64_t pairs = steps_of<Bf16Pairs>(dim);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t rows = minimum(kWidth, n - i);
    for (int64_t d = 0; d < pairs; d += kWidth) {
      Vec r[kWidth];
      for (int j = 0; j < kWidth; ++j) {
        r[j] = j < rows ? _mm512_castsi512_ps(
                              _mm512_xor_si512(flip, load_row(src + (i + j) * stride, 2 * d, dim)))
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
VLMK_NOINLINE void pack_depth(const BFloat16* src, int64_t stride, int64_t n, int64_t dim,
                              uint32_t* dst) {
  const int64_t ld = padded(dim);
  for (int64_t i = 0; i < n; i += 2, dst += ld) {
    const BFloat16* a = src + i * stride;
    for (int64_t d = 0; d < ld; d += 16) {
      const int64_t left = dim - d;
      const __mmask16 mask = left >= 16 ? 0xffff : first_lanes(static_cast<int>(left));
      const __m256i low = _mm256_maskz_loadu_epi16(mask, a + d);
      const __m256i high =
          i + 1 < n ? _mm256_maskz_loadu_epi16(mask, a + stride + d) : _mm256_setzero_si256();
      _mm512_storeu_si512(dst + d, interleave(low, high));
    }
  }
}

#endif

VLMK_INLINE void copy(const float* src, int64_t n, float* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = src[i];
}

// src [n, padded(dim)], row i times scale[i] (or scale[0] if kOneScale) -> dst [n, dim]. `past`:
// by stores that leave the cache alone; rows are whole lines then.
template <bool kOneScale, class T>
VLMK_NOINLINE void store_rows(const float* src, int64_t n, int64_t dim, const float* scale, T* dst,
                              int64_t stride, bool past) {
  const int64_t ld = padded(dim), whole = dim / kWidth * kWidth;
  if constexpr (std::is_same<T, float>::value) {
    if (past) {
      for (int64_t i = 0; i < n; ++i, src += ld, dst += stride) {
        const Vec s = set1(scale[kOneScale ? 0 : i]);
        for (int64_t d = 0; d < whole; d += kWidth) stream(dst + d, load(src + d) * s);
      }
      return;
    }
  }
  for (int64_t i = 0; i < n; ++i, src += ld, dst += stride) {
    const Vec s = set1(scale[kOneScale ? 0 : i]);
    for (int64_t d = 0; d < whole; d += kWidth) store(dst + d, load(src + d) * s);
    if (whole < dim) {
      store_n(dst + whole, load(src + whole) * s, static_cast<int>(dim - whole));
    }
  }
}

// Whether rows of x may be written past the caches: whole, aligned cache lines.
VLMK_INLINE bool whole_lines(const HeadsView& x, int64_t dim) {
  return (reinterpret_cast<uintptr_t>(x.data) % 64 | static_cast<uint64_t>(dim % 16) |
          static_cast<uint64_t>(x.token_stride % 16) | static_cast<uint64_t>(x.head_stride % 16)) ==
         0;
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
