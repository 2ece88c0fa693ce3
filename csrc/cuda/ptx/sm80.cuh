// Every PTX instruction and warp intrinsic that a kernel of this project uses, one small function
// each, so that a kernel reads as C++ and the PTX interpreter's opcode list has one source. Where
// CUTLASS has an atom for it, both are the same instructions but where it is said here
// (tests/cuda/test_cutlass.py). They are not built on CUTLASS: that would save some 100 lines, and
// every build would need its headers, and the fibers their own copy of its names.
#pragma once

#include <cstdint>

namespace vlmk::ptx {

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// Memory access of exactly sizeof(T) bytes, T one of the units below. The pointer must be aligned
// to the size of the unit.
using Unit16 = uint4;
using Unit8 = uint2;
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
__device__ __forceinline__ uint2 load_once(const uint2* address, bool on) {
  uint2 v;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
      "@p ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];\n\t}"
      : "=r"(v.x), "=r"(v.y)
      : "l"(address), "r"(static_cast<int>(on)));
  return v;
}
// The same from memory that this thread writes, or others before a barrier.
__device__ __forceinline__ uint4 load(const uint4* address, bool on) {
  uint4 v;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address), "r"(static_cast<int>(on))
      : "memory");
  return v;
}
// Stores where `on` is true.
__device__ __forceinline__ void store(uint4* address, const uint4& v, bool on) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      /* mutant: ptx-store-16 */ "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n\t}" ::"l"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(on))
      : "memory");
}
__device__ __forceinline__ void store(uint2* address, const uint2& v, bool on) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\t"
      /* mutant: ptx-store-8 */ "@p st.global.v2.b32 [%0], {%1, %2};\n\t}" ::"l"(address),
      "r"(v.x), "r"(v.y), "r"(static_cast<int>(on))
      : "memory");
}

// Both of one word of so many bits, in a register of a constraint.
#define VLMK_WORD(Word, bits, constraint)                                   \
  __device__ __forceinline__ Word load_once(const Word* address, bool on) { \
    Word v;                                                                 \
    asm volatile(                                                           \
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t"                   \
        "mov.b" bits                                                        \
        " %0, 0;\n\t"                                                       \
        "@p ld.global.nc.L1::no_allocate.b" bits " %0, [%1];\n\t}"          \
        : "=" constraint(v)                                                 \
        : "l"(address), "r"(static_cast<int>(on)));                         \
    return v;                                                               \
  }                                                                         \
  __device__ __forceinline__ void store(Word* address, Word v, bool on) {   \
    asm volatile(                                                           \
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t"                   \
        "@p st.global.b" bits " [%0], %1;\n\t}" ::"l"(address),             \
        constraint(v), "r"(static_cast<int>(on))                            \
        : "memory");                                                        \
  }
VLMK_WORD(uint32_t, "32", "r")
VLMK_WORD(uint16_t, "16", "h")
#undef VLMK_WORD

// The same value, which the compiler takes for another: what it computed from it before is computed
// again from here on, not kept in registers meanwhile.
__device__ __forceinline__ int anew(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The value that `lane` holds. Every lane of the warp must arrive.
template <class T>
__device__ __forceinline__ T* broadcast(T* value, int lane) {
  const auto bits = reinterpret_cast<unsigned long long>(value);
  return reinterpret_cast<T*>(__shfl_sync(kAllLanes, bits, lane));
}

__device__ __forceinline__ int broadcast(int value, int lane) {
  return __shfl_sync(kAllLanes, value, lane);
}

// The value of the lane `distance` below, or this lane's own where there is none.
__device__ __forceinline__ int from_below(int value, int distance) {
  return __shfl_up_sync(kAllLanes, value, distance);
}

// The value of the lane whose number differs in the bits of `mask`. Every lane must arrive.
__device__ __forceinline__ float exchange(float value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);  // mutant: ptx-exchange
}

// ---- shared memory: addresses are 32-bit, of the shared window

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes from global memory, past L1; zeros and no access where `on` is false.
// CUTLASS asks L2 for 128 bytes at once; all the bytes that a warp copies are whole rows anyway.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool on) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(on ? 16 : 0)
               : "memory");
}
// The same with 4 bytes, through L1.
__device__ __forceinline__ void copy_word_async(uint32_t to, const void* from, bool on) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(on ? 4 : 0)
               : "memory");
}
// Ends a group of this thread's copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kPending of this thread's groups are under way. For 0 CUTLASS waits for what
// is in no group too, which no kernel here leaves.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");  // mutant: ptx-wait-copies
}

// Four 8 x 8 matrices of 16-bit elements: lane i names row i % 8 of matrix i / 8 and gets, of each
// matrix, elements (i / 4, 2 * (i % 4)) and the next one; (2 * (i % 4), i / 4) and the one below if
// transposed.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], uint32_t row) {
  asm volatile(/* mutant: ptx-load-matrices-transposed */
               "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
// The first two of them; lanes 16 to 31 name no row.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[2], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(m[0]), "=r"(m[1])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[2], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(m[0]), "=r"(m[1])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, const uint2& v) {
  asm volatile(/* mutant: ptx-store-shared */ "st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address),
               "r"(v.x), "r"(v.y)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
// By the type that it goes to.
__device__ __forceinline__ void load_shared(uint32_t address, uint4& v) {
  v = load_shared(address);
}
__device__ __forceinline__ void load_shared(uint32_t address, uint2& v) {
  asm volatile(/* mutant: ptx-load-shared */ "ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// Adds to a word of shared memory that other threads add to at the same time; what it held before.
__device__ __forceinline__ int add_shared(uint32_t address, int value) {
  int before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(address), "r"(value)
               : "memory");
  return before;
}

// Base-2 logarithm, error 2^-22, absolute for x in 0.5 to 2 and relative elsewhere.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 2^x, relative error 2^-22; 0 for x = -inf.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Arithmetic of a 16-bit type on the tensor cores. multiply_add: c [16, 8] += a [16, 16] b [16, 8],
// fragments as in the PTX manual, m16n8k16; b0 and b1 are b's rows 0 to 7 and 8 to 15. With a of
// two registers and one b: half the depth, m16n8k8.
#define VLMK_MULTIPLY_ADD(type)                                                              \
  static __device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], \
                                                      uint32_t b0, uint32_t b1) {            \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                      \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"      \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));            \
  }                                                                                          \
  static __device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[2], \
                                                      uint32_t b) {                          \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type                       \
                 ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                  \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                            \
                 : "r"(a[0]), "r"(a[1]), "r"(b));                                            \
  }
struct Bf16Math {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));  // mutant: ptx-pack
    return v;
  }
  static __device__ __forceinline__ float low(uint32_t v) { return __uint_as_float(v << 16); }
  static __device__ __forceinline__ float high(uint32_t v) {
    return __uint_as_float(v & 0xffff0000u);
  }
  VLMK_MULTIPLY_ADD("bf16")
};
struct Fp16Math {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
  }
  static __device__ __forceinline__ float low(uint32_t v) {
    float f;
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %1;\n\tcvt.f32.f16 %0, l;\n\t}"
        : "=f"(f)
        : "r"(v));
    return f;
  }
  static __device__ __forceinline__ float high(uint32_t v) { return low(v >> 16); }
  VLMK_MULTIPLY_ADD("f16")
};
#undef VLMK_MULTIPLY_ADD

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
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);  // mutant: ptx-from-bf16
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
