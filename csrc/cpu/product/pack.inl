// How products pack their operands: rows of A and columns of B as tiles read them, converted to
// float32, or two bf16 numbers of consecutive depth side by side. Included by kernel.cpp only.
#pragma once

#include <cstdint>

#include "cpu/gemm.h"

#if defined(__AVX512BF16__) && !defined(VLMK_TILES)
#define VLMK_PAIRS  // here are products of bf16 by dot products, elsewhere all in float32
#endif

namespace vlmk {
namespace VLMK_ISA {
namespace {

constexpr bool kAvx2 = kWidth == 8;
constexpr int kSliver = kMaxTileVectors * kWidth;  // columns of B, as wide as a tile
constexpr int64_t kTileRows = tile_rows(kMaxTileVectors);

VLMK_INLINE int64_t parts(int64_t n, int64_t largest) { return (n + largest - 1) / largest; }
VLMK_INLINE int64_t whole_vectors(int64_t n) { return parts(n, kWidth) * kWidth; }
// n floats in an odd number of lines: packed rows or tiles so far apart fall into different sets of
// the first-level cache.
VLMK_INLINE int64_t odd_lines(int64_t n) { return 16 * (parts(n, 16) | 1); }

// Four lines ahead in a row, of which several are read at once and transposed.
template <class T>
VLMK_INLINE void fetch_ahead(const T* row) {
  if (!kAvx2) __builtin_prefetch(reinterpret_cast<const char*>(row) + 256);
}

// Has `next` fetch what is read of a part of A or B, `wide` rows of A or columns of B from `from`
// on.
template <class In>
VLMK_INLINE void list_part(Prefetcher& next, const In* from, int64_t wide, int64_t stride,
                           int64_t steps, int64_t step) {
  const bool dense = stride == 1;
  const auto size = static_cast<int64_t>(sizeof(In));
  next.add(from, (dense ? step : stride) * size, dense ? steps : wide,
           (dense ? wide : steps) * size);
}

#if !defined(VLMK_PAIRS)
// Element (i, k) of [n, depth] lies at from[i * row + k * step], one of them being 1; in `to` at
// [k * ld + i], with zeros behind n as far as a whole vector.
template <class In>
VLMK_NOINLINE void pack(const In* from, int64_t row, int64_t step, int64_t n, int64_t depth,
                        float* to, int64_t ld) {
  if (row == 1) {
    for (int64_t k = 0; k < depth; ++k) {
      each_vector(n, [&](int64_t i, int lanes) {
        store(to + k * ld + i, load_first(from + k * step + i, lanes));
      });
    }
    return;
  }
  each_vector(n, [&](int64_t i, int rows) {
    each_vector(depth, [&](int64_t k, int steps) {
      Vec r[kWidth];
#pragma GCC unroll 16
      for (int j = 0; j < kWidth; ++j) {
        const In* const x = from + (i + j) * row + k;
        r[j] = j < rows ? load_first(x, steps) : set1(0.f);
        fetch_ahead(x);
      }
      transpose(r);
#pragma GCC unroll 16
      for (int j = 0; j < kWidth; ++j) {
        if (j < steps) store(to + (k + j) * ld + i, r[j]);
      }
    });
  });
}

// The first n of dense columns (row == 1), n being whole slivers, which follow each other in `to`.
template <class In>
VLMK_NOINLINE void pack_slivers(const In* from, int64_t step, int64_t n, int64_t depth, float* to) {
  for (int64_t k = 0; k < depth; ++k, to += kSliver) {
    fetch_row(from + (k + kAhead) * step, n);
    float* sliver = to;
    for (int64_t i = 0; i < n; i += kSliver, sliver += depth * kSliver) {
      for (int j = 0; j < kSliver; j += kWidth) store(sliver + j, load(from + k * step + i + j));
    }
  }
}

// Dense rows (step == 1): element (i, k) at [i * ld + k].
template <class In>
VLMK_NOINLINE void pack_rows(const In* from, int64_t row, int64_t n, int64_t depth, float* to,
                             int64_t ld) {
  for (int64_t i = 0; i < n; ++i) {
    each_vector(depth, [&](int64_t k, int lanes) {
      store(to + i * ld + k, load_first(from + i * row + k, lanes));
    });
  }
}

// With AVX2. Dense columns (row == 1), for tiles of kTileRows = R: element (i, k) at
// [i / R * ld + k * R + i % R], zeros behind n as far as a whole tile.
template <class In>
VLMK_NOINLINE void pack_tiles(const In* from, int64_t step, int64_t n, int64_t depth, float* to,
                              int64_t ld) {
  constexpr size_t kSize = kTileRows * sizeof(float);
  for (int64_t k = 0; k < depth; ++k, to += kTileRows) {
    fetch_row(from + (k + kAhead) * step, n);
    float* tile = to;
    each_vector(n, [&](int64_t i, int lanes) {
      const Vec v = load_first(from + k * step + i, lanes);
      for (int64_t done = 0; done < lanes; done += kTileRows, tile += ld) {
        __builtin_memcpy(tile, reinterpret_cast<const float*>(&v) + done, kSize);
      }
    });
  }
}

#else
// Element (i, k) of [n, depth] lies at from[i * row + k * step], one of them being 1; in `to` 2 k
// and 2 k + 1 side by side at [k * ld + i], with zeros behind n as far as a whole vector and behind
// an odd depth.
VLMK_NOINLINE void pack(const BFloat16* from, int64_t row, int64_t step, int64_t n, int64_t depth,
                        uint32_t* to, int64_t ld) {
  if (row == 1) {
    for (int64_t k = 0; k < depth; k += 2, to += ld) {
      const BFloat16* const even = from + k * step;
      each_vector(n, [&](int64_t i, int lanes) {
        const __mmask16 mask = first_lanes(lanes), odd = k + 1 < depth ? mask : __mmask16{0};
        _mm512_storeu_si512(to + i, interleave(_mm256_maskz_loadu_epi16(mask, even + i),
                                               _mm256_maskz_loadu_epi16(odd, even + step + i)));
      });
    }
    return;
  }
  each_vector(n, [&](int64_t i, int rows) {
    for (int64_t k = 0; k < depth; k += 2 * kWidth) {
      const int64_t left = depth - k, pairs = minimum(kWidth, parts(left, 2));
      Vec r[kWidth];
#pragma GCC unroll 16
      for (int j = 0; j < kWidth; ++j) {
        const BFloat16* const x = from + (i + j) * row + k;
        r[j] = j < rows ? _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(first_words(left), x))
                        : set1(0.f);
        fetch_ahead(x);
      }
      transpose(r);
#pragma GCC unroll 16
      for (int j = 0; j < kWidth; ++j) {
        if (j < pairs) _mm512_storeu_ps(to + (k / 2 + j) * ld + i, r[j]);
      }
    }
  });
}

// The first n of dense columns (row == 1), n being whole slivers, which follow each other in `to`.
VLMK_NOINLINE void pack_slivers(const BFloat16* from, int64_t step, int64_t n, int64_t depth,
                                uint32_t* to) {
  const int64_t size = parts(depth, 2) * kSliver;
  for (int64_t k = 0; k < depth; k += 2, to += kSliver) {
    const BFloat16* const even = from + k * step;
    const __mmask16 odd = k + 1 < depth ? first_lanes(kWidth) : __mmask16{0};
    fetch_row(even + kAhead * step, n);
    fetch_row(even + (kAhead + 1) * step, n);
    uint32_t* sliver = to;
    for (int64_t i = 0; i < n; i += kSliver, sliver += size) {
      for (int j = 0; j < kSliver; j += kWidth) {
        const BFloat16* const x = even + i + j;
        _mm512_storeu_si512(
            sliver + j, interleave(_mm256_loadu_epi16(x), _mm256_maskz_loadu_epi16(odd, x + step)));
      }
    }
  }
}
#endif

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
