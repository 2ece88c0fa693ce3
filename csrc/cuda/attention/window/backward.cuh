// Attention inside windows: the backward (tile.cuh says how).
#pragma once

#include "cuda/attention/window/tile.cuh"

namespace vlmk {
namespace {

// delta = sum of out * dout over a row, for the warp's 16 rows: two lanes a row.
template <class Math, int kDim>
__device__ __forceinline__ float row_dot(const uint16_t* out, const uint16_t* dout, bool inside) {
  const int half = threadIdx.x % 2;
  float sum = 0.f;
#pragma unroll 2
  for (int unit = half; unit < kDim / 8; unit += 2) {
    const uint4 a = ptx::load_once(reinterpret_cast<const uint4*>(out) + unit, inside);
    const uint4 b = ptx::load_once(reinterpret_cast<const uint4*>(dout) + unit, inside);
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      sum += Math::low(x[w]) * Math::low(y[w]);
      sum += Math::high(x[w]) * Math::high(y[w]);
    }
  }
  return sum + ptx::exchange(sum, 1);  // mutant: window-delta
}

// Columns [column, column + kPart) of dq = scale * dS keys, for the warp's 16 queries, staged.
template <class Math, int kDim, int kKeys, int kPart>
__device__ __forceinline__ void stage_query_gradient(uint32_t ds_tile, uint32_t keys,
                                                     uint32_t staging, int first, int column,
                                                     float scale) {
  using S = Shape<kDim, kKeys>;
  const int lane = threadIdx.x % kWarpSize;
  float dq[kPart / 8][4] = {};
#pragma unroll 2
  for (int k = 0; k < kKeys; k += 16) {
    uint32_t left[4];
    // dS as [queries, keys]: the transpose of 16 keys x 16 queries of the tile.
    ptx::load_matrices_transposed(left, ds_tile + (k + lane / 16 * 8 + lane % 8) * S::kSquarePitch +
                                            (first + lane / 8 % 2 * 8) * 2);
    add_product<Math, S::kPitch>(dq, left, keys, k, column);
  }
  const float factor[2] = {scale, scale};
  stage_rows<Math, S::kPitch>(dq, factor, staging, first, column);
}

// One block per window and key/value head; the query heads that share it come one after another. A
// warp owns 16 keys, whose dk and dv stay in registers, and then 16 queries for dq.
template <class Math, int kDim, int kKeys, class Rows>
__global__ void __launch_bounds__(Shape<kDim, kKeys>::kThreads, kKeys == 64 && kDim <= 80 ? 3 : 1)
    window_backward(const AttentionGradParams g) {
  using S = Shape<kDim, kKeys>;
  constexpr int kQueries = kDim <= 64 ? 32 : 16;  // whose scores are in registers at a time
  extern __shared__ __align__(128) char shared[];
  const AttentionParams& p = g.forward;
  const int64_t segment = blockIdx.x / p.kv_heads, kv_head = blockIdx.x % p.kv_heads;
  const Window window = find_window<Rows>(p, segment, p.max_seqlen);
  const int length = window.length;
  if (length == 0) return;
  const int64_t group = Rows::kVision ? 1 : p.heads / p.kv_heads;
  const uint32_t queries = ptx::shared_address(shared);
  const uint32_t douts = queries + S::kTile, keys = douts + S::kTile, values = keys + S::kTile;
  const uint32_t ds_tile = values + S::kTile;  // [keys, queries]
  float* row_max = reinterpret_cast<float*>(shared + 4 * S::kTile + kKeys * S::kSquarePitch);
  float* inverse_sum = row_max + kKeys;
  float* delta = inverse_sum + kKeys;
  const Rows rows(p, window, shared + S::kBackwardShared);
  copy_tile<kDim, kKeys>(keys, p.k, kv_head, rows, length);
  copy_tile<kDim, kKeys>(values, p.v, kv_head, rows, length);

  const int lane = threadIdx.x % kWarpSize, first = threadIdx.x / kWarpSize * 16;
  const int key = first + lane / 4;  // and key + 8
  const Scale scale = split_scale(p.scale);
  float dk[kDim / 8][4] = {}, dv[kDim / 8][4] = {};
#pragma unroll 1
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    copy_tile<kDim, kKeys>(queries, p.q, head, rows, length);
    copy_tile<kDim, kKeys>(douts, g.dout, head, rows, length);
    ptx::commit_copies();
    {
      const int row = first + lane / 2;  // mutant: window-backward-row
      const bool inside = row < length;
      const int64_t safe = inside ? row : 0, at = head * p.tokens + window.begin + safe;
      const float dot = row_dot<Math, kDim>(
          rows.base(p.out, head) + rows.of(inside ? row : 0) * p.out.token_stride,
          rows.base(g.dout, head) + rows.of(inside ? row : 0) * g.dout.token_stride, inside);
      if (lane % 2 == 0) {
        row_max[row] = inside ? p.row_max[at] : 0.f;
        inverse_sum[row] = inside ? 1.f / p.row_sum[at] : 0.f;
        delta[row] = dot;
      }
    }
    ptx::wait_copies<0>();  // mutant: window-backward-wait-copies
    if constexpr (Rows::kVision) {
      TileRotations<kDim, kKeys> rotations;
      rotations.load(p.rotary, rows, length);
      __syncthreads();  // queries and keys are there, to be rotated
      rotations.template apply<Math>(queries);
      // Once: with the rotation, a key head has one query head.
      // mutant: window-backward-rotate-keys
      rotations.template apply<Math>(keys);
    }
    __syncthreads();

#pragma unroll 1
    for (int q0 = 0; q0 < kKeys; q0 += kQueries) {
      float s[kQueries / 8][4] = {}, dp[kQueries / 8][4] = {};
      add_row_products<Math, kDim, S::kPitch, 1>(s, keys, first, queries, q0);
      add_row_products<Math, kDim, S::kPitch, 1>(dp, values, first, douts, q0);
#pragma unroll
      for (int n = 0; n < kQueries / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int query = q0 + n * 8 + lane % 4 * 2 + e % 2, mine = key + e / 2 * 8;
          // mutant: window-backward-seen
          const bool seen = mine < length && (!p.causal || mine <= query);
          const float probability =
              ptx::exp2_approx((s[n][e] * scale.sign - row_max[query]) * scale.exponent) *
              inverse_sum[query];
          s[n][e] = seen ? probability : 0.f;
          dp[n][e] = s[n][e] * (dp[n][e] - delta[query]);  // mutant: window-backward-dp
        }
        const uint32_t at = ds_tile + key * S::kSquarePitch + (q0 + n * 8 + lane % 4 * 2) * 2;
        ptx::store_shared(at, Math::pack(dp[n][0], dp[n][1]));
        ptx::store_shared(at + 8 * S::kSquarePitch, Math::pack(dp[n][2], dp[n][3]));
      }
#pragma unroll
      for (int n = 0; n < kQueries / 8; n += 2) {
        uint32_t left[4];
        as_operand<Math>(left, s[n], s[n + 1]);
        add_product<Math, S::kPitch>(dv, left, douts, q0 + n * 8, 0);
        as_operand<Math>(left, dp[n], dp[n + 1]);
        add_product<Math, S::kPitch>(dk, left, queries, q0 + n * 8, 0);
      }
    }
    // mutant: window-backward-sync-ds
    __syncthreads();  // dS is whole; queries and douts are free

    // In two parts: dk and dv are in registers too.
    constexpr int kPart = kDim / 32 * 16;
    stage_query_gradient<Math, kDim, kKeys, kPart>(ds_tile, keys, queries, first, 0, p.scale);
    if constexpr (!Rows::kVision)
      write_rows<S::kPitch, kPart / 8>(queries, first, 0, g.dq, head, rows, length);
    stage_query_gradient<Math, kDim, kKeys, kDim - kPart>(ds_tile, keys, queries, first, kPart,
                                                          p.scale);
    if constexpr (Rows::kVision)
      write_rows_back<Math, kDim, S::kPitch>(queries, first, p.rotary, g.dq, head, rows, length);
    else
      write_rows<S::kPitch, (kDim - kPart) / 8>(queries, first, kPart, g.dq, head, rows, length);
    // mutant: window-backward-sync-head
    __syncthreads();  // before the next head's rows arrive
  }
  // mutant: window-backward-factor
  const float factor[2] = {p.scale, p.scale};
  const float one[2] = {1.f, 1.f};
  stage_rows<Math, S::kPitch>(dk, factor, douts, first, 0);
  if constexpr (Rows::kVision)
    write_rows_back<Math, kDim, S::kPitch>(douts, first, p.rotary, g.dk, kv_head, rows, length);
  else
    write_rows<S::kPitch, kDim / 8>(douts, first, 0, g.dk, kv_head, rows, length);
  stage_rows<Math, S::kPitch>(dv, one, douts, first, 0);
  write_rows<S::kPitch, kDim / 8>(douts, first, 0, g.dv, kv_head, rows, length);
}

template <class Math, int kDim, int kKeys, class Rows>
int launch_backward(const AttentionGradParams& p, void* stream) {
  using S = Shape<kDim, kKeys>;
  const AttentionParams& f = p.forward;
  return launch(window_backward<Math, kDim, kKeys, Rows>, f.segments * f.kv_heads, S::kThreads,
                S::kBackwardShared + Rows::kShared * kKeys, stream, p);
}

template <class Rows>
int backward(const AttentionGradParams& p, void* stream) {
  const AttentionParams& f = p.forward;
  if (!fits(f)) return cudaErrorInvalidValue;
  if (f.dtype == DType::kBFloat16) {
    VLMK_WINDOW_DIMS(launch_backward, ptx::Bf16Math, Rows, f.head_dim)
  }
  VLMK_WINDOW_DIMS(launch_backward, ptx::Fp16Math, Rows, f.head_dim)
}

}  // namespace
}  // namespace vlmk
