// csrc/cuda/ptx/sm80.cuh for a host compiler: the same names and signatures on emulator.h. A
// kernel includes "cuda/ptx/sm80.cuh", and this folder is searched first.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace vlmk::ptx {

inline constexpr int kWarpSize = emu::kLanes;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

using Unit16 = uint4;
using Unit8 = uint2;
using Unit4 = uint32_t;
using Unit2 = uint16_t;

template <class Unit>
__forceinline__ Unit load_once(const Unit* address, bool on) {
  Unit v{};
  if (on) emu::read_global(&v, address, sizeof(Unit), true);
  return v;
}
__forceinline__ uint4 load(const uint4* address, bool on) {
  uint4 v{};
  if (on) emu::read_global(&v, address, sizeof(v), false);
  return v;
}
template <class Unit>
struct Same {
  using Type = Unit;
};
template <class Unit>  // the type is the pointer's: a braced value has none
__forceinline__ void store(Unit* address, const typename Same<Unit>::Type& v, bool on) {
  if (on) emu::write_global(address, &v, sizeof(Unit));
}

__forceinline__ int anew(int value) { return value; }

template <class T>
__forceinline__ T* broadcast(T* value, int lane) {
  return reinterpret_cast<T*>(emu::shuffle(reinterpret_cast<uintptr_t>(value), lane % kWarpSize));
}
__forceinline__ int broadcast(int value, int lane) {
  return static_cast<int>(emu::shuffle(static_cast<uint32_t>(value), lane % kWarpSize));
}
__forceinline__ int from_below(int value, int distance) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  return broadcast(value, lane < distance ? lane : lane - distance);
}
__forceinline__ float exchange(float value, int mask) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  return __uint_as_float(static_cast<uint32_t>(emu::shuffle(__float_as_uint(value), lane ^ mask)));
}

__forceinline__ uint32_t shared_address(const void* pointer) {
  return emu::shared_address(pointer);
}
__forceinline__ void copy_async(uint32_t to, const void* from, bool on) {
  emu::copy_async(to, from, 16, on ? 16 : 0);
}
__forceinline__ void copy_word_async(uint32_t to, const void* from, bool on) {
  emu::copy_async(to, from, 4, on ? 4 : 0);
}
__forceinline__ void commit_copies() { emu::commit_copies(); }
template <int kPending>
__forceinline__ void wait_copies() {
  emu::wait_copies(kPending);
}
__forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t row) {
  emu::load_matrices(m, 4, row, false);
}
__forceinline__ void load_matrices_transposed(uint32_t (&m)[4], uint32_t row) {
  emu::load_matrices(m, 4, row, true);
}
__forceinline__ void load_matrices(uint32_t (&m)[2], uint32_t row) {
  emu::load_matrices(m, 2, row, false);
}
__forceinline__ void load_matrices_transposed(uint32_t (&m)[2], uint32_t row) {
  emu::load_matrices(m, 2, row, true);
}
__forceinline__ void store_shared(uint32_t address, const uint4& v) {
  emu::write_shared(address, &v, 16);
}
__forceinline__ void store_shared(uint32_t address, const uint2& v) {
  emu::write_shared(address, &v, 8);
}
__forceinline__ void store_shared(uint32_t address, uint32_t v) {
  emu::write_shared(address, &v, 4);
}
__forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  emu::read_shared(&v, address, 16);
  return v;
}
template <class Unit>
__forceinline__ void load_shared(uint32_t address, Unit& v) {
  emu::read_shared(&v, address, sizeof(Unit));
}

__forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 v;
  emu::read_shared(&v, address, 8);
  return v;
}
__forceinline__ int add_shared(uint32_t address, int value) {
  return emu::add_shared(address, value);
}

__forceinline__ float log2_approx(float x) { return std::log2(x); }
__forceinline__ float exp2_approx(float x) { return emu::exp2_flushed(x); }

struct Bf16Math {
  static __forceinline__ uint32_t pack(float low, float high) {
    return emu::to_bf16(low) | static_cast<uint32_t>(emu::to_bf16(high)) << 16;
  }
  static __forceinline__ float low(uint32_t v) { return emu::from_bf16(static_cast<uint16_t>(v)); }
  static __forceinline__ float high(uint32_t v) {
    return emu::from_bf16(static_cast<uint16_t>(v >> 16));
  }
  static __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    emu::multiply_add(emu::Half::kBFloat16, 16, c, a, b);
  }
  static __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[2], uint32_t b) {
    emu::multiply_add(emu::Half::kBFloat16, 8, c, a, &b);
  }
};
struct Fp16Math {
  static __forceinline__ uint32_t pack(float low, float high) {
    return emu::to_fp16(low) | static_cast<uint32_t>(emu::to_fp16(high)) << 16;
  }
  static __forceinline__ float low(uint32_t v) { return emu::from_fp16(static_cast<uint16_t>(v)); }
  static __forceinline__ float high(uint32_t v) {
    return emu::from_fp16(static_cast<uint16_t>(v >> 16));
  }
  static __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    emu::multiply_add(emu::Half::kFloat16, 16, c, a, b);
  }
  static __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[2], uint32_t b) {
    emu::multiply_add(emu::Half::kFloat16, 8, c, a, &b);
  }
};

__forceinline__ int compare_and_swap(int* address, int expected, int value) {
  return emu::compare_and_swap(address, expected, value);
}
[[noreturn]] __forceinline__ void trap() { emu::trap(); }

__forceinline__ float from_bf16(uint16_t bits) { return emu::from_bf16(bits); }
__forceinline__ uint16_t to_bf16(float value) { return emu::to_bf16(value); }
__forceinline__ float from_fp16(uint16_t bits) { return emu::from_fp16(bits); }
__forceinline__ uint16_t to_fp16(float value) { return emu::to_fp16(value); }

}  // namespace vlmk::ptx
