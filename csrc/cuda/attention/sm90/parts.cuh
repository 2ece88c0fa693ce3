// dk and dv of heads that share a key and are dealt out to several blocks: each block's sums in
// float32, and their sum.
#pragma once

#include "cuda/attention/sm90/common.cuh"

namespace vlmk {
namespace {

// A warp's rows of dk (`which` 0) or dv of some heads, into dkv_parts.
template <int kDim>
__device__ __forceinline__ void store_part(const float (&c)[Sm90Row<kDim>::kWide / 2],
                                           const AttentionGradParams& params, int which,
                                           int64_t token, int length, int head) {
  const AttentionParams& p = params.forward;
  // Made here: else they stay in registers through all tiles, and spill.
  const int lane = ptx::anew(threadIdx.x % kWarpSize);
  const int parts = ptx::anew(static_cast<int>(params.group_parts));
  const int64_t index = head % parts * 2 + which, kv_head = head / parts;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + r * 8;
    if (row >= length) continue;  // mutant: sm90-bwd-part-length
    // mutant: sm90-bwd-part-at
    const int64_t at = ((index * p.tokens + token + row) * p.kv_heads + kv_head) * kDim;
    float* to = params.dkv_parts + at + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<float2*>(to + n * 8) = {c[n * 4 + r * 2], c[n * 4 + r * 2 + 1]};
    }
  }
}

// dk and dv, each the sum of its parts in their order: 8 elements a thread.
template <class Math, int kDim>
__global__ void __launch_bounds__(256) sm90_backward_join(const AttentionGradParams params) {
  const AttentionParams& p = params.forward;
  const int64_t rows = p.tokens * p.kv_heads, units = rows * (kDim / 8);  // of a part of dk
  const int64_t unit = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (unit >= 2 * units) return;  // mutant: sm90-bwd-join-end
  const bool is_dv = unit >= units;
  const int64_t mine = is_dv ? unit - units : unit, row = mine / (kDim / 8);
  float sum[8] = {};
  for (int64_t part = 0; part < params.group_parts; ++part) {
    // mutant: sm90-bwd-join-from
    const float* from = params.dkv_parts + ((2 * part + is_dv) * units + mine) * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 four = ptx::load_once(reinterpret_cast<const uint4*>(from) + i, true);
      sum[4 * i] += __uint_as_float(four.x), sum[4 * i + 1] += __uint_as_float(four.y);
      sum[4 * i + 2] += __uint_as_float(four.z), sum[4 * i + 3] += __uint_as_float(four.w);
    }
  }
  const float factor = is_dv ? 1.f : p.scale;  // mutant: sm90-bwd-join-factor
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) words[w] = Math::pack(sum[2 * w] * factor, sum[2 * w + 1] * factor);
  uint16_t* to = rows_of(is_dv ? params.dv : params.dk, row / p.kv_heads, row % p.kv_heads);
  ptx::store(reinterpret_cast<uint4*>(to + mine % (kDim / 8) * 8),
             uint4{words[0], words[1], words[2], words[3]}, true);
}

}  // namespace
}  // namespace vlmk
