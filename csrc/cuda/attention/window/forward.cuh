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
  const Window window = find_window(p, segment, threadIdx.x == 0, Rows::kBadSegment);
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
    RowRotations<kDim, kKeys, S::kThreads> rotations(threadIdx.x);
    rotations.load(p.rotary, length, [&](int row) { return rows.of(row < length ? row : 0); });
    ptx::wait_copies<1>();
    // mutant: window-forward-sync-rotate
    __syncthreads();  // queries and keys are there, to be rotated
    rotations.template apply<Math, false>(queries);
    rotations.template apply<Math, false>(keys);  // mutant: window-forward-rotate-keys
  } else {
    ptx::wait_copies<1>();  // mutant: window-forward-wait-keys
  }
  __syncthreads();  // mutant: window-forward-sync-keys

  const int lane = threadIdx.x % kWarpSize, first = threadIdx.x / kWarpSize * 16;
  const int row = first + lane / 4;  // and row + 8
  const uint32_t my_queries = queries + first * kPitch<kDim>;
  // The scores carry the scale's sign: their order is then the probabilities'.
  const float exponent = exponent_of(p.scale), sign = p.scale < 0.f ? -1.f : 1.f;
  float s[1][kKeys / 8][4] = {};
  add_row_products<Math, kDim>(s, my_queries, keys);
  float top[2] = {-3e38f, -3e38f};
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = n * 8 + lane % 4 * 2 + e % 2;
      // mutant: window-forward-seen
      const bool seen = key < length && (!p.causal || key <= row + e / 2 * 8);
      s[0][n][e] = seen ? s[0][n][e] * sign : -INFINITY;  // mutant: window-forward-s
      top[e / 2] = fmaxf(top[e / 2], s[0][n][e]);
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
      s[0][n][e] = ptx::exp2_approx((s[0][n][e] - top[e / 2]) * exponent);
      sum[e / 2] += s[0][n][e];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += ptx::exchange(sum[r], 1);  // mutant: window-forward-sum-1
    sum[r] += ptx::exchange(sum[r], 2);  // mutant: window-forward-sum-2
  }

  ptx::wait_copies<0>();  // mutant: window-forward-wait-values
  __syncthreads();        // mutant: window-forward-sync-values
  float out[1][kDim / 8][4] = {};
#pragma unroll
  for (int n = 0; n < kKeys / 8; n += 2) {
    uint32_t probabilities[1][4];
    as_operand<Math>(probabilities, s, n);
    add_product<Math, kDim>(out, probabilities, values + n * 8 * kPitch<kDim>);
  }
  const float factor[1][2] = {{1.f / sum[0], 1.f / sum[1]}};
  stage_rows<Math, kDim>(out, factor, my_queries);
  write_rows<kDim, kDim / 8>(queries, first, 0, p.out, head, rows, length);
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
