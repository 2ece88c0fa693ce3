// A pipeline of copies and products for the emulator's own tests, right or with one thing wrong.
#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/ptx/sm90.cuh"

namespace vlmk {
namespace {

using ptx::kWarpgroupSize;
using ptx::kWarpSize;

enum Error {
  kRight,
  kFullNotAwaited,
  kFullByOneLane,
  kWrongPhase,
  kEmptyNotAwaited,
  kFreedBeforeTheWait,
  kFreedBeforeARead,
  kNeverFreed,
  kTooManyBytes,
  kTooFewBytes,
  kAnnouncedTwice,
  kNoBarrier,
  kInitialisedTwice,
  kBarrierMisaligned,
  kNoBarrierBetween,
  kNoFenceOfBarriers,
  kBarrierWritten,
  kCopyNobodyAwaits,
  kCopyMisaligned,
  kCopyPastTheEnd,
  kNoMap,
  kAccumulatorsChanged,
  kOperandsChanged,
  kOneGroupTooFew,
  kNeverCommitted,
  kNoFence,
  kFencedTooEarly,
  kWarpMissing,
  kTwoDescriptors,
  kMiddleOfAPattern,
  kMatrixPastTheEnd,
  kPlainWrite,
  kPlainWriteFencedByAnother,
  kPlainWriteNoBarrier,
  kWriteWhileRead,
  kRegistersNotGiven,
  kOddRegisters,
  kGivenWhereTaken,
  kErrors
};

constexpr int kTiles = 4, kRows = 64, kBytes = kRows * 128;

// out [64, 64]: the sum over four tiles x [64, 64] of x x^T and of the sums of x's first 16 rows,
// through two buffers; a thread of the second warpgroup copies, the first one multiplies.
__global__ void __launch_bounds__(3 * kWarpgroupSize, 1)
    pipeline(int error, const __grid_constant__ CUtensorMap map, float* out) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t tiles = ptx::shared_address(shared), barriers = tiles + 2 * kBytes;
  const int t = static_cast<int>(threadIdx.x), lane = t % kWarpSize;
  if (t == 0) {
    for (int i = 0; i < 4; ++i) {
      const uint32_t place = error == kInitialisedTwice    ? 0
                             : error == kBarrierMisaligned ? i * 4
                                                           : i * 8;
      ptx::barrier_init(barriers + place, i < 2 ? 1 : 4);
    }
    if (error != kNoFenceOfBarriers) ptx::fence_barrier_init();
  }
  if (error != kNoBarrierBetween) __syncthreads();
  if (t >= kWarpgroupSize) {
    if (t < 2 * kWarpgroupSize && error != kRegistersNotGiven) ptx::give_registers<24>();
    if (t > kWarpgroupSize) return;
    const CUtensorMap zeros{};
    for (int i = 0; i < kTiles; ++i) {
      const uint32_t full = barriers + i % 2 * 8, empty = full + 16, tile = tiles + i % 2 * kBytes;
      if (error != kEmptyNotAwaited)
        ptx::barrier_wait(error == kNoBarrier ? empty + 16 : empty, (i / 2 & 1) ^ 1);
      if (error == kBarrierWritten) ptx::store_shared(full, 0u);
      const int more = error == kTooManyBytes ? 16 : error == kTooFewBytes ? -16 : 0;
      ptx::barrier_arrive_expect(full, kBytes + more);
      if (error == kAnnouncedTwice) ptx::barrier_arrive_expect(full, kBytes);
      const int offset = error == kCopyMisaligned ? 64 : error == kCopyPastTheEnd ? 2 * kBytes : 0;
      ptx::load_box(tile + offset, error == kNoMap ? &zeros : &map, full, 0, 0, i * kRows);
    }
    return;
  }
  if (error == kOddRegisters)
    ptx::take_registers<236>();
  else if (error == kGivenWhereTaken)
    ptx::take_registers<40>();
  else
    ptx::take_registers<240>();
  float c[32] = {};
  for (int i = 0; i < (error == kCopyNobodyAwaits ? kTiles - 1 : kTiles); ++i) {
    const uint32_t full = barriers + i % 2 * 8, empty = full + 16, tile = tiles + i % 2 * kBytes;
    const uint32_t phase = (i / 2 & 1) ^ (error == kWrongPhase);
    if (error != kFullNotAwaited && (error != kFullByOneLane || lane == 0))
      ptx::barrier_wait(full, phase);
    const bool writes = error == kPlainWrite || error == kPlainWriteFencedByAnother ||
                        error == kPlainWriteNoBarrier;
    if (writes) {
      if (t == 0) ptx::store_shared(tile, 0u);
      if (error == kPlainWriteFencedByAnother ? t == 1 : error == kPlainWriteNoBarrier && t == 0)
        ptx::fence_async_proxy();
      if (error != kPlainWriteNoBarrier) ptx::named_barrier_sync(1, kWarpgroupSize);
    }
    uint32_t ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    const uint32_t middle = error == kMiddleOfAPattern ? 128 : 0;
    const uint32_t far = error == kMatrixPastTheEnd ? 3 * kBytes : 0;
    uint64_t d = ptx::matrix_descriptor<128, 0, 1024>(tile + middle + far);
    if (error == kTwoDescriptors && t == 77) d += 2;
    const bool fenced = error != kNoFence && (error != kFencedTooEarly || i == 0);
    if (fenced) ptx::wgmma_fence();
    for (int k = 0; k < 4; ++k) {
      if (error == kWarpMissing && t < kWarpSize && k == 3) continue;
      ptx::Wgmma<ptx::Bf16Math, 64>::rows(c, d + k * 2, d + k * 2, true);
    }
    ptx::Wgmma<ptx::Bf16Math, 64>::columns(c, ones, d);
    if (error != kNeverCommitted) ptx::wgmma_commit();
    if (error == kAccumulatorsChanged) c[3] = 0.f;
    if (error == kOperandsChanged) ones[2] = 0;
    if (error == kFreedBeforeTheWait && lane == 0) ptx::barrier_arrive(empty);
    if (error == kWriteWhileRead && t == 0) ptx::store_shared(tile, 0u);
    if (error == kOneGroupTooFew)
      ptx::wgmma_wait<1>();
    else
      ptx::wgmma_wait<0>();
    if (error == kFreedBeforeARead && lane == 5) c[0] += ptx::load_shared(tile).x == 1 ? 1.f : 0.f;
    if (error != kFreedBeforeTheWait && error != kNeverFreed && lane == 0)
      ptx::barrier_arrive(empty);
  }
  for (int i = 0; i < 32; ++i) {
    const int row = t / kWarpSize * 16 + lane / 4 + i / 2 % 2 * 8;
    out[row * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = c[i];
  }
}

}  // namespace

int hopper_errors() { return kErrors; }

// x [256, 64] of bf16.
int hopper_error(int error, const void* x, float* out) {
  constexpr int kShared = 2 * kBytes + 64;
  CUtensorMap map;
  const cuuint64_t sizes[] = {64, 1, kTiles * kRows}, strides[] = {128, 128};
  const cuuint32_t box[] = {64, 1, kRows}, steps[] = {1, 1, 1};
  if (cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(x), sizes,
                             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    return cudaErrorInvalidValue;
  pipeline<<<1, 3 * kWarpgroupSize, kShared, nullptr>>>(error, map, out);
  return cudaGetLastError();
}

}  // namespace vlmk
