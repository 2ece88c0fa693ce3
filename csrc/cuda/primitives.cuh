// Every PTX instruction and warp intrinsic that a kernel of this project uses, one small function
// each, so that a kernel reads as C++ and the PTX interpreter's opcode list has one source.
#pragma once

#include <cstdint>

namespace vlmk::ptx {

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// Memory access of exactly sizeof(T) bytes, T one of the units below. The pointer must be aligned
// to the size of the unit.
using Unit16 = uint4;
using Unit4 = uint32_t;
using Unit2 = uint16_t;

// Loads from memory that no thread writes while the kernel runs; zero, and no access, where `on` is
// false. Predicated rather than branched around, so that several loads are in flight together. The
// line is not kept in L1: every byte is used once by one thread.
__device__ __forceinline__ uint4 load_once(const uint4* address, bool on) {
  uint4 v;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address), "r"(static_cast<int>(on)));
  return v;
}
__device__ __forceinline__ uint32_t load_once(const uint32_t* address, bool on) {
  uint32_t v;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\tmov.b32 %0, 0;\n\t"
      "@p ld.global.nc.L1::no_allocate.b32 %0, [%1];\n\t}"
      : "=r"(v)
      : "l"(address), "r"(static_cast<int>(on)));
  return v;
}
__device__ __forceinline__ uint16_t load_once(const uint16_t* address, bool on) {
  uint16_t v;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\tmov.b16 %0, 0;\n\t"
      "@p ld.global.nc.L1::no_allocate.b16 %0, [%1];\n\t}"
      : "=h"(v)
      : "l"(address), "r"(static_cast<int>(on)));
  return v;
}

// Stores where `on` is true.
__device__ __forceinline__ void store(uint4* address, const uint4& v, bool on) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n\t}" ::"l"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(on))
      : "memory");
}
__device__ __forceinline__ void store(uint32_t* address, uint32_t v, bool on) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p st.global.b32 [%0], %1;\n\t}" ::"l"(
          address),
      "r"(v), "r"(static_cast<int>(on))
      : "memory");
}
__device__ __forceinline__ void store(uint16_t* address, uint16_t v, bool on) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p st.global.b16 [%0], %1;\n\t}" ::"l"(
          address),
      "h"(v), "r"(static_cast<int>(on))
      : "memory");
}

// The value that `lane` holds. Every lane of the warp must arrive.
template <class T>
__device__ __forceinline__ T* broadcast(T* value, int lane) {
  const auto bits = reinterpret_cast<unsigned long long>(value);
  return reinterpret_cast<T*>(__shfl_sync(kAllLanes, bits, lane));
}

// Sets *address to `value` where it holds `expected`; returns what it held before.
__device__ __forceinline__ int compare_and_swap(int* address, int expected, int value) {
  return atomicCAS(address, expected, value);
}

// Ends the whole grid with an error that the next synchronising call reports.
[[noreturn]] __device__ __forceinline__ void trap() {
  __trap();
  __builtin_unreachable();
}

// bf16 and fp16 travel as their bits; arithmetic is in fp32.
__device__ __forceinline__ float from_bf16(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
__device__ __forceinline__ uint16_t to_bf16(float value) {  // round to nearest even
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ float from_fp16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ uint16_t to_fp16(float value) {  // round to nearest even
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

}  // namespace vlmk::ptx
