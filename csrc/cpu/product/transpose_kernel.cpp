// A dense copy of the transpose of a 16-bit matrix, in squares of 32: with AVX-512 in registers, by
// five exchanges of square halves (Eklundh, doi 10.1109/T-C.1972.223584), else by way of a buffer.
#include <omp.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "cpu/product/product.h"
#include "cpu/simd.h"

#if !defined(__AVX512BF16__)  // those of avx512 serve there
namespace vlmk::VLMK_ISA {
namespace {

constexpr int64_t kSide = 32;
constexpr int64_t kParallelFrom = 1 << 14;  // elements

#if defined(__AVX512BW__)
struct Exchange {
  alignas(64) std::array<uint16_t, kSide> low, high;  // lanes of two rows, counted through both
};

constexpr Exchange exchange(int distance) {
  Exchange e{};
  for (int i = 0; i < kSide; ++i) {
    e.low[i] = static_cast<uint16_t>(i & distance ? kSide + (i ^ distance) : i);
    e.high[i] = static_cast<uint16_t>(i & distance ? kSide + i : i ^ distance);
  }
  return e;
}

VLMK_INLINE void square(const uint16_t* from, int64_t from_row, uint16_t* to, int64_t to_row) {
  static constexpr std::array<Exchange, 5> kExchanges = {exchange(1), exchange(2), exchange(4),
                                                         exchange(8), exchange(16)};
  __m512i r[kSide];
#pragma GCC unroll 32
  for (int i = 0; i < kSide; ++i) r[i] = _mm512_loadu_si512(from + i * from_row);
#pragma GCC unroll 5
  for (int s = 0; s < 5; ++s) {
    const __m512i low = _mm512_load_si512(kExchanges[s].low.data());
    const __m512i high = _mm512_load_si512(kExchanges[s].high.data());
#pragma GCC unroll 32
    for (int i = 0; i < kSide; ++i) {
      if (i & 1 << s) continue;
      const __m512i a = r[i], b = r[i | 1 << s];
      r[i] = _mm512_permutex2var_epi16(a, low, b);
      r[i | 1 << s] = _mm512_permutex2var_epi16(a, high, b);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kSide; ++i) _mm512_storeu_si512(to + i * to_row, r[i]);
}
#endif

void part(const uint16_t* from, int64_t from_row, int64_t rows, int64_t columns, uint16_t* to,
          int64_t to_row) {
#if defined(__AVX512BW__)
  if (rows == kSide && columns == kSide) return square(from, from_row, to, to_row);
#endif
  uint16_t turned[kSide][kSide];
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) turned[j][i] = from[i * from_row + j];
  }
  for (int64_t j = 0; j < columns; ++j) {
    std::memcpy(to + j * to_row, turned[j], static_cast<size_t>(rows) * sizeof(uint16_t));
  }
}

}  // namespace

void transpose_16(const TransposeParams& p) {
  const int64_t strips = (p.columns + kSide - 1) / kSide;
#pragma omp parallel for schedule(static) if (p.rows * p.columns >= kParallelFrom)
  for (int64_t s = 0; s < strips; ++s) {
    const int64_t column = s * kSide, columns = std::min(kSide, p.columns - column);
    for (int64_t row = 0; row < p.rows; row += kSide) {
      part(p.from + row * p.from_row + column, p.from_row, std::min(kSide, p.rows - row), columns,
           p.to + column * p.rows + row, p.rows);
    }
  }
}

}  // namespace vlmk::VLMK_ISA
#endif
