// Small kernels for the emulator's own tests: each does one thing wrong, or computes one product.
#include <cuda_runtime.h>

#include "cuda/ptx/sm80.cuh"

namespace vlmk {
namespace {

using ptx::kWarpSize;

enum Program {
  kClean,
  kNoBarrier,
  kNoWarpBarrier,
  kWriteAfterRead,
  kUnwritten,
  kUnwaited,
  kOneGroupTooFew,
  kWaitedButNoBarrier,
  kNeverWaited,
  kDivergentBarrier,
  kDivergentShuffle,
  kMixedInstructions,
  kSharedBounds,
  kGlobalBounds,
  kGlobalRace,
  kBlockRace,
  kConstantWritten,
  kMisaligned,
  kWild,
  kNamedBarriers,
  kNamedBarrierCount,
  kPrograms
};

// data [2 * threads] holds something; out [threads].
__global__ void program(int which, float* data, float* out) {
  extern __shared__ __align__(16) float tile[];
  const int t = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const uint32_t base = ptx::shared_address(tile);
  // The neighbour in the warp, and the thread of the same lane in the other warp.
  const int lane = t % kWarpSize, next = t / kWarpSize * kWarpSize + (lane + 1) % kWarpSize;
  const int other = (t + kWarpSize) % threads;
  float result = 0.f;
  switch (which) {
    case kClean:
    case kNoBarrier:
      tile[t] = data[t];
      if (which == kClean) __syncthreads();
      result = tile[other];
      break;
    case kNoWarpBarrier:
      tile[t] = data[t];
      result = ptx::exchange(data[t], 1);  // all lanes were here, but that orders no memory
      result += tile[next];
      break;
    case kWriteAfterRead:
      tile[t] = data[t];
      __syncthreads();
      result = tile[other];
      tile[t] = 0.f;
      break;
    case kUnwritten:
      if (lane) tile[t] = data[t];
      __syncthreads();
      result = tile[other];
      break;
    case kUnwaited:
    case kOneGroupTooFew:
    case kWaitedButNoBarrier:
    case kNeverWaited:
      if (t % 4 == 0) ptx::copy_async(base + t * 4, data + t, true);
      ptx::commit_copies();
      if (t % 4 == 0) ptx::copy_async(base + (threads + t) * 4, data + t, false);
      ptx::commit_copies();
      if (which == kNeverWaited) break;
      if (which == kOneGroupTooFew) ptx::wait_copies<1>();
      if (which == kWaitedButNoBarrier) ptx::wait_copies<0>();
      if (which != kWaitedButNoBarrier) __syncthreads();
      result = which == kUnwaited ? tile[t] : tile[threads + other];
      ptx::wait_copies<0>();
      break;
    case kDivergentBarrier:
      if (t < kWarpSize) __syncthreads();
      break;
    case kDivergentShuffle:
      if (lane < 16) result = ptx::exchange(data[t], 1);
      break;
    case kMixedInstructions:
      if (lane < 16)
        result = ptx::exchange(data[t], 1);
      else
        __syncwarp();
      break;
    case kSharedBounds:
      tile[t == 3 ? 2 * threads : t] = 0.f;
      break;
    case kGlobalBounds:
      result = data[t == 3 ? 2 * threads : t];
      break;
    case kGlobalRace:
      data[t] = 1.f;
      result = data[next];
      break;
    case kBlockRace:
      data[0] = t == 0 ? 1.f : data[t];
      break;
    case kConstantWritten:
      data[t] = 1.f;
      result = __uint_as_float(ptx::load_once(reinterpret_cast<const uint32_t*>(data) + t, true));
      break;
    case kMisaligned:
      ptx::store(reinterpret_cast<uint2*>(data + 1), {0, 0}, t == 0);
      break;
    case kWild:
      result = *reinterpret_cast<const float*>(reinterpret_cast<uintptr_t>(data) >> 16 << 8);
      break;
    case kNamedBarriers:
      // The second warp hands over to the first, which waits for it alone.
      if (t < kWarpSize) {
        emu::barrier(1, 2 * kWarpSize);
        result = tile[other];
      } else {
        tile[t] = data[t];
        emu::barrier_arrive(1, 2 * kWarpSize);
      }
      break;
    case kNamedBarrierCount:
      emu::barrier(2, t < kWarpSize ? kWarpSize : 2 * kWarpSize);
      break;
    default:
      break;
  }
  if (which != kBlockRace) out[blockIdx.x * threads + t] = result;
}

// c [16, 8] += a [16, depth] b [depth, 8] of 16-bit numbers, by ldmatrix and mma.
template <class Math>
__global__ void product(int depth, const uint16_t* a, const uint16_t* b, float* c) {
  extern __shared__ __align__(16) uint16_t tile[];
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 24 * depth; i += kWarpSize)
    tile[i] = i < 16 * depth ? a[i] : b[i - 16 * depth];
  __syncwarp();
  const uint32_t rows = ptx::shared_address(tile), columns = rows + 32 * depth;
  float sum[4];
  for (int e = 0; e < 4; ++e) sum[e] = c[(lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2];
  uint32_t right[2];
  if (depth == 16) {
    uint32_t left[4];
    ptx::load_matrices(left, rows + (lane % 16 * 16 + lane / 16 * 8) * 2);
    ptx::load_matrices_transposed(right, columns + lane % 16 * 8 * 2);
    Math::multiply_add(sum, left, right[0], right[1]);
  } else {
    uint32_t left[2];
    ptx::load_matrices(left, rows + lane % 16 * 8 * 2);
    ptx::load_matrices_transposed(right, columns + lane % 8 * 8 * 2);
    Math::multiply_add(sum, left, right[0]);
  }
  for (int e = 0; e < 4; ++e) c[(lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2] = sum[e];
}

}  // namespace

int emulated_programs() { return kPrograms; }

int emulated_program(int which, float* data, float* out) {
  constexpr int kThreads = 2 * kWarpSize;
  program<<<which == kBlockRace ? 2 : 1, kThreads, 2 * kThreads * sizeof(float), nullptr>>>(
      which, data, out);
  return cudaGetLastError();
}

int emulated_product(bool bf16, int depth, const uint16_t* a, const uint16_t* b, float* c) {
  if (bf16)
    product<ptx::Bf16Math><<<1, kWarpSize, 48 * depth, nullptr>>>(depth, a, b, c);
  else
    product<ptx::Fp16Math><<<1, kWarpSize, 48 * depth, nullptr>>>(depth, a, b, c);
  return cudaGetLastError();
}

// A block with more shared memory than it asked for.
int emulated_large_block() {
  program<<<1, 32, 64 << 10, nullptr>>>(0, nullptr, nullptr);
  return cudaGetLastError();
}

}  // namespace vlmk
