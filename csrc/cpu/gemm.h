// Small matrix products C = A B on packed panels in cache: the one compute primitive of the
// attention kernels. Included after simd.h, inside an ISA translation unit.
//
// Speed of light: a tile of R rows x V vectors does R*V multiply-adds per step of the depth for V
// loads and R broadcasts. Two multiply-adds and two loads a cycle, latency 4: R*V >= 8 chains, R*V
// >= R+V loads.
#pragma once
#include <type_traits>

#include "cpu/prefetcher.h"
#include "cpu/simd.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// What one step of the depth is. An element of A is broadcast, one of B stands in each lane.
struct Fp32 {
  using Element = float;
  static constexpr int kStep = 1;  // of the depth, per element
  static VLMK_MEMBER Vec mac(Vec x, Vec y, Vec sum) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    // In assembly: a tile fills all 16 registers, and GCC read vectors of B from memory for each
    // row and moved sums between registers (10% slower).
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y));
    return sum;
#else
    return fma(x, y, sum);
#endif
  }
  static VLMK_MEMBER Vec broadcast(const float* p) { return set1(*p); }
};
#if defined(__AVX512BF16__) || defined(VLMK_TILES)
#define VLMK_BF16_PANELS
// Words of a and b alternating: a's lane i below b's lane i.
VLMK_INLINE __m512i interleave(__m256i a, __m256i b) {
  const __m512i wide = _mm512_cvtepu16_epi32(a);
  return _mm512_or_si512(wide, _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

// Two vectors rounded to a 16-bit type: lane by lane, `even`'s below `odd`'s.
template <class T>
VLMK_INLINE Vec narrow_pairs(Vec even, Vec odd, T type) {
  return _mm512_castsi512_ps(interleave(narrow(even, type), narrow(odd, type)));
}

// The same, even's 16 in front of odd's.
template <class T>
VLMK_INLINE __m512i narrow(Vec first, Vec second, T type) {
  const __m512i half = _mm512_castsi256_si512(narrow(first, type));
  return _mm512_inserti64x4(half, narrow(second, type), 1);
}

#if defined(__AVX512BF16__)
VLMK_INLINE Vec narrow_pairs(Vec even, Vec odd, BFloat16) {
  const __m512i in_turn =
      interleave(_mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                 _mm256_setr_epi16(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31));
  const auto halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(in_turn, halves));
}
VLMK_INLINE __m512i narrow(Vec first, Vec second, BFloat16) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
}
#endif

VLMK_INLINE __mmask32 first_words(int64_t n) {
  return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
}
#endif

#if defined(__AVX512BF16__)
// Two bf16 values of consecutive depth in each element, products summed in fp32.
struct Bf16Pairs {
  using Element = uint32_t;
  static constexpr int kStep = 2;
  static VLMK_MEMBER Vec mac(Vec x, Vec y, Vec sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y));
  }
  static VLMK_MEMBER Vec broadcast(const uint32_t* p) {
    int bits;  // memory may hold bf16 objects at any alignment of 2
    std::memcpy(&bits, p, sizeof bits);
    return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
  }
  static VLMK_MEMBER Vec pair(Vec even, Vec odd) { return narrow_pairs(even, odd, BFloat16{}); }
  static VLMK_MEMBER Vec even(Vec pairs) { return lower(_mm512_castps_si512(pairs), BFloat16{}); }
  static VLMK_MEMBER Vec odd(Vec pairs) { return upper(_mm512_castps_si512(pairs), BFloat16{}); }
};
#endif

// AVX-512: 6 x 4 accumulators + 4 of B + 1 broadcast = 29 of 32 registers, or 8 x 3 and 8 x 2, of
// which 64 rows leave none over. bf16 takes 5 x 5 for rows of 80: fewer, longer tiles (windows on
// Zen 5 1.04x; fp32's forward 0.96x).
// AVX2: 4 x 3 + 3 + 1 = 16 of 16: a load less than 6 x 2, and fewer lines of A (1.02 to 1.06x, most
// where another guest uses the same core). SSE2 and NEON: 6 x 2 + 2 + 1 = 15 of 16 (NEON has 32).
constexpr int kMaxTileVectors = kWidth == 16 ? 4 : kWidth == 8 ? 3 : 2;
constexpr int tile_rows(int vectors) {
  if (vectors == 1) return 12;  // more chains
  if (vectors == 5) return 5;
  if (kWidth == 8 && vectors == 3) return 4;
  return kMaxTileVectors == 4 && vectors < 4 ? 8 : 6;
}

constexpr int kMaxTileRows = tile_rows(1);

// Multiply-adds of a step of the widest tile.
constexpr int64_t kStepSize = tile_rows(kMaxTileVectors) * kMaxTileVectors * kWidth;

// What is added to a sum once it is complete: nothing, C, C with row i multiplied by row_scale[i],
// or column j's bias[j]. A tile that started from C would wait for it (bf16: 0.95x).
enum class Add { kNothing, kC, kScaledC, kBias };

// Of a block on the diagonal of a causal segment, what the mask leaves of a product.
enum class Causal {
  kAll,
  kColumnsFromRow,  // rows are keys, columns queries: of C those tiles where a query sees a key
  kStepsUpToRow,    // rows are queries, steps keys: A is 0 behind step i of row i
  kStepsFromRow,    // rows are keys, steps queries: A is 0 before step i of row i
};

// Vectors to whole ones of T, rounded; of a 16-bit type two at a time where a vector holds both.
template <int kVectors, class T>
VLMK_INLINE void store_vectors(T* to, const Vec (&x)[kVectors]) {
  int j = 0;
#if defined(VLMK_BF16_PANELS)
  if constexpr (sizeof(T) == 2) {
#pragma GCC unroll 2
    for (; j + 2 <= kVectors; j += 2) {
      _mm512_storeu_si512(to + j * kWidth, narrow(x[j], x[j + 1], T{}));
    }
  }
#endif
#pragma GCC unroll 5
  for (; j < kVectors; ++j) store(to + j * kWidth, x[j]);
}

// An epilogue takes a tile of C from the registers: put<rows, vectors>(finish, row, column), where
// finish(i) is row i's sums [vectors], to be asked for once, in order. The product starts from 0
// then, and C is not touched. With kByRows a tile ends row by row (see there). This one is none.
struct NoEpilogue {
  static constexpr bool kByRows = true;
};
// None either, for products of many steps, whose tiles end seldom.
struct WholeTiles : NoEpilogue {
  static constexpr bool kByRows = false;
};

// A's element (row i, step k): a[i * lda + k], or a[k * lda + i] if kByColumns.
template <class Math>
struct GemmArgs {
  const typename Math::Element* a;
  ptrdiff_t lda;
  const typename Math::Element* b;  // (step k, column j): b[k * ldb + j]
  ptrdiff_t ldb;
  float* c;  // (row i, column j): c[i * ldc + j]
  ptrdiff_t ldc;
  int rows;
  int vectors;  // of columns
  int depth;    // elements, kStep of the depth each
  Add add;
  const float* row_scale;  // [rows], for Add::kScaledC
  Causal causal = Causal::kAll;
  const float* bias = nullptr;  // [vectors * kWidth], for Add::kBias
  // Whether C lies in memory, not in a cache: a tile fetches its lines before its first step.
  bool far = false;
};

// The next row of a tile, hidden from the compiler, which would compute the addresses of all rows
// first and keep them on the stack (long segments: 1.02x).
VLMK_INLINE float* next_row(float* row, ptrdiff_t ld) {
  row += ld;
  asm("" : "+r"(row));
  return row;
}

// The end of a tile whose sums go to C: what g.add names is added to them.
template <int kRows, int kVectors, class Math, class Finish>
VLMK_INLINE void store_sums(const GemmArgs<Math>& g, int row, int column, const Finish& finish) {
  const auto put = [&](const auto& add) __attribute__((always_inline)) {
    float* to = g.c + row * g.ldc + column;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i, to = next_row(to, g.ldc)) {
      const Vec(&sums)[kVectors] = finish(i);
#pragma GCC unroll 5
      for (int j = 0; j < kVectors; ++j) store(to + j * kWidth, add(sums[j], to, i, j));
    }
  };
  switch (g.add) {
    case Add::kNothing:
      return put([](Vec sum, const float*, int, int)
                     __attribute__((always_inline)) { return sum; });
    case Add::kC:
      return put([](Vec sum, const float* to, int, int j)
                     __attribute__((always_inline)) { return load(to + j * kWidth) + sum; });
    case Add::kScaledC:
      return put([&](Vec sum, const float* to, int i, int j) __attribute__((always_inline)) {
        return fma(load(to + j * kWidth), set1(g.row_scale[row + i]), sum);
      });
    case Add::kBias:
      return put([&](Vec sum, const float*, int, int j) __attribute__((always_inline)) {
        return load(g.bias + column + j * kWidth) + sum;
      });
  }
}

template <class Math, bool kByColumns, class Epilogue, int kRows, int kVectors>
VLMK_NOINLINE void tile(const GemmArgs<Math>& g, int row, int column, Prefetcher& prefetcher,
                        const Epilogue& epilogue) {
  constexpr bool kLeaves = !std::is_base_of_v<NoEpilogue, Epilogue>;
  Vec acc[kRows][kVectors];
  float* const c = g.c + row * g.ldc + column;
  const ptrdiff_t ldc = g.ldc;
  if (g.far) {
    float* to = c;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i, to = next_row(to, ldc)) {
#pragma GCC unroll 5
      for (int j = 0; j < kVectors; ++j) __builtin_prefetch(to + j * kWidth, 1);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 5
    for (int j = 0; j < kVectors; ++j) acc[i][j] = set1(0.f);
  }
  const ptrdiff_t lda = g.lda, ldb = g.ldb;
  const typename Math::Element* a = g.a + (kByColumns ? row : row * lda);
  const typename Math::Element* b = g.b + column;
  int depth = g.depth;
  if (g.causal == Causal::kStepsUpToRow) {
    depth = minimum(depth, (row + kRows + Math::kStep - 1) / Math::kStep);
  } else if (g.causal == Causal::kStepsFromRow) {
    const int skipped = row / Math::kStep;
    a += skipped * (kByColumns ? lda : 1);
    b += skipped * ldb;
    depth -= skipped;
  }
  const auto step = [&]() __attribute__((always_inline)) {
    Vec y[kVectors];
#pragma GCC unroll 5
    for (int j = 0; j < kVectors; ++j) y[j] = load(reinterpret_cast<const float*>(b) + j * kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec x = Math::broadcast(kByColumns ? a + i : a + i * lda);
#pragma GCC unroll 5
      for (int j = 0; j < kVectors; ++j) acc[i][j] = Math::mac(x, y[j], acc[i][j]);
    }
    a += kByColumns ? lda : 1;
    b += ldb;
  };
  // By rows, the last steps go row by row, and a row leaves when it has had them: Zen 4 stores a
  // vector of 64 bytes in two cycles, beside multiply-adds if it has just been summed, else in
  // their place (attention 1.01 to 1.03x). Where a row is rounded to 16 bits nothing is gained, and
  // in long products registers are lost (fp32: 0.99x).
  constexpr int kLast = kWidth == 16 && Epilogue::kByRows ? 3 : 0;
  const int last = depth >= kLast ? kLast : 0, whole = depth - last;
  int k = 0;
  if (Math::kStep == 1 && prefetcher.spread() && prefetcher.busy()) {
    for (; k + Prefetcher::kSpread <= whole; k += Prefetcher::kSpread) {
      prefetcher.step();
#pragma GCC unroll 8
      for (int i = 0; i < Prefetcher::kSpread; ++i) step();
    }
  } else if (prefetcher.busy()) {
    for (; k + 2 <= whole; k += 2) {
      prefetcher.step();
      step();
      if constexpr (Math::kStep == 2) prefetcher.step();  // half as many steps for as many lines
      step();
    }
  }
  constexpr int kUnroll = kWidth == 8 ? 4 : 2;
  for (; k + kUnroll <= whole; k += kUnroll) {
#pragma GCC unroll 4
    for (int i = 0; i < kUnroll; ++i) step();
  }
  for (; k < whole; ++k) step();

  const auto leave = [&](const auto& finish) __attribute__((always_inline)) {
    if constexpr (kLeaves) {
      epilogue.template put<kRows, kVectors>(finish, row, column);
    } else {
      store_sums<kRows, kVectors>(g, row, column, finish);
    }
  };
  if (last == 0) {
    return leave([&](int i) __attribute__((always_inline)) -> Vec(&)[kVectors] { return acc[i]; });
  }
  Vec y[kVectors];  // of the first of these steps; there are no registers for more
#pragma GCC unroll 5
  for (int j = 0; j < kVectors; ++j) y[j] = load(reinterpret_cast<const float*>(b) + j * kWidth);
  leave([&](int i) __attribute__((always_inline)) -> Vec(&)[kVectors] {
    asm("" : "+r"(a), "+r"(b));  // or all rows' vectors would be loaded first
#pragma GCC unroll 3
    for (int s = 0; s < kLast; ++s) {
      const Vec x = Math::broadcast(kByColumns ? a + s * lda + i : a + i * lda + s);
      const auto* of_step = reinterpret_cast<const float*>(b + s * ldb);
#pragma GCC unroll 5
      for (int j = 0; j < kVectors; ++j) {
        acc[i][j] = Math::mac(x, s == 0 ? y[j] : load(of_step + j * kWidth), acc[i][j]);
      }
    }
    return acc[i];
  });
}

template <class Math, bool kByColumns, int kVectors, class Epilogue>
VLMK_INLINE void column_group(const GemmArgs<Math>& g, int column, Prefetcher& prefetcher,
                              const Epilogue& epilogue) {
  constexpr int kRows = tile_rows(kVectors);
  int row = 0, end = g.rows;
  if (g.causal == Causal::kColumnsFromRow) end = minimum(end, column + kVectors * kWidth);
  const auto tiles = [&](auto rows) __attribute__((always_inline)) {
    tile<Math, kByColumns, Epilogue, decltype(rows)::value, kVectors>(g, row, column, prefetcher,
                                                                      epilogue);
    row += rows;
  };
  while (row + kRows <= end) tiles(std::integral_constant<int, kRows>{});
  if (kRows > 6 && row + 6 <= end) tiles(std::integral_constant<int, 6>{});
  if (row + 4 <= end) tiles(std::integral_constant<int, 4>{});
  if (row + 2 <= end) tiles(std::integral_constant<int, 2>{});
  if (row < end) tiles(std::integral_constant<int, 1>{});
}

// Every element of C is one sum over the depth in order, whatever the tiling: results don't depend
// on how rows and columns are split.
template <class Math, bool kByColumns, class Epilogue = NoEpilogue>
VLMK_NOINLINE void gemm(const GemmArgs<Math>& g, Prefetcher& prefetcher,
                        const Epilogue& epilogue = {}) {
  if constexpr (Math::kStep == 2) {
    if (g.vectors == 5) return column_group<Math, kByColumns, 5>(g, 0, prefetcher, epilogue);
  }
  int done = 0;
  for (int groups = (g.vectors + kMaxTileVectors - 1) / kMaxTileVectors; groups > 0; --groups) {
    const int left = g.vectors - done;
    const int vectors = (left + groups - 1) / groups;  // even groups: 5 = 3 + 2, not 4 + 1
    const int column = done * kWidth;
    if constexpr (kMaxTileVectors == 4) {
      if (vectors == 4) column_group<Math, kByColumns, 4>(g, column, prefetcher, epilogue);
    }
    if constexpr (kMaxTileVectors >= 3) {
      if (vectors == 3) column_group<Math, kByColumns, 3>(g, column, prefetcher, epilogue);
    }
    if (vectors == 2) column_group<Math, kByColumns, 2>(g, column, prefetcher, epilogue);
    if (vectors == 1) column_group<Math, kByColumns, 1>(g, column, prefetcher, epilogue);
    done += vectors;
  }
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
