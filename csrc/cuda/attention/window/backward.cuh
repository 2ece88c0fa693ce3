// Attention inside windows: the backward (tile.cuh says how).
#pragma once

#include "cuda/attention/window/tile.cuh"

namespace vlmk {
namespace {

// Of each of the warp's 16 rows what delta = sum of out * dout takes, two lanes a row. Everything
// is on its way before anything is waited for: a trip to memory is longer than a window's products.
template <class Math, int kDim>
struct RowStatistics {
  static constexpr int kUnits = kDim / 16;  // of 16 bytes, a lane
  uint4 out[kUnits];
  float row_max, row_sum;

  // at: of a row's maximum and sum.
  __device__ __forceinline__ RowStatistics(const AttentionParams& p, const uint16_t* row,
                                           int64_t at, bool inside) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = threadIdx.x % 2 + 2 * i;
      out[i] = ptx::load_once(reinterpret_cast<const uint4*>(row) + unit, inside);
    }
    row_max = inside ? p.row_max[at] : 0.f;
    row_sum = inside ? p.row_sum[at] : 0.f;
  }
  // dout: the row in shared memory.
  __device__ __forceinline__ float delta(uint32_t dout) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = threadIdx.x % 2 + 2 * i;
      sum = add_dot<Math>(sum, out[i], ptx::load_shared(dout + unit * 16));
    }
    return sum + ptx::exchange(sum, 1);  // mutant: window-delta
  }
};

// Columns [column, column + kPart) of dq = scale * dS keys, for the warp's 16 queries, staged.
template <class Math, int kDim, int kKeys, int kPart>
__device__ __forceinline__ void stage_query_gradient(uint32_t ds_tile, uint32_t keys,
                                                     uint32_t staging, int first, int column,
                                                     float scale) {
  float dq[1][kPart / 8][4] = {};
#pragma unroll 2
  for (int k = 0; k < kKeys; k += 16) {
    uint32_t left[1][4];
    // dS as [queries, keys]: the transpose of 16 keys x 16 queries of the tile.
    ptx::load_matrices_transposed(left[0], b_piece<kKeys>(ds_tile + k * kPitch<kKeys> + first * 2));
    add_product<Math, kDim>(dq, left, keys + k * kPitch<kDim> + column * 2);
  }
  const float factor[1][2] = {{scale, scale}};
  stage_rows<Math, kDim>(dq, factor, staging + first * kPitch<kDim> + column * 2);
}

// Rotates the warp's 16 rows of a tile back.
template <class Math, int kDim>
__device__ __forceinline__ void rotate_back(uint32_t tile, int first, const float* table,
                                            const VisionRows& rows, int length) {
  RowRotations<kDim, 16> angles(ptx::anew(threadIdx.x % kWarpSize));
  angles.load(table, length - first, [&](int row) {
    const int place = first + row;  // mutant: window-backward-angles
    return rows.of(place < length ? place : 0);
  });
  angles.template apply<Math, true>(tile + first * kPitch<kDim>);  // mutant: window-backward-back
  __syncwarp();  // mutant: window-backward-back-syncwarp
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
  const Window window = find_window(p, segment, threadIdx.x == 0, Rows::kBadSegment);
  const int length = window.length;
  if (length == 0) return;
  const int64_t group = Rows::kVision ? 1 : p.heads / p.kv_heads;
  const uint32_t queries = ptx::shared_address(shared);
  const uint32_t douts = queries + S::kTile, keys = douts + S::kTile, values = keys + S::kTile;
  const uint32_t ds_tile = values + S::kTile;  // [keys, queries]
  float* row_max = reinterpret_cast<float*>(shared + 4 * S::kTile + S::kSquare);
  float* inverse_sum = row_max + kKeys;
  float* delta = inverse_sum + kKeys;
  const Rows rows(p, window, shared + S::kBackwardShared);
  copy_tile<kDim, kKeys>(keys, p.k, kv_head, rows, length);
  copy_tile<kDim, kKeys>(values, p.v, kv_head, rows, length);

  const int lane = threadIdx.x % kWarpSize, first = threadIdx.x / kWarpSize * 16;
  const int key = first + lane / 4;  // and key + 8
  const uint32_t my_keys = keys + first * kPitch<kDim>, my_values = values + first * kPitch<kDim>;
  const float exponent = exponent_of(p.scale), sign = p.scale < 0.f ? -1.f : 1.f;
  float dk[1][kDim / 8][4] = {}, dv[1][kDim / 8][4] = {};
#pragma unroll 1
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const int mine = first + lane / 2;  // mutant: window-backward-row
    const bool inside = mine < length;
    const RowStatistics<Math, kDim> statistics(
        p, rows.base(p.out, head) + rows.of(inside ? mine : 0) * p.out.token_stride,
        head * p.tokens + window.begin + (inside ? mine : 0), inside);
    copy_tile<kDim, kKeys>(queries, p.q, head, rows, length);
    copy_tile<kDim, kKeys>(douts, g.dout, head, rows, length);
    ptx::commit_copies();
    RowRotations<kDim, kKeys, S::kThreads> rotations(threadIdx.x);
    if constexpr (Rows::kVision)
      rotations.load(p.rotary, length, [&](int row) { return rows.of(row < length ? row : 0); });
    ptx::wait_copies<0>();  // mutant: window-backward-wait-copies
    __syncthreads();        // mutant: window-backward-sync-copies
    const float dot = statistics.delta(douts + mine * kPitch<kDim>);
    if (lane % 2 == 0) {
      row_max[mine] = statistics.row_max;
      inverse_sum[mine] = inside ? 1.f / statistics.row_sum : 0.f;
      delta[mine] = dot;
    }
    if constexpr (Rows::kVision) {
      rotations.template apply<Math, false>(queries);
      // Once: with the rotation, a key head has one query head.
      // mutant: window-backward-rotate-keys
      rotations.template apply<Math, false>(keys);
    }
    __syncthreads();

#pragma unroll 1
    for (int q0 = 0; q0 < kKeys; q0 += kQueries) {
      const int row = q0 * kPitch<kDim>;
      float s[1][kQueries / 8][4] = {}, dp[1][kQueries / 8][4] = {};
      add_row_products<Math, kDim, 1>(s, my_keys, queries + row);
      add_row_products<Math, kDim, 1>(dp, my_values, douts + row);
#pragma unroll
      for (int n = 0; n < kQueries / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int query = q0 + n * 8 + lane % 4 * 2 + e % 2, seeing = key + e / 2 * 8;
          // mutant: window-backward-seen
          const bool seen = seeing < length && (!p.causal || seeing <= query);
          const float probability =
              ptx::exp2_approx((s[0][n][e] * sign - row_max[query]) * exponent) *
              inverse_sum[query];
          s[0][n][e] = seen ? probability : 0.f;
          // mutant: window-backward-dp
          dp[0][n][e] = s[0][n][e] * (dp[0][n][e] - delta[query]);
        }
        const uint32_t at = ds_tile + key * kPitch<kKeys> + (q0 + n * 8 + lane % 4 * 2) * 2;
        ptx::store_shared(at, Math::pack(dp[0][n][0], dp[0][n][1]));
        ptx::store_shared(at + 8 * kPitch<kKeys>, Math::pack(dp[0][n][2], dp[0][n][3]));
      }
#pragma unroll
      for (int n = 0; n < kQueries / 8; n += 2) {
        uint32_t left[1][4];
        as_operand<Math>(left, s, n);
        add_product<Math, kDim>(dv, left, douts + row + n * 8 * kPitch<kDim>);
        as_operand<Math>(left, dp, n);
        add_product<Math, kDim>(dk, left, queries + row + n * 8 * kPitch<kDim>);
      }
    }
    // mutant: window-backward-sync-ds
    __syncthreads();  // dS is whole; queries and douts are free

    // In two parts: dk and dv are in registers too.
    constexpr int kPart = kDim / 32 * 16;
    stage_query_gradient<Math, kDim, kKeys, kPart>(ds_tile, keys, queries, first, 0, p.scale);
    if constexpr (!Rows::kVision)
      write_rows<kDim, kPart / 8>(queries, first, 0, g.dq, head, rows, length);
    stage_query_gradient<Math, kDim, kKeys, kDim - kPart>(ds_tile, keys, queries, first, kPart,
                                                          p.scale);
    if constexpr (Rows::kVision) {
      rotate_back<Math, kDim>(queries, first, p.rotary, rows, length);
      write_rows<kDim, kDim / 8>(queries, first, 0, g.dq, head, rows, length);
    } else {
      write_rows<kDim, (kDim - kPart) / 8>(queries, first, kPart, g.dq, head, rows, length);
    }
    // mutant: window-backward-sync-head
    __syncthreads();  // before the next head's rows arrive
  }
  // mutant: window-backward-factor
  const float factor[1][2] = {{p.scale, p.scale}};
  const float one[1][2] = {{1.f, 1.f}};
  stage_rows<Math, kDim>(dk, factor, douts + first * kPitch<kDim>);
  if constexpr (Rows::kVision) rotate_back<Math, kDim>(douts, first, p.rotary, rows, length);
  write_rows<kDim, kDim / 8>(douts, first, 0, g.dk, kv_head, rows, length);
  stage_rows<Math, kDim>(dv, one, douts + first * kPitch<kDim>);
  write_rows<kDim, kDim / 8>(douts, first, 0, g.dv, kv_head, rows, length);
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
