// One vector of floats, for the instruction set that the including file is compiled for.
//
// Everything stands in namespace VLMK_ISA with internal linkage, see dispatch.h. + - * / work on
// Vec directly (GCC and Clang vector types), the rest is here:
//   kWidth, set1, load, store, load_n, store_n, fma, fms, max, sqrt, exp2, reduce_add, keep_from,
//   transpose, each_vector, fetch_row; non-temporal stores: stream, fence_streams, kStreams
// load/store take float, BFloat16, Float16; the _n ones touch only the first n elements, the other
// lanes being zero. VecInt and VecUint are as many 32-bit integers; VLMK_HAS_BYTES: what AVX2 and
// AVX-512 do with bytes, in lanes of 16.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cpu/half.h"

#if defined(__AVX2__)
#include <immintrin.h>
#else
#include <cmath>
#endif

#define VLMK_INLINE static inline __attribute__((always_inline))
#define VLMK_MEMBER inline __attribute__((always_inline))
#define VLMK_NOINLINE static __attribute__((noinline))

namespace vlmk {
namespace VLMK_ISA {
namespace {

#if defined(__AVX512F__)  // ---- AVX-512

constexpr int kWidth = 16;
using Vec = __m512;
typedef int32_t VecInt __attribute__((vector_size(64)));
typedef uint32_t VecUint __attribute__((vector_size(64)));

VLMK_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

VLMK_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
// 16-bit words at both places of each 32-bit lane, and the upper ones of each: one shuffle, where
// an extension or a narrowing and a shift are two and three (Adam with bf16 moments, in
// the caches of Zen 4: 1.1x).
VLMK_INLINE Vec widen(__m256i x, BFloat16) {
  const __m512i twice = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8,
                                         7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  constexpr __mmask32 kUpper = 0xaaaaaaaau;
  return _mm512_castsi512_ps(
      _mm512_maskz_permutexvar_epi16(kUpper, twice, _mm512_castsi256_si512(x)));
}
VLMK_INLINE __m256i upper_halves(__m512i x) {
  const __m256i odd = _mm256_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_castsi512_si256(_mm512_permutexvar_epi16(_mm512_castsi256_si512(odd), x));
}
VLMK_INLINE Vec widen(__m256i x, Float16) { return _mm512_cvtph_ps(x); }
VLMK_INLINE __m256i narrow_exactly(Vec x) {
  const __m512i u = _mm512_castps_si512(x);
  const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
  __m512i r = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
  r = _mm512_mask_add_epi32(r, odd, r, _mm512_set1_epi32(1));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
  return upper_halves(r);
}
#if defined(__AVX512BF16__)
// Numbers too small to be normal become 0.
VLMK_INLINE __m256i narrow(Vec x, BFloat16) {
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
}
#else
VLMK_INLINE __m256i narrow(Vec x, BFloat16) { return narrow_exactly(x); }
#endif
VLMK_INLINE __m256i narrow(Vec x, Float16) {
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Of pairs of elements, the lower ones and the upper ones.
VLMK_INLINE Vec lower(__m512i x, BFloat16) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
VLMK_INLINE Vec upper(__m512i x, BFloat16) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(~0xffff)));
}
VLMK_INLINE Vec lower(__m512i x, Float16) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
VLMK_INLINE Vec upper(__m512i x, Float16) { return lower(_mm512_srli_epi32(x, 16), Float16{}); }
VLMK_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
VLMK_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
VLMK_INLINE Vec load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
VLMK_INLINE void store_n(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
template <class Half>
VLMK_INLINE Vec load(const Half* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), Half{});
}
template <class Half>
VLMK_INLINE void store(Half* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x, Half{}));
}
template <class Half>
VLMK_INLINE Vec load_n(const Half* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p), Half{});
}
template <class Half>
VLMK_INLINE void store_n(Half* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x, Half{}));
}
// Non-temporal stores, which do not read the line first; p is aligned to the bytes stored.
// fence_streams() orders them before what other threads read.
constexpr bool kStreams = true;
VLMK_INLINE void stream(float* p, Vec x) { _mm512_stream_ps(p, x); }
VLMK_INLINE void stream(BFloat16* p, Vec x) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow(x, BFloat16{}));
}
VLMK_INLINE void fence_streams() { _mm_sfence(); }
VLMK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
VLMK_INLINE Vec fms(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }
VLMK_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
VLMK_INLINE Vec sqrt(Vec x) { return _mm512_sqrt_ps(x); }
// x - floor(x). Rounding can make it 1.
VLMK_INLINE Vec fraction(Vec x) {
  return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
// p * 2^floor(x); 0 where x is below -126. (Without AVX-512 x is -127 or more.)
VLMK_INLINE Vec scale_by_floor(Vec p, Vec x) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, set1(-126.f), _CMP_NLT_UQ), p, x);
}
VLMK_INLINE float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
VLMK_INLINE bool any_above(Vec x, Vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ) != 0; }
// a in lanes where x > y, else b.
VLMK_INLINE Vec where_above(Vec x, Vec y, Vec a, Vec b) {
  return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), a);
}
// Lanes from `first` on keep x; those before become `other`.
VLMK_INLINE Vec keep_from(int first, Vec x, Vec other) {
  const unsigned mask = first <= 0 ? 0xffffu : first >= kWidth ? 0u : 0xffffu << first;
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(mask), x);
}
VLMK_INLINE void transpose(Vec (&row)[kWidth]) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_castps_si512(row[i]);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    row[i] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    row[i + 8] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    row[i + 4] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    row[i + 12] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
}
// The columns of 16 rows of 4 32-bit numbers; row(j) loads the j-th. Loads put them in the lanes
// where they belong, so half as many shuffles are left (bf16 windows on Zen 4: 1.01 to 1.02x).
template <class Row>
VLMK_INLINE void transpose_lanes(__m512i (&columns)[4], const Row& row) {
  __m512i r[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_castsi128_si512(row(i));
    r[i] = _mm512_inserti32x4(r[i], row(i + 4), 1);
    r[i] = _mm512_inserti32x4(r[i], row(i + 8), 2);
    r[i] = _mm512_inserti32x4(r[i], row(i + 12), 3);
  }
  const __m512i t[4] = {_mm512_unpacklo_epi32(r[0], r[1]), _mm512_unpacklo_epi32(r[2], r[3]),
                        _mm512_unpackhi_epi32(r[0], r[1]), _mm512_unpackhi_epi32(r[2], r[3])};
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    columns[i] = _mm512_unpacklo_epi64(t[i], t[i + 1]);
    columns[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 1]);
  }
}

// Bytes and 16-bit numbers, in lanes of 16 bytes.
#define VLMK_HAS_BYTES
constexpr int kLanes = 4;
VLMK_INLINE __m512i bits(VecInt x) { return reinterpret_cast<__m512i>(x); }
VLMK_INLINE VecInt ints(__m512i x) { return reinterpret_cast<VecInt>(x); }
VLMK_INLINE VecInt load(const uint8_t* p) { return ints(_mm512_loadu_si512(p)); }
VLMK_INLINE void store(uint8_t* p, VecInt x) { _mm512_storeu_si512(p, bits(x)); }
VLMK_INLINE VecInt set_lanes(__m128i x) { return ints(_mm512_broadcast_i32x4(x)); }
VLMK_INLINE VecInt shuffle(VecInt x, VecInt by) {
  return ints(_mm512_shuffle_epi8(bits(x), bits(by)));
}
VLMK_INLINE VecInt madd(VecInt x, VecInt y) { return ints(_mm512_madd_epi16(bits(x), bits(y))); }
VLMK_INLINE VecInt low_bytes(VecInt x, VecInt y) {
  return ints(_mm512_unpacklo_epi8(bits(x), bits(y)));
}
VLMK_INLINE VecInt high_bytes(VecInt x, VecInt y) {
  return ints(_mm512_unpackhi_epi8(bits(x), bits(y)));
}
VLMK_INLINE VecInt pack(VecInt x, VecInt y) { return ints(_mm512_packs_epi32(bits(x), bits(y))); }
VLMK_INLINE VecInt pack_bytes(VecInt x, VecInt y) {
  return ints(_mm512_packus_epi16(bits(x), bits(y)));
}
VLMK_INLINE VecInt load_lanes(const uint8_t* const* rows, int64_t at) {
  const auto one = [&](int lane) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[lane] + at));
  };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(one(0)), one(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(one(2)), one(3), 1);
  return ints(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
VLMK_INLINE void store_lanes(uint8_t* const* rows, int64_t at, VecInt x) {
  const auto to = [&](int lane) { return reinterpret_cast<__m128i*>(rows[lane] + at); };
  _mm_storeu_si128(to(0), _mm512_castsi512_si128(bits(x)));
  _mm_storeu_si128(to(1), _mm512_extracti32x4_epi32(bits(x), 1));
  _mm_storeu_si128(to(2), _mm512_extracti32x4_epi32(bits(x), 2));
  _mm_storeu_si128(to(3), _mm512_extracti32x4_epi32(bits(x), 3));
}

#elif defined(__AVX2__)  // ---- AVX2 and FMA

constexpr int kWidth = 8;
using Vec = __m256;  // functions are explained above, under AVX-512
typedef int32_t VecInt __attribute__((vector_size(32)));
typedef uint32_t VecUint __attribute__((vector_size(32)));

VLMK_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
VLMK_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
VLMK_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
VLMK_INLINE Vec load(const BFloat16* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
VLMK_INLINE Vec load(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// The upper halves of 32-bit numbers.
VLMK_INLINE __m128i upper_halves(__m256i u) {
  const __m256i high = _mm256_srli_epi32(u, 16);
  const __m256i packed = _mm256_packus_epi32(high, high);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
VLMK_INLINE __m128i narrow(Vec x, BFloat16) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return upper_halves(_mm256_blendv_epi8(r, quiet, nan));
}
VLMK_INLINE __m128i narrow(Vec x, Float16) {
  return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
template <class Half>
VLMK_INLINE void store(Half* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x, Half{}));
}
constexpr bool kStreams = true;
VLMK_INLINE void stream(float* p, Vec x) { _mm256_stream_ps(p, x); }
VLMK_INLINE void stream(BFloat16* p, Vec x) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow(x, BFloat16{}));
}
VLMK_INLINE void fence_streams() { _mm_sfence(); }
VLMK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
VLMK_INLINE Vec fms(Vec a, Vec b, Vec c) { return _mm256_fmsub_ps(a, b, c); }
VLMK_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
VLMK_INLINE Vec sqrt(Vec x) { return _mm256_sqrt_ps(x); }
VLMK_INLINE Vec fraction(Vec x) { return x - _mm256_floor_ps(x); }
VLMK_INLINE Vec scale_by_floor(Vec p, Vec x) {
  const __m256i n = _mm256_cvtps_epi32(_mm256_floor_ps(x));
  const __m256i e = _mm256_add_epi32(n, _mm256_set1_epi32(127));
  return p * _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
VLMK_INLINE bool any_above(Vec x, Vec y) {
  return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_GT_OQ)) != 0;
}
VLMK_INLINE Vec where_above(Vec x, Vec y, Vec a, Vec b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_GT_OQ));
}
VLMK_INLINE float reduce_add(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
VLMK_INLINE Vec keep_from(int first, Vec x, Vec other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
  return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(before));
}
VLMK_INLINE void transpose(Vec (&r)[kWidth]) {
  Vec t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

#define VLMK_HAS_BYTES
constexpr int kLanes = 2;
VLMK_INLINE __m256i bits(VecInt x) { return reinterpret_cast<__m256i>(x); }
VLMK_INLINE VecInt ints(__m256i x) { return reinterpret_cast<VecInt>(x); }
VLMK_INLINE VecInt load(const uint8_t* p) {
  return ints(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
VLMK_INLINE void store(uint8_t* p, VecInt x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits(x));
}
VLMK_INLINE VecInt set_lanes(__m128i x) { return ints(_mm256_broadcastsi128_si256(x)); }
VLMK_INLINE VecInt shuffle(VecInt x, VecInt by) {
  return ints(_mm256_shuffle_epi8(bits(x), bits(by)));
}
VLMK_INLINE VecInt madd(VecInt x, VecInt y) { return ints(_mm256_madd_epi16(bits(x), bits(y))); }
VLMK_INLINE VecInt low_bytes(VecInt x, VecInt y) {
  return ints(_mm256_unpacklo_epi8(bits(x), bits(y)));
}
VLMK_INLINE VecInt high_bytes(VecInt x, VecInt y) {
  return ints(_mm256_unpackhi_epi8(bits(x), bits(y)));
}
VLMK_INLINE VecInt pack(VecInt x, VecInt y) { return ints(_mm256_packs_epi32(bits(x), bits(y))); }
VLMK_INLINE VecInt pack_bytes(VecInt x, VecInt y) {
  return ints(_mm256_packus_epi16(bits(x), bits(y)));
}
VLMK_INLINE VecInt load_lanes(const uint8_t* const* rows, int64_t at) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[0] + at));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[1] + at));
  return ints(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}
VLMK_INLINE void store_lanes(uint8_t* const* rows, int64_t at, VecInt x) {
  const auto to = [&](int lane) { return reinterpret_cast<__m128i*>(rows[lane] + at); };
  _mm_storeu_si128(to(0), _mm256_castsi256_si128(bits(x)));
  _mm_storeu_si128(to(1), _mm256_extracti128_si256(bits(x), 1));
}

#else  // ---- GCC vectors: SSE2, NEON, others

constexpr int kWidth = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t VecInt __attribute__((vector_size(16)));
typedef uint32_t VecUint __attribute__((vector_size(16)));

VLMK_INLINE Vec set1(float x) { return Vec{x, x, x, x}; }
template <class T>
VLMK_INLINE Vec load(const T* p) {
  return Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
template <class T>
VLMK_INLINE void store(T* p, Vec x) {
  for (int i = 0; i < kWidth; ++i) from_float(x[i], p[i]);
}
VLMK_INLINE Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
VLMK_INLINE void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
typedef uint16_t Halves __attribute__((vector_size(8)));
VLMK_INLINE Vec load(const BFloat16* p) {
  Halves bits;
  std::memcpy(&bits, p, sizeof bits);
  return reinterpret_cast<Vec>(__builtin_convertvector(bits, VecUint) << 16);
}
VLMK_INLINE void store(BFloat16* p, Vec x) {
  const VecUint u = reinterpret_cast<VecUint>(x);
  const VecUint bits = x == x ? u + 0x7fff + (u >> 16 & 1) : u | 0x400000;
  const Halves high = __builtin_convertvector(bits >> 16, Halves);
  std::memcpy(p, &high, sizeof high);
}
constexpr bool kStreams = false;
template <class T>
VLMK_INLINE void stream(T* p, Vec x) {
  store(p, x);
}
VLMK_INLINE void fence_streams() {}
VLMK_INLINE Vec select(VecInt mask, Vec a, Vec b) {
  return reinterpret_cast<Vec>((mask & reinterpret_cast<VecInt>(a)) |
                               (~mask & reinterpret_cast<VecInt>(b)));
}
VLMK_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
VLMK_INLINE Vec fms(Vec a, Vec b, Vec c) { return a * b - c; }
VLMK_INLINE Vec max(Vec a, Vec b) { return select(a > b, a, b); }  // b where unordered, as in SSE
VLMK_INLINE Vec sqrt(Vec x) {
  return Vec{std::sqrt(x[0]), std::sqrt(x[1]), std::sqrt(x[2]), std::sqrt(x[3])};
}
// Exact for |x| < 2^22, and exp2 below needs no more.
VLMK_INLINE Vec floor(Vec x) {
  const Vec n = (x + set1(0x1.8p23f)) - set1(0x1.8p23f);
  return select(n > x, n - set1(1.f), n);
}
VLMK_INLINE Vec fraction(Vec x) { return x - floor(x); }
VLMK_INLINE Vec scale_by_floor(Vec p, Vec x) {
  const VecInt e = __builtin_convertvector(floor(x), VecInt) + 127;
  return p * reinterpret_cast<Vec>(e << 23);
}
VLMK_INLINE float reduce_add(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
VLMK_INLINE bool any_above(Vec x, Vec y) {
  const VecInt above = x > y;
  return (above[0] | above[1] | above[2] | above[3]) != 0;
}
VLMK_INLINE Vec where_above(Vec x, Vec y, Vec a, Vec b) { return select(x > y, a, b); }
VLMK_INLINE Vec keep_from(int first, Vec x, Vec other) {
  const VecInt lane = {0, 1, 2, 3};
  return select(lane < VecInt{first, first, first, first}, other, x);
}
VLMK_INLINE void transpose(Vec (&r)[kWidth]) {
  const Vec t[4] = {r[0], r[1], r[2], r[3]};
  for (int i = 0; i < kWidth; ++i) r[i] = Vec{t[0][i], t[1][i], t[2][i], t[3][i]};
}

#endif  // ---- common

#if !defined(__AVX512F__)
template <class T>
VLMK_INLINE Vec load_n(const T* p, int n) {
  T lanes[kWidth] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
template <class T>
VLMK_INLINE void store_n(T* p, Vec x, int n) {
  T lanes[kWidth];
  store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
#endif

// 2^x for x <= 0 or little above; 0 below -126, NaN stays NaN. 2^floor(x) times a polynomial in
// what is left: minimax in relative error on [0, 1] with its constant fixed at 1. Relative error
// below 1e-7 with degree 6 (2.0e-9 of it the polynomial's), 1.5e-7 with degree 5 (8.2e-8), 3e-6
// with degree 4, a hundredth of a rounding to fp16, and 8.6e-5 with degree 3, a twentieth of one to
// bf16.
template <int kDegree>
constexpr float kExp2[] = {7.7067040e-2f, 2.2764499e-1f, 6.9511676e-1f, 1.f};  // of 3
template <>
constexpr float kExp2<4>[] = {1.3426686e-2f, 5.2242473e-2f, 2.4128021e-1f, 6.9304484e-1f, 1.f};
template <>
constexpr float kExp2<5>[] = {1.8671537e-3f, 9.0169900e-3f, 5.5799950e-2f,
                              2.4016444e-1f, 6.9315131e-1f, 1.f};
template <>
constexpr float kExp2<6>[] = {
    2.1612917e-4f, 1.2467846e-3f, 9.6754516e-3f, 5.5485282e-2f, 2.4022931e-1f, 6.9314706e-1f, 1.f};

// Of kCount vectors, step by step. One by one, instructions that wait fill a core's scheduler
// before those of the next vector enter it, where a long chain follows (SwiGLU of bf16 on Zen
// 3: 1.2 to 1.4x by four).
template <int kDegree, int kCount>
VLMK_INLINE void exp2(Vec (&x)[kCount]) {
  static_assert(kDegree >= 3 && kDegree <= 6);
  Vec r[kCount], p[kCount];
#if !defined(__AVX512F__)
  // Which gives 0; AVX-512 masks such lanes out at the end.
#pragma GCC unroll 8
  for (int j = 0; j < kCount; ++j) x[j] = max(set1(-127.f), x[j]);
#endif
#pragma GCC unroll 8
  for (int j = 0; j < kCount; ++j) {
    r[j] = fraction(x[j]);
    p[j] = set1(kExp2<kDegree>[0]);
  }
#pragma GCC unroll 8
  for (int i = 1; i <= kDegree; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kCount; ++j) p[j] = fma(p[j], r[j], set1(kExp2<kDegree>[i]));
  }
#pragma GCC unroll 8
  for (int j = 0; j < kCount; ++j) x[j] = scale_by_floor(p[j], x[j]);
}
template <int kDegree = 6>
VLMK_INLINE Vec exp2(Vec x) {
  Vec one[] = {x};
  exp2<kDegree>(one);
  return one[0];
}

VLMK_INLINE int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }

// use(first element, lanes that count) for each vector of n elements, and what it loads and stores.
template <class Use>
VLMK_INLINE void each_vector(int64_t n, const Use& use) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) use(i, kWidth);
  if (i < n) use(i, static_cast<int>(n - i));
}
template <class T>
VLMK_INLINE Vec load_first(const T* x, int lanes) {
  return lanes == kWidth ? load(x) : load_n(x, lanes);
}
template <class T>
VLMK_INLINE void store_first(T* x, Vec v, int lanes) {
  if (lanes == kWidth) return store(x, v);
  store_n(x, v, lanes);
}

// Ahead of a loop over rows that are a stride apart, which the hardware's prefetcher does not
// follow: the row kAhead after the one that is read (24 are as good as 12).
constexpr int64_t kAhead = 12;
template <class T>
VLMK_INLINE void fetch_row(const T* row, int64_t n) {
  constexpr auto kLine = static_cast<int64_t>(64 / sizeof(T));
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(row + i);
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
