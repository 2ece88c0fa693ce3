// The rotary embedding (rotate-half): y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin on a row's halves.
#pragma once
#include <cuda_runtime.h>

#include "cuda/ptx/sm80.cuh"

namespace vlmk {
namespace {

// Columns that are rotated at a time, so many that half a row is a multiple of them, and their
// 16-bit elements as one unit.
template <int kDim>
inline constexpr int kRotaryColumns = kDim % 16 == 0 ? 8 : 4;  // mutant: rows-columns

template <int kColumns>
struct Columns;
template <>
struct Columns<8> {
  using Unit = uint4;
  static __device__ __forceinline__ void split(const Unit& v, uint32_t (&words)[4]) {
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
  static __device__ __forceinline__ Unit join(const uint32_t (&words)[4]) {
    return {words[0], words[1], words[2], words[3]};
  }
};
template <>
struct Columns<4> {
  using Unit = uint2;
  static __device__ __forceinline__ void split(const Unit& v, uint32_t (&words)[2]) {
    words[0] = v.x, words[1] = v.y;
  }
  static __device__ __forceinline__ Unit join(const uint32_t (&words)[2]) {
    return {words[0], words[1]};
  }
};

// Cosines and sines of kColumns columns of one token.
template <int kColumns>
struct Rotation {
  using Unit = typename Columns<kColumns>::Unit;
  uint4 cosine[kColumns / 4], sine[kColumns / 4];

  // table: [T, kDim], of each token kDim / 2 cosines and as many sines.
  template <int kDim>
  __device__ __forceinline__ void load(const float* table, int64_t token, int column, bool on) {
    const auto* at = reinterpret_cast<const uint4*>(table + token * kDim + column);
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      cosine[i] = ptx::load_once(at + i, on);
      sine[i] = ptx::load_once(at + kDim / 8 + i, on);  // mutant: rows-load-sine
    }
  }
  // In fp32, each result rounded once. kBack: the transpose, which is the inverse.
  template <class Math, bool kBack>
  __device__ __forceinline__ void apply(Unit& a, Unit& b) const {
    uint32_t cosines[kColumns], sines[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const uint4 c = cosine[i], s = sine[i];
      cosines[4 * i] = c.x, cosines[4 * i + 1] = c.y, cosines[4 * i + 2] = c.z;
      cosines[4 * i + 3] = c.w;
      sines[4 * i] = s.x, sines[4 * i + 1] = s.y, sines[4 * i + 2] = s.z, sines[4 * i + 3] = s.w;
    }
    uint32_t first[kColumns / 2], second[kColumns / 2];
    Columns<kColumns>::split(a, first);
    Columns<kColumns>::split(b, second);
#pragma unroll
    for (int w = 0; w < kColumns / 2; ++w) {
      const float x1[2] = {Math::low(first[w]), Math::high(first[w])};
      const float x2[2] = {Math::low(second[w]), Math::high(second[w])};
      float y1[2], y2[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float c = __uint_as_float(cosines[2 * w + e]);
        // mutant: rows-apply-s
        const float s =
            kBack ? -__uint_as_float(sines[2 * w + e]) : __uint_as_float(sines[2 * w + e]);
        y1[e] = x1[e] * c - x2[e] * s;  // mutant: rows-apply-y1
        y2[e] = x2[e] * c + x1[e] * s;
      }
      first[w] = Math::pack(y1[0], y1[1]);
      second[w] = Math::pack(y2[0], y2[1]);
    }
    a = Columns<kColumns>::join(first);
    b = Columns<kColumns>::join(second);
  }
};

}  // namespace
}  // namespace vlmk
