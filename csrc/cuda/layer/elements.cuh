// What one access to memory has of a row, unpacked to float32.
#pragma once

#include <cuda_runtime.h>

#include "common/params.h"
#include "cuda/ptx/sm80.cuh"

namespace vlmk {
namespace {

// A type's elements in a word of 32 bits.
struct Fp32 {
  static constexpr int kCount = 1;
  static __device__ __forceinline__ void unpack(float* v, uint32_t word) {
    v[0] = __uint_as_float(word);
  }
  static __device__ __forceinline__ uint32_t pack(const float* v) { return __float_as_uint(v[0]); }
};
template <class Math>
struct Half {
  static constexpr int kCount = 2;
  static __device__ __forceinline__ void unpack(float* v, uint32_t word) {
    v[0] = Math::low(word), v[1] = Math::high(word);  // mutant: layer-unpack
  }
  static __device__ __forceinline__ uint32_t pack(const float* v) { return Math::pack(v[0], v[1]); }
};

// The elements of one access to memory.
template <class Type, class Unit>
struct Elements {
  static constexpr int kWords = sizeof(Unit) / 4, kCount = kWords * Type::kCount;
  float v[kCount];

  Elements() = default;
  __device__ __forceinline__ explicit Elements(const Unit& unit) {
    const auto* words = reinterpret_cast<const uint32_t*>(&unit);
#pragma unroll
    for (int w = 0; w < kWords; ++w) Type::unpack(v + w * Type::kCount, words[w]);
  }
  __device__ __forceinline__ Unit packed() const {
    Unit unit;
    auto* words = reinterpret_cast<uint32_t*>(&unit);
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = Type::pack(v + w * Type::kCount);
    return unit;
  }
  __device__ __forceinline__ void add(const Elements& other) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) v[e] += other.v[e];
  }
  // As they are in the type.
  __device__ __forceinline__ Elements rounded() const { return Elements(packed()); }
};

// The launcher of a params' type.
#define VLMK_OF_TYPE(run)                                                 \
  const auto s = static_cast<cudaStream_t>(stream);                       \
  if (p.dtype == DType::kFloat32) return run<Fp32>(p, s);                 \
  if (p.dtype == DType::kBFloat16) return run<Half<ptx::Bf16Math>>(p, s); \
  return run<Half<ptx::Fp16Math>>(p, s);

}  // namespace
}  // namespace vlmk
