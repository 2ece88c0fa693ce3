// A value of every thread of a block to one for all.
#pragma once

#include <cuda_runtime.h>

#include "cuda/ptx/sm80.cuh"

namespace vlmk {
namespace {

constexpr float kLowest = -3.402823466e38f;

// The sum or the largest of the block's values, for every thread, in one order. `shared`: a word a
// warp.
template <bool kLargest>
__device__ __forceinline__ float of_block(float value, float* shared) {
  const auto of_warp = [](float x) {
#pragma unroll
    for (int mask = ptx::kWarpSize / 2; mask > 0; mask /= 2) {
      const float other = ptx::exchange(x, mask);
      x = kLargest ? fmaxf(x, other) : x + other;  // mutant: loss-of-warp
    }
    return x;
  };
  const int lane = threadIdx.x % ptx::kWarpSize, warps = blockDim.x / ptx::kWarpSize;
  value = of_warp(value);
  __syncthreads();  // mutant: loss-of-block-sync-before
  if (lane == 0) shared[threadIdx.x / ptx::kWarpSize] = value;
  __syncthreads();  // mutant: loss-of-block-sync
  // mutant: loss-of-block-value
  value = lane < warps ? shared[lane] : (kLargest ? kLowest : 0.f);
  return of_warp(value);
}

}  // namespace
}  // namespace vlmk
