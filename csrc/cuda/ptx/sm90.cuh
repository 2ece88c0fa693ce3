// PTX of Hopper (sm_90a), beside sm80.cuh: mbarriers, tensor memory accelerator (TMA),
// warpgroup products, registers that warpgroups hand to each other. Used by attention/sm90.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/ptx/sm80.cuh"

namespace vlmk::ptx {

inline constexpr int kWarpgroupSize = 128;

// ---- mbarriers: 8 bytes of shared memory each. A phase ends when all arrivals and all announced
// bytes are there; phases count from 0, and a wait names its phase by the lowest bit.

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes barrier_init known to the async proxy; __syncthreads makes it known to the other threads.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces `bytes` that copies will bring in this phase.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity has ended; the one before the first counts as ended (1).
// CUTLASS gives the hardware 10 ms before it must answer; without a limit it answers sooner, and
// the loop asks again.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  do {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (ended == 0);  // mutant: ptx-barrier-wait-retry
}

// ---- TMA

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Starts the copy of one box of a 3-dimensional map; its bytes arrive at `barrier`. One thread
// issues it. CUTLASS names a policy of L2 in two registers more, by default the usual one.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                         int column, int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(token)
      : "memory");
}
// Orders this thread's plain accesses to shared memory before later ones of TMA and wgmma, once the
// threads have met at a barrier.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- sums in global memory to which blocks add one after another

// Starts a copy of shared memory, `bytes` of them, to global memory, or the addition of its fp32
// numbers to those there. Addresses and bytes are multiples of 16. One thread issues it.
__device__ __forceinline__ void store_bulk(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void add_bulk(float* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void commit_bulk() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until this thread's groups have read shared memory; and until they have written global memory.
__device__ __forceinline__ void wait_bulk_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_bulk() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Orders what this thread knows of global memory and what TMA does there for it next.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// Waits until *count is `value`, and knows what those knew that counted up to it.
__device__ __forceinline__ void wait_count(const int* count, int value) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
  } while (now != value);  // mutant: ptx-wait-count
}
// Adds 1, and releases what this thread knows.
__device__ __forceinline__ void count_up(int* count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}
// The numbers from 0 on, each to one thread of the grid.
__device__ __forceinline__ int next_number(int* counter) { return atomicAdd(counter, 1); }

// ---- warpgroups: every instruction is reached by all four warps

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Barriers 1 to 15; __syncthreads is 0. `threads`: those that wait and those that only arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Before the first product, and wherever registers of a product were written since the last.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending committed groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// No instruction: here the compiler takes c to change. A product writes c until wgmma_wait, which
// the compiler cannot know, so this follows the wait, and nothing of c is read between; before
// wgmma_fence it keeps what is written to c from being written later.
template <int kCount>
__device__ __forceinline__ void wgmma_results(float (&c)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// Swizzle of a tile of rows of 128, 64 or 32 bytes: its code in a matrix descriptor.
__host__ __device__ constexpr uint64_t swizzle_code(int row_bytes) {
  return row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;  // mutant: ptx-swizzle-code
}
// Matrix descriptor of a tile that begins at `address`. kStride: bytes from 8 rows to the next 8.
// kLeading: from one chunk of columns to the next, of a tile whose rows are the depth; else it
// means nothing, and 16 is what CUTLASS puts there.
template <int kRowBytes, int kLeading, int kStride>
__host__ __device__ constexpr uint64_t matrix_descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(kLeading >> 4) << 16 | static_cast<uint64_t>(kStride >> 4) << 32 |
         swizzle_code(kRowBytes) << 62;  // mutant: ptx-descriptor
}

// Products of a warpgroup. c is laid out as by mma.sync: warp w has rows 16 w to 16 w + 15, and
// c[4 n + e] is its row lane / 4 + e / 2 * 8, column 8 n + lane % 4 * 2 + e % 2. Asynchronous:
// wgmma_fence before, wgmma_commit and wgmma_wait after.
//   rows: c [64, kColumns] (+)= a [64, 16] b [kColumns, 16]^T, both in shared memory.
//   columns: c [64, kColumns] += a b [16, kColumns], a in registers as mma.sync's, b in shared
//   memory.
//   deep: c [64, kColumns] (+)= a [16, 64]^T b [16, kColumns], both in shared memory.
template <class Math, int kColumns>
struct Wgmma;

// clang-format off
#define VLMK_C(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), \
                   "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define VLMK_C8 VLMK_C(0)
#define VLMK_C16 VLMK_C(0), VLMK_C(8)
#define VLMK_C32 VLMK_C(0), VLMK_C(8), VLMK_C(16), VLMK_C(24)
#define VLMK_C48 VLMK_C32, VLMK_C(32), VLMK_C(40)
#define VLMK_C64 VLMK_C48, VLMK_C(48), VLMK_C(56)
#define VLMK_N8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define VLMK_N16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define VLMK_N32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define VLMK_N48 VLMK_N32 ", %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define VLMK_N64 VLMK_N48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// kColumns, half of it, and the numbers of the operands after c.
#define VLMK_WGMMA_SHARED(name, type, width, half, n0, n1, n2, deep)                             \
    static __device__ __forceinline__ void name(float (&c)[half], uint64_t a, uint64_t b, bool add) { \
      asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #n2 ", 0;\n\t"                       \
                   "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." #type "." #type         \
                   " {" VLMK_N##half "}, %" #n0 ", %" #n1 ", p, 1, 1, " deep ";\n\t}"             \
                   : VLMK_C##half                                                                  \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add))                                    \
                   : "memory");                                                                    \
    }
#define VLMK_WGMMA(Math, type, width, half, n0, n1, n2, n3, n4)                                  \
  template <>                                                                                      \
  struct Wgmma<Math, width> {                                                                    \
    VLMK_WGMMA_SHARED(rows, type, width, half, n0, n1, n2, "0, 0")                              \
    VLMK_WGMMA_SHARED(deep, type, width, half, n0, n1, n2, "1, 1")                              \
    static __device__ __forceinline__ void columns(float (&c)[half], const uint32_t (&a)[4],      \
                                                    uint64_t b) {                                  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." #type "." #type         \
                   " {" VLMK_N##half "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4          \
                   /* mutant: ptx-wgmma-columns */ ", 1, 1, 1, 1;"                                 \
                   : VLMK_C##half                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                            \
                   : "memory");                                                                    \
    }                                                                                              \
  };
VLMK_WGMMA(Bf16Math, bf16, 16, 8, 8, 9, 10, 11, 12)
VLMK_WGMMA(Fp16Math, f16, 16, 8, 8, 9, 10, 11, 12)
VLMK_WGMMA(Bf16Math, bf16, 32, 16, 16, 17, 18, 19, 20)
VLMK_WGMMA(Fp16Math, f16, 32, 16, 16, 17, 18, 19, 20)
VLMK_WGMMA(Bf16Math, bf16, 64, 32, 32, 33, 34, 35, 36)
VLMK_WGMMA(Fp16Math, f16, 64, 32, 32, 33, 34, 35, 36)
VLMK_WGMMA(Bf16Math, bf16, 96, 48, 48, 49, 50, 51, 52)
VLMK_WGMMA(Fp16Math, f16, 96, 48, 48, 49, 50, 51, 52)
VLMK_WGMMA(Bf16Math, bf16, 128, 64, 64, 65, 66, 67, 68)
VLMK_WGMMA(Fp16Math, f16, 128, 64, 64, 65, 66, 67, 68)
#undef VLMK_WGMMA
#undef VLMK_WGMMA_SHARED
#undef VLMK_C
#undef VLMK_C8
#undef VLMK_C16
#undef VLMK_C32
#undef VLMK_C48
#undef VLMK_C64
#undef VLMK_N8
#undef VLMK_N16
#undef VLMK_N32
#undef VLMK_N48
#undef VLMK_N64
// clang-format on

}  // namespace vlmk::ptx
