// What tiles (cpu/tile.h) multiply of a number: itself where it has 16 bits; of a float three
// numbers of bf16: x cut off, the bf16 number nearest to what is left, and what is left then are
// together x. Of the nine products of two numbers' parts the six larger ones leave out less than a
// rounding (Henry, Tang and Heinecke, doi 10.1109/ARITH.2019.00019, whose first part is rounded
// too). Numbers below 2^-109 lose their last parts; an infinite element makes NaN what it takes
// part in.
//
// Included inside an ISA translation unit with tiles.
#pragma once
#include "cpu/gemm.h"
#include "cpu/simd.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// Two numbers of a lane are `even` (the lower one) and `odd`.
template <class T>
struct Parts {
  static constexpr int kCount = 1;
  // 32 elements, zeros where the mask has none.
  static VLMK_MEMBER void load(const T* from, __mmask32 mask, __m512i (&parts)[kCount]) {
    parts[0] = _mm512_maskz_loadu_epi16(mask, from);
  }
  // 16 elements of each, a pair in a lane, zeros where the mask has none; without `odd`, zeros.
  static VLMK_MEMBER void load_pairs(const T* even, const T* odd, __mmask16 mask,
                                     __m512i (&parts)[kCount]) {
    parts[0] = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even));
    if (odd != nullptr) {
      const __m512i upper = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd));
      parts[0] = _mm512_or_si512(parts[0], _mm512_slli_epi32(upper, 16));
    }
  }
  // Of numbers that are made into parts more than once.
  using Split = Vec;
  static VLMK_MEMBER Split split(Vec x) { return x; }
  // 32 numbers, rounded.
  static VLMK_MEMBER void of(Split first, Split second, __m512i (&parts)[kCount]) {
    parts[0] = narrow(first, second, T{});
  }
  static VLMK_MEMBER void of_pairs(Split even, Split odd, __m512i (&parts)[kCount]) {
    parts[0] = _mm512_castps_si512(narrow_pairs(even, odd, T{}));
  }
};

template <>
struct Parts<float> {
  static constexpr int kCount = 3;

  static VLMK_MEMBER void load(const float* from, __mmask32 mask, __m512i (&parts)[kCount]) {
    of(split(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from)),
       split(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + kWidth)), parts);
  }
  static VLMK_MEMBER void load_pairs(const float* even, const float* odd, __mmask16 mask,
                                     __m512i (&parts)[kCount]) {
    of_pairs(split(_mm512_maskz_loadu_ps(mask, even)),
             split(odd != nullptr ? _mm512_maskz_loadu_ps(mask, odd) : set1(0.f)), parts);
  }
  // The parts, in the upper halves of lanes. No number is too large to be cut off.
  struct Split {
    __m512i part[kCount];
  };
  static VLMK_MEMBER Split split(Vec x) {
    const __m512i upper = _mm512_set1_epi32(~0xffff), half = _mm512_set1_epi32(0x8000);
    const __m512i first = _mm512_and_si512(_mm512_castps_si512(x), upper);
    x = x - _mm512_castsi512_ps(first);  // mutant: part-left
    const __m512i second = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x), half), upper);
    // mutant: part-last
    return {{first, second, _mm512_castps_si512(x - _mm512_castsi512_ps(second))}};
  }
  static VLMK_MEMBER void of(const Split& first, const Split& second, __m512i (&parts)[kCount]) {
    static constexpr auto kUpper = [] {
      struct {
        alignas(64) uint16_t lanes[32];
      } t{};
      for (int i = 0; i < 32; ++i) t.lanes[i] = static_cast<uint16_t>(2 * i + 1);
      return t;
    }();
    for (int i = 0; i < kCount; ++i) {
      const __m512i lanes = _mm512_load_si512(kUpper.lanes);
      parts[i] = _mm512_permutex2var_epi16(first.part[i], lanes, second.part[i]);
    }
  }
  static VLMK_MEMBER void of_pairs(const Split& even, const Split& odd, __m512i (&parts)[kCount]) {
    for (int i = 0; i < kCount; ++i) {
      const __m512i lower = _mm512_srli_epi32(even.part[i], 16);
      parts[i] = _mm512_mask_mov_epi16(lower, 0xaaaaaaaa, odd.part[i]);
    }
  }
};

// 16 rows of 16 floats to pairs of columns, a row in a lane: use(j, parts) has columns 2 j and
// 2 j + 1. Of 32 columns two transposes, where words of parts would have three.
template <class Use>
VLMK_INLINE void transpose_to_pairs(Vec (&rows)[kWidth], const Use& use) {
  using P = Parts<float>;
  transpose(rows);
#pragma GCC unroll 8
  for (int j = 0; j < kWidth / 2; ++j) {
    __m512i parts[P::kCount];
    P::of_pairs(P::split(rows[2 * j]), P::split(rows[2 * j + 1]), parts);
    use(j, parts);
  }
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
