// Storage types of 16-bit floats and their scalar conversions, for every instruction set. The
// functions have internal linkage: see dispatch.h.
#pragma once
#include <cstdint>
#include <cstring>

#include "common/params.h"

namespace vlmk {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

static inline int64_t size_of(DType type) { return type == DType::kFloat32 ? 4 : 2; }

// Calls use(T{}) with T as the type that `type` names.
template <class Use>
static inline void with_type(DType type, const Use& use) {
  if (type == DType::kFloat32) return use(float{});
  if (type == DType::kBFloat16) return use(BFloat16{});
  use(Float16{});
}

static inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

static inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

static inline float to_float(float x) { return x; }
static inline float to_float(BFloat16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

// The exponent is rebased by a multiplication, which also normalises subnormals.
static inline float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  if (magnitude >= 0x7c00u << 13) return bits_float(sign | 0x7f800000u | magnitude);  // inf, NaN
  return bits_float(sign | float_bits(bits_float(magnitude) * 0x1p112f));
}

// Round to nearest even; NaN stays NaN.
static inline void from_float(float x, float& y) { y = x; }

static inline void from_float(float x, BFloat16& y) {
  const uint32_t u = float_bits(x);
  const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  y.bits = static_cast<uint16_t>(is_nan ? (u >> 16 | 0x40u) : (u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

static inline void from_float(float x, Float16& y) {
  const uint32_t u = float_bits(x);
  const uint32_t sign = u >> 16 & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  uint32_t h;
  if (magnitude > 0x7f800000u) {
    h = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    h = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: 0.5's unit in the last place is 2^-24
    h = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    h = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  y.bits = static_cast<uint16_t>(sign | h);
}

}  // namespace vlmk
