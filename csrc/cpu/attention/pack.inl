// How q, k, v and dout lie in the panels that gemm() reads, for each kind of Math, and how results
// leave. Included by kernel.cpp only.
//
//   pack_rows   [n tokens, dim], A of a product over dim: one element per step of dim, broadcast
//   pack_lanes  [dim, 64 tokens], B of a product over dim: tokens in lanes
//   pack_depth  [n tokens, dim], B of a product over tokens: dim in lanes
//
// Fp32 panels hold floats, whatever the storage type was; those of bf16 hold pairs of what is
// multiplied and added in one step and, behind head_dim, zeros as far as tiles read (tiles.inl).
#pragma once
#include "common/params.h"
#include "cpu/gemm.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

constexpr int kBlock = kCpuBlock;  // queries in lanes; also keys per step of the online softmax
// From a row of 64 queries in lanes to the next. A tile takes 16 or 24 of them with AVX2, a line or
// two of each row: in rows 256 bytes apart these would fall into a quarter of the first-level
// cache's sets.
constexpr int kLaneRow = kWidth == 8 ? kBlock + 16 : kBlock;
// fp32 rows of one block of queries are read once, so where they are; more often: packed, because
// rows a token apart fall into few sets of the cache.
constexpr int64_t kInPlaceRows = 64;

// Whether the backward of a segment adds P dP of its keys, which are one block, and reads no `out`.
VLMK_INLINE bool needs_no_out([[maybe_unused]] int64_t length) {
#if defined(VLMK_TILES)
  return false;
#else
  return length <= kBlock;
#endif
}

VLMK_INLINE int vectors_of(int64_t n) { return static_cast<int>((n + kWidth - 1) / kWidth); }
// Leading dimension of packed rows: whole cache lines.
VLMK_INLINE int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }
VLMK_INLINE int64_t whole_blocks(int64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }
// Tokens of a panel of pairs: tiles read whole ones.
VLMK_INLINE int64_t whole_tiles(int64_t n) {
#if defined(VLMK_TILES)
  return (n + 31) / 32 * 32;
#else
  return n;
#endif
}
// Leading dimension of packed rows of pairs: whole tiles.
VLMK_INLINE int64_t padded_pairs(int64_t dim) { return (dim + 31) / 32 * 16; }
// Elements from a packed row to the next.
template <class Math>
VLMK_INLINE int64_t row_ld(int64_t dim) {
  return Math::kStep == 1 ? padded(dim) : padded_pairs(dim);
}
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

// The rows of a query head, of q or dq.
template <class T>
VLMK_INLINE Rows<T> query_rows(const AttentionParams& p, const HeadsView& q, int64_t place,
                               int64_t head) {
  Rows<T> rows = rows_of<T>(q, p.order, place, head);
  rows.data += head / (p.heads / p.kv_heads) * p.q_group_gap;
  return rows;
}

template <class Math>
struct Panel {
  const typename Math::Element* data;
  ptrdiff_t ld;
};

// Called after every row or two: prefetches some cache lines.
struct NoFetch {
  VLMK_MEMBER void operator()() const {}
};
struct Fetch {
  Prefetcher& prefetcher;
  int lines;
  VLMK_MEMBER void operator()() const { prefetcher.fetch(lines); }
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

// `once`: the product reads them once.
template <class T>
VLMK_INLINE Panel<Fp32> pack_rows(Fp32, const Rows<const T>& rows, int64_t n, int64_t dim,
                                  float* dst, bool once) {
  if constexpr (std::is_same<T, float>::value) {
    const bool dense = rows.stride == padded(dim);
    if ((once || dense) && !rows.order) return {rows.data, rows.stride};
  }
  pack_depth(rows, n, dim, dst);
  return {dst, padded(dim)};
}

// rows [n <= 64, dim] -> dst [dim, kLaneRow] times sign (1 or -1); zeros in the lanes from n to a
// whole vector.
template <class T>
VLMK_NOINLINE void pack_lanes(const Rows<T>& rows, int64_t n, int64_t dim, float sign, float* dst) {
  const Vec factor = set1(sign);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t present = minimum(kWidth, n - i);
    T* row[kWidth];
    for (int j = 0; j < kWidth; ++j) row[j] = rows[i + minimum(j, present - 1)];
    for (int64_t d = 0; d < dim; d += kWidth) {
      const int64_t columns = minimum(kWidth, dim - d);
      Vec r[kWidth];
      if (present == kWidth && columns == kWidth) {
#pragma GCC unroll 16
        for (int j = 0; j < kWidth; ++j) r[j] = load(row[j] + d);
      } else {
        for (int j = 0; j < kWidth; ++j) {
          r[j] = j < present ? load_n(row[j] + d, static_cast<int>(columns)) : set1(0.f);
        }
      }
      transpose(r);
      float* to = dst + d * kLaneRow + i;
      if (columns == kWidth) {
#pragma GCC unroll 16
        for (int j = 0; j < kWidth; ++j) store(to + j * kLaneRow, r[j] * factor);
      } else {
        for (int j = 0; j < columns; ++j) store(to + j * kLaneRow, r[j] * factor);
      }
    }
  }
}

template <class T>
class DepthPacker;  // defined where products are of pairs
#if defined(VLMK_BF16_PANELS)
// Up to 32 elements of 16 bits of a row from element d on, zeros behind dim.
template <class T>
VLMK_INLINE __m512i load_row(const T* row, int64_t d, int64_t dim) {
  return _mm512_maskz_loadu_epi16(first_words(dim - d), row + d);  // mutant: pack-row-left
}

#if !defined(VLMK_TILES)
// rows may lie where they are packed to, 2 * padded_pairs(dim) apart.
template <class Math>
VLMK_INLINE Panel<Math> pack_rows(Math, const Rows<const BFloat16>& rows, int64_t n, int64_t dim,
                                  uint32_t* dst, bool once) {
  const int64_t ld = padded_pairs(dim);
  const bool dense = rows.stride == 2 * ld;
  if ((once || dense) && dim % 2 == 0 && rows.stride % 2 == 0 && !rows.order) {
    return {reinterpret_cast<const uint32_t*>(rows.data), rows.stride / 2};
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = 0; d < ld; d += 16) {
      _mm512_storeu_si512(dst + i * ld + d, load_row(rows[i], minimum(2 * d, dim), dim));
    }
  }
  return {dst, ld};
}

// dst [dim / 2, 64], in whole fours of rows: pairs along dim.
VLMK_NOINLINE void pack_lanes(const Rows<const BFloat16>& rows, int64_t n, int64_t dim, float sign,
                              uint32_t* dst) {
  const __m512i flip = _mm512_set1_epi32(sign < 0 ? static_cast<int>(0x80008000u) : 0);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t present = minimum(kWidth, n - i);
    const __mmask16 here = first_lanes(static_cast<int>(present));
    const BFloat16* row[kWidth];
    for (int j = 0; j < kWidth; ++j) row[j] = rows[i + minimum(j, present - 1)];
    uint32_t* to = dst + i;
    const auto put = [&](const auto& load_eight) __attribute__((always_inline)) {
      __m512i columns[4];
      transpose_lanes(columns, load_eight);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j, to += kBlock) {
        _mm512_storeu_si512(to, _mm512_maskz_xor_epi32(here, flip, columns[j]));
      }
    };
    int64_t d = 0;
    for (; d + 8 <= dim; d += 8) {
      put([&](int j) __attribute__((always_inline)) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row[j] + d));
      });
    }
    if (d < dim) {
      const auto left = static_cast<__mmask8>(first_words(dim - d));
      put([&](int j)
              __attribute__((always_inline)) { return _mm_maskz_loadu_epi16(left, row[j] + d); });
    }
  }
}
#endif

// Of a permutation of two vectors: words from `first` on, of one and of the other in turn.
VLMK_INLINE __m512i load_turns(int first) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i word = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
  return _mm512_or_si512(word,
                         _mm512_slli_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(32)), 16));
}

// dst [n / 2, padded(dim)]: pairs along the tokens; behind the last one it stands again, since what
// multiplies it is 0. Each call packs the next two tokens.
template <class T>
class DepthPacker {
 public:
  VLMK_MEMBER DepthPacker(const Rows<const T>& rows, int64_t n, int64_t dim, uint32_t* dst)
      : rows_(rows), n_(n), dim_(dim), dst_(dst) {}

  VLMK_MEMBER bool done() const {
    return next_ >= whole_tiles(n_);  // mutant: pack-depth-tokens
  }
  VLMK_MEMBER void operator()() {
    if (done()) return;
    const T* const even = rows_[minimum(next_, n_ - 1)];
    const T* const odd = rows_[minimum(next_ + 1, n_ - 1)];
    const auto put = [&](int64_t d, __mmask32 mask, bool both) __attribute__((always_inline)) {
      const __m512i x = _mm512_maskz_loadu_epi16(mask, even + d);
      const __m512i y = _mm512_maskz_loadu_epi16(mask, odd + d);
      _mm512_storeu_si512(dst_ + d, _mm512_permutex2var_epi16(x, low_, y));
      if (both) _mm512_storeu_si512(dst_ + d + 16, _mm512_permutex2var_epi16(x, high_, y));
    };
    for (int64_t d = 0; d < whole_; d += 32) put(d, ~__mmask32{0}, true);
    if (whole_ < ld_) put(whole_, left_, whole_ + 16 < ld_);
    next_ += 2;
    dst_ += ld_;
  }
  VLMK_MEMBER void finish() {
    while (!done()) (*this)();
  }

 private:
  const Rows<const T> rows_;
  const int64_t n_, dim_;
  uint32_t* dst_;
  const int64_t ld_ = padded(dim_), whole_ = dim_ / 32 * 32;
  const __mmask32 left_ = first_words(dim_ - whole_);  // mutant: pack-depth-left
  const __m512i low_ = load_turns(0), high_ = load_turns(16);
  int64_t next_ = 0;
};

template <class T, class F = NoFetch>
VLMK_NOINLINE void pack_depth(const Rows<const T>& rows, int64_t n, int64_t dim, uint32_t* dst,
                              F fetch = {}) {
  for (DepthPacker<T> packer(rows, n, dim, dst); !packer.done(); fetch()) packer();
}
#endif

// pack_depth's panel in dst, or, of fp32 rows of whole vectors that `few` tiles read, those rows:
// with AVX-512 they come from the second-level cache while tiles multiply (windows on Zen 4: 1.02x;
// on an Intel core 0.96x, with AVX2 0.7 to 1.0x).
template <class Math, class T>
VLMK_INLINE Panel<Math> depth_panel(const Rows<const T>& rows, int64_t n, int64_t dim,
                                    typename Math::Element* dst, bool few) {
  if constexpr (kWidth == 16 && std::is_same<T, float>::value) {
    if (few && is_amd() && dim % kWidth == 0 && !rows.order) return {rows.data, rows.stride};
  }
  pack_depth(rows, n, dim, dst);
  return {dst, padded(dim)};
}

VLMK_INLINE void copy(const float* src, int64_t n, float* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = src[i];
}

// src [n, padded(dim)], row i times scale[i] (or scale[0] if kOneScale) -> rows [n, dim].
// `non_temporal`: rows are whole lines then.
template <bool kOneScale, class T, class F = NoFetch>
VLMK_NOINLINE void store_rows(const float* src, int64_t ld, int64_t n, int64_t dim,
                              const float* scale, const Rows<T>& rows, bool non_temporal,
                              F fetch = {}) {
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
    int64_t d = 0;
#if defined(VLMK_BF16_PANELS)
    if constexpr (sizeof(T) == 2) {
      for (; d + 2 * kWidth <= dim; d += 2 * kWidth) {
        _mm512_storeu_si512(row + d, narrow(load(src + d) * s, load(src + d + kWidth) * s, T{}));
      }
    }
#endif
    for (; d < whole; d += kWidth) store(row + d, load(src + d) * s);
    if (whole < dim) {
      store_n(row + whole, load(src + whole) * s, static_cast<int>(dim - whole));
    }
    fetch();
  }
}

// store_rows as the epilogue of a product.
template <bool kOneScale, class T>
struct RowEpilogue {
  static constexpr bool kByRows = sizeof(T) == 4;
  Rows<T> rows;
  int64_t dim;
  const float* scale;
  bool non_temporal;

  // What decides how vectors are stored is asked once for a tile, not for each of them.
  template <int kRows, int kVectors, class Finish>
  VLMK_MEMBER void put(const Finish& finish, int row, int column) const {
    const auto left = static_cast<int>(dim - column);  // elements
    const auto put_rows = [&](auto put_row) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const Vec s = set1(scale[kOneScale ? 0 : row + i]);
        const Vec(&sums)[kVectors] = finish(i);
        Vec results[kVectors];
#pragma GCC unroll 5
        for (int j = 0; j < kVectors; ++j) results[j] = sums[j] * s;
        put_row(rows[row + i] + column, results);
      }
    };
    if constexpr (std::is_same_v<T, float>) {
      if (non_temporal) {
        return put_rows([](T* to, const Vec(&results)[kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 5
          for (int j = 0; j < kVectors; ++j) stream(to + j * kWidth, results[j]);
        });
      }
    }
    if (left < kVectors * kWidth) {
      return put_rows([&](T* to, const Vec(&results)[kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 5
        for (int j = 0; j < kVectors; ++j) {
          const int64_t lanes = minimum(kWidth, left - j * kWidth);
          store_first(to + j * kWidth, results[j], static_cast<int>(lanes));
        }
      });
    }
    put_rows([](T* to, const Vec(&results)[kVectors])
                 __attribute__((always_inline)) { store_vectors(to, results); });
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
