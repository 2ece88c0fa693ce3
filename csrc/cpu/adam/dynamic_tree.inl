// 8-bit moments of Adam with one scale per block of 256 elements: "8-bit Optimizers via Block-wise
// Quantization", Dettmers et al. 2022 (arXiv:2110.02861). The code of a magnitude y in [0, 1], with
// N = 7 bits beside a sign or N = 8 without, is a dynamic tree: its leading one stands at bit i for
// the decade [10^(i-N), 10^(i-N+1)), and the i bits below it divide that decade evenly:
//
//   code = 2^i + j, 0 <= j < 2^i     value = 10^(i-N+1) (1/10 + 9/10 (j + 1/2) / 2^i)
//
// with 0 for 0 and, unlike the middle of its bin, 1 for the largest code, so that a block's largest
// element is kept exactly. vlmkernels/optim/blockwise.py has the same in plain torch.
//
// Like simd.h for the instruction set of the including file.
#pragma once
#include <cmath>

#include "cpu/simd.h"

namespace vlmk {

namespace VLMK_ISA {
namespace {

VLMK_INLINE VecInt load_codes(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecInt>(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<VecInt>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  VecInt x;
  for (int i = 0; i < kWidth; ++i) x[i] = p[i];
  return x;
#endif
}

VLMK_INLINE void store_codes(uint8_t* p, VecInt x) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
#else
  for (int i = 0; i < kWidth; ++i) p[i] = static_cast<uint8_t>(x[i]);
#endif
}

// table[code], 256 floats.
VLMK_INLINE Vec look_up(const float* table, VecInt code) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return _mm256_i32gather_ps(table, reinterpret_cast<__m256i>(code), 4);
#else
  Vec x;
  for (int i = 0; i < kWidth; ++i) x[i] = table[code[i]];
  return x;
#endif
}

// Decimal powers and their uses, rounded once.
template <int kBits>
struct Decades {
  float edge[kBits];            // lower edge of decade i
  alignas(64) float slope[16];  // (y slope - 2^i / 9) is j
  // For vectors of 16, by the binary exponent of y from -31 to 0: the decade of the smallest such
  // y, and where the next decade starts.
  alignas(64) int32_t first[32];
  alignas(64) float next[32];
  // value = code step + start, by the bits below the code's leading one plus 15 (mod 16).
  alignas(64) float step[16];
  alignas(64) float start[16];
  Decades() : slope{}, step{}, start{} {
    double power = 1;  // 10^(N-1-i)
    for (int i = kBits - 1; i >= 0; --i, power *= 10) {
      edge[i] = static_cast<float>(0.1 / power);
      slope[i] = static_cast<float>(power * (1 << i) / 0.9);
      const double one = 0.9 / (1 << i) / power;
      step[(i + 15) % 16] = static_cast<float>(one);
      start[(i + 15) % 16] = static_cast<float>(0.1 / power + one * (0.5 - (1 << i)));
    }
    for (int e = 0; e < 32; ++e) {
      int i = 0;
      while (i + 1 < kBits && edge[i + 1] <= std::ldexp(1.0, e - 31)) ++i;
      first[e] = i;
      next[e] = i + 1 < kBits ? edge[i + 1] : INFINITY;
    }
  }
};

#if defined(__AVX512F__)
// What a magnitude's code stands for: the table's value to a rounding, without 16 loads.
template <int kBits>
VLMK_INLINE Vec decode(const Decades<kBits>& d, VecInt code) {
  const __m512 c = _mm512_cvtepi32_ps(reinterpret_cast<__m512i>(code));
  const __m512i i = _mm512_srli_epi32(_mm512_castps_si512(c), 23);
  Vec x = c * _mm512_permutexvar_ps(i, _mm512_load_ps(d.step)) +
          _mm512_permutexvar_ps(i, _mm512_load_ps(d.start));
  x = code == (1 << kBits) - 1 ? set1(1.f) : x;
  return code == 0 ? set1(0.f) : x;
}
VLMK_INLINE Vec decode_signed(const Decades<7>& d, const float*, VecInt code) {
  const Vec x = decode<7>(d, code & 0x7f);
  return reinterpret_cast<Vec>(reinterpret_cast<VecInt>(x) | (code & 0x80) << 24);
}
VLMK_INLINE Vec decode_unsigned(const Decades<8>& d, const float*, VecInt code) {
  return decode<8>(d, code);
}
#else
VLMK_INLINE Vec decode_signed(const Decades<7>&, const float* table, VecInt code) {
  return look_up(table, code);
}
VLMK_INLINE Vec decode_unsigned(const Decades<8>&, const float* table, VecInt code) {
  return look_up(table, code);
}
#endif

// Codes without the sign bit of magnitudes y in [0, 1].
template <int kBits>
VLMK_INLINE VecInt encode(const Decades<kBits>& d, Vec y) {
#if defined(__AVX512F__)
  __m512i e =
      _mm512_sub_epi32(_mm512_srli_epi32(_mm512_castps_si512(y), 23), _mm512_set1_epi32(96));
  e = _mm512_max_epi32(e, _mm512_setzero_si512());
  __m512i i =
      _mm512_permutex2var_epi32(_mm512_load_si512(d.first), e, _mm512_load_si512(d.first + 16));
  const __m512 next =
      _mm512_permutex2var_ps(_mm512_load_ps(d.next), e, _mm512_load_ps(d.next + 16));
  i = _mm512_mask_add_epi32(i, _mm512_cmp_ps_mask(y, next, _CMP_GE_OQ), i, _mm512_set1_epi32(1));
  const Vec slope = _mm512_permutexvar_ps(i, _mm512_load_ps(d.slope));
  const Vec power =
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(i, _mm512_set1_epi32(127)), 23));
#else
  Vec slope = set1(d.slope[0]), power = set1(1.f);
  for (int i = 1; i < kBits; ++i) {
    const VecInt reached = y >= set1(d.edge[i]);
    slope = reached ? set1(d.slope[i]) : slope;
    power = reached ? set1(static_cast<float>(1 << i)) : power;
  }
#endif
  Vec j = y * slope - power * set1(1.f / 9.f);
  const Vec last = power - set1(0.5f);
  j = j > set1(0.f) ? j : set1(0.f);
  j = j < last ? j : last;
  return __builtin_convertvector(power + j, VecInt);
}

// exp_avg: below the lowest decade it is 0.
VLMK_INLINE VecInt encode_signed(const Decades<7>& d, Vec x, Vec inverse) {
  const VecInt sign = reinterpret_cast<VecInt>(x) >> 24 & 0x80;
  const Vec y = reinterpret_cast<Vec>(reinterpret_cast<VecInt>(x) & 0x7fffffff) * inverse;
  return (y >= set1(d.edge[0]) ? encode<7>(d, y) : VecInt{}) | sign;
}

// exp_avg_sq: what is not zero stays so, lest a small divisor vanish and a step explode.
VLMK_INLINE VecInt encode_unsigned(const Decades<8>& d, Vec x, Vec inverse) {
  return x > set1(0.f) ? encode<8>(d, x * inverse) : VecInt{};
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
