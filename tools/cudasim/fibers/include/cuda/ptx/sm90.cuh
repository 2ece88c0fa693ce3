// csrc/cuda/ptx/sm90.cuh for a host compiler: the same names and signatures on emulator.h.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/ptx/sm80.cuh"

// What nvcc defines where it compiles for sm_90a.
#define __CUDA_ARCH_FEAT_SM90_ALL 1

namespace vlmk::ptx {

inline constexpr int kWarpgroupSize = 128;

__forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  emu::barrier_init(barrier, arrivals);
}
__forceinline__ void fence_barrier_init() { emu::fence_barrier_init(); }
__forceinline__ void barrier_arrive(uint32_t barrier) { emu::mbarrier_arrive(barrier); }
__forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  emu::mbarrier_arrive(barrier, bytes);
}
__forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  emu::mbarrier_wait(barrier, parity);
}

__forceinline__ void prefetch_map(const CUtensorMap* map) { emu::check_map(map); }
__forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column,
                              int head, int token) {
  emu::load_box(to, map, barrier, column, head, token);
}
__forceinline__ void fence_async_proxy() { emu::fence_async_proxy(); }

__forceinline__ void store_bulk(float* to, uint32_t from, uint32_t bytes) {
  emu::copy_bulk(to, from, bytes, false);
}
__forceinline__ void add_bulk(float* to, uint32_t from, uint32_t bytes) {
  emu::copy_bulk(to, from, bytes, true);
}
__forceinline__ void commit_bulk() { emu::commit_bulk(); }
__forceinline__ void wait_bulk_read() { emu::wait_bulk(true); }
__forceinline__ void wait_bulk() { emu::wait_bulk(false); }
__forceinline__ void fence_async_proxy_global() { emu::fence_async_proxy_global(); }
__forceinline__ void wait_count(const int* count, int value) { emu::wait_count(count, value); }
__forceinline__ void count_up(int* count) { emu::count_up(count); }
__forceinline__ int next_number(int* counter) { return emu::next_number(counter); }

template <int kRegisters>
__forceinline__ void give_registers() {
  emu::set_registers(kRegisters, false);
}
template <int kRegisters>
__forceinline__ void take_registers() {
  emu::set_registers(kRegisters, true);
}
__forceinline__ void named_barrier_sync(int id, int threads) { emu::barrier(id, threads); }
__forceinline__ void named_barrier_arrive(int id, int threads) { emu::barrier_arrive(id, threads); }

__forceinline__ void wgmma_fence() { emu::wgmma_fence(); }
__forceinline__ void wgmma_commit() { emu::wgmma_commit(); }
template <int kPending>
__forceinline__ void wgmma_wait() {
  emu::wgmma_wait(kPending);
}
// Here memory holds c, and the calls above are opaque to the compiler.
template <int kCount>
__forceinline__ void wgmma_results(float (&)[kCount]) {}

constexpr uint64_t swizzle_code(int row_bytes) {
  return row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
}
template <int kRowBytes, int kLeading, int kStride>
__forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(kLeading >> 4) << 16 | static_cast<uint64_t>(kStride >> 4) << 32 |
         swizzle_code(kRowBytes) << 62;
}

template <class Math>
inline constexpr emu::Half kHalf = emu::Half::kBFloat16;
template <>
inline constexpr emu::Half kHalf<Fp16Math> = emu::Half::kFloat16;

template <class Math, int kColumns>
struct Wgmma {
  static __forceinline__ void rows(float (&c)[kColumns / 2], uint64_t a, uint64_t b, bool add) {
    emu::wgmma(kHalf<Math>, kColumns, c, nullptr, a, b, add, false);
  }
  static __forceinline__ void deep(float (&c)[kColumns / 2], uint64_t a, uint64_t b, bool add) {
    emu::wgmma(kHalf<Math>, kColumns, c, nullptr, a, b, add, true);
  }
  static __forceinline__ void columns(float (&c)[kColumns / 2], const uint32_t (&a)[4],
                                      uint64_t b) {
    emu::wgmma(kHalf<Math>, kColumns, c, a, 0, b, true, true);
  }
};

}  // namespace vlmk::ptx
