// Attention inside windows: the forward (tile.cuh says how).
#pragma once

#include "cuda/attention/window/tile.cuh"

namespace vlmk {
namespace {

template <class Math, int kDim, int kKeys, class Rows>
__global__ void __launch_bounds__(Shape<kDim, kKeys>::kThreads)
    window_forward(const AttentionParams p) {
  using S = Shape<kDim, kKeys>;
  extern __shared__ __align__(128) char shared[];
  const int64_t segment = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
  const Window window = find_window<Rows>(p, segment, p.max_seqlen);
  const int length = window.length;
  if (length == 0) return;
  const int64_t kv_head = head / (p.heads / p.kv_heads);  // mutant: window-forward-kv-head
  const uint32_t queries = ptx::shared_address(shared);
  const uint32_t keys = queries + S::kTile, values = keys + S::kTile;
  const Rows rows(p, window, shared + S::kForwardShared);
  copy_tile<kDim, kKeys>(queries, p.q, head, rows, length);
  copy_tile<kDim, kKeys>(keys, p.k, kv_head, rows, length);
  ptx::commit_copies();
  copy_tile<kDim, kKeys>(values, p.v, kv_head, rows, length);
  ptx::commit_copies();
  if constexpr (Rows::kVision) {
    TileRotations<kDim, kKeys> rotations;
    rotations.load(p.rotary, rows, length);
    ptx::wait_copies<1>();
    // mutant: window-forward-sync-rotate
    __syncthreads();  // queries and keys are there, to be rotated
    rotations.template apply<Math>(queries);
    rotations.template apply<Math>(keys);  // mutant: window-forward-rotate-keys
  } else {
    ptx::wait_copies<1>();  // mutant: window-forward-wait-keys
  }
  __syncthreads();  // mutant: window-forward-sync-keys

  const int lane = threadIdx.x % kWarpSize, first = threadIdx.x / kWarpSize * 16;
  const int row = first + lane / 4;  // and row + 8
  const Scale scale = split_scale(p.scale);
  float s[kKeys / 8][4] = {};
  add_row_products<Math, kDim, S::kPitch, kDim / 16>(s, queries, first, keys, 0);
  float top[2] = {-3e38f, -3e38f};
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = n * 8 + lane % 4 * 2 + e % 2;
      // mutant: window-forward-seen
      const bool seen = key < length && (!p.causal || key <= row + e / 2 * 8);
      s[n][e] = seen ? s[n][e] * scale.sign : -INFINITY;  // mutant: window-forward-s
      top[e / 2] = fmaxf(top[e / 2], s[n][e]);
    }
  }
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = fmaxf(top[r], ptx::exchange(top[r], 1));
    top[r] = fmaxf(top[r], ptx::exchange(top[r], 2));  // mutant: window-forward-top
  }
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[n][e] = ptx::exp2_approx((s[n][e] - top[e / 2]) * scale.exponent);
      sum[e / 2] += s[n][e];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += ptx::exchange(sum[r], 1);  // mutant: window-forward-sum-1
    sum[r] += ptx::exchange(sum[r], 2);  // mutant: window-forward-sum-2
  }

  ptx::wait_copies<0>();  // mutant: window-forward-wait-values
  __syncthreads();        // mutant: window-forward-sync-values
  float out[kDim / 8][4] = {};
#pragma unroll
  for (int n = 0; n < kKeys / 8; n += 2) {
    uint32_t probabilities[4];
    as_operand<Math>(probabilities, s[n], s[n + 1]);
    add_product<Math, S::kPitch>(out, probabilities, values, n * 8, 0);
  }
  const float factor[2] = {1.f / sum[0], 1.f / sum[1]};
  stage_rows<Math, S::kPitch>(out, factor, queries, first, 0);
  write_rows<S::kPitch, kDim / 8>(queries, first, 0, p.out, head, rows, length);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (lane % 4 == 0 && row + r * 8 < length) {
      const int64_t at = head * p.tokens + window.begin + row + r * 8;  // mutant: window-forward-at
      p.row_max[at] = top[r];
      p.row_sum[at] = sum[r];
    }
  }
}

template <class Math, int kDim, int kKeys, class Rows>
int launch_forward(const AttentionParams& p, void* stream) {
  using S = Shape<kDim, kKeys>;
  // mutant: window-launch-forward
  return launch(window_forward<Math, kDim, kKeys, Rows>, p.segments * p.heads, S::kThreads,
                S::kForwardShared + Rows::kShared * kKeys, stream, p);
}

template <class Rows>
int forward(const AttentionParams& p, void* stream) {
  const AttentionParams& f = p;
  if (!fits(f)) return cudaErrorInvalidValue;
  if (f.dtype == DType::kBFloat16) {
    VLMK_WINDOW_DIMS(launch_forward, ptx::Bf16Math, Rows, f.head_dim)
  }
  VLMK_WINDOW_DIMS(launch_forward, ptx::Fp16Math, Rows, f.head_dim)
}

}  // namespace
}  // namespace vlmk
