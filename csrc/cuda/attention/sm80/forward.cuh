// Attention inside segments of any length on tensor cores: the forward.
//
// Method: FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691). One block per tile of 128
// queries and head; a warp owns 32 queries, whose scores and results stay in registers, so that a
// piece of keys or values read from shared memory serves four products. Blocks of keys and values
// arrive by cp.async in two buffers: one barrier per block of keys, the next one under way
// meanwhile. Every head_dim is computed with its true depth: 72 ends in a product of half the
// depth.
//
// Floor: 4 L^2 D FLOPs a head on the tensor cores, half of it if causal; one exponential per score.
// Tiles start longest first (schedule.cuh), so that one long segment makes no tail.
#pragma once

#include "cuda/attention/launch.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/tile.cuh"

namespace vlmk {
namespace {

template <int kDim>
struct ForwardShape {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kBlocks = kTileRows / kWarps / 16;  // of 16 queries, a warp's
  // Keys of a step: 64 of 96 would spill; of 128, two blocks would not fit into an A100's shared
  // memory.
  static constexpr int kKeys = kDim > 96 ? 32 : kDim > 80 ? 48 : 64;
  static constexpr int kQueryBytes = kTileRows * kPitch<kDim>;
  static constexpr int kKeyBytes = kKeys * kPitch<kDim>;
  static constexpr int kShared = kQueryBytes + 4 * kKeyBytes;
};

template <class Math, int kDim, class Rows>
__global__ void __launch_bounds__(ForwardShape<kDim>::kThreads, 2)
    sm80_forward(const AttentionParams p) {
  using S = ForwardShape<kDim>;
  extern __shared__ __align__(128) char shared[];
  const unsigned heads = static_cast<unsigned>(p.heads);
  const unsigned head = blockIdx.x % heads;
  const Tile tile = tile_at(p.tiles, blockIdx.x / heads);
  if (tile.length == 0) return;
  if (threadIdx.x == 0) check_list(p, tile);
  // mutant: sm80-forward-kv-head
  const unsigned kv_head = head / (heads / static_cast<unsigned>(p.kv_heads));

  const uint32_t queries = ptx::shared_address(shared);
  const uint32_t stages = queries + S::kQueryBytes;  // keys, values, keys, values
  const uint16_t* keys = rows_of(p.k, tile.begin, kv_head);
  const uint16_t* values = rows_of(p.v, tile.begin, kv_head);  // mutant: sm80-forward-values
  const int lane = threadIdx.x % kWarpSize, warp_row = threadIdx.x / kWarpSize * S::kBlocks * 16;
  const int first = tile.first + warp_row;  // of the warp's queries
  const uint32_t mine = queries + warp_row * kPitch<kDim>;
  // mutant: sm80-forward-end
  const int end = p.causal ? min(tile.length, tile.first + kTileRows) : tile.length;
  const float exponent = exponent_of(p.scale);

  copy_tile<kDim, kTileRows, S::kThreads>(queries, rows_of(p.q, tile.begin + tile.first, head),
                                          p.q.token_stride, tile.length - tile.first);
  if constexpr (Rows::kVision) ptx::commit_copies();  // mutant: sm80-forward-commit
  copy_tile<kDim, S::kKeys, S::kThreads>(stages, keys, p.k.token_stride, tile.length);
  copy_tile<kDim, S::kKeys, S::kThreads>(stages + S::kKeyBytes, values, p.v.token_stride,
                                         tile.length);
  ptx::commit_copies();
  if constexpr (Rows::kVision) {
    RowRotations<kDim, S::kBlocks * 16> rotations(lane);
    // mutant: sm80-forward-load
    rotations.load(p.rotary, tile.length - first,
                   [&](int64_t row) { return tile.begin + first + row; });
    ptx::wait_copies<1>();  // mutant: sm80-forward-wait-rotate
    // mutant: sm80-forward-sync-rotate
    __syncthreads();                              // the queries are here, to be rotated
    rotations.template apply<Math, false>(mine);  // mutant: sm80-forward-rotate
  }

  float out[S::kBlocks][kDim / 8][4] = {};
  float top[S::kBlocks][2], sum[S::kBlocks][2] = {};
#pragma unroll
  for (int m = 0; m < S::kBlocks; ++m) top[m][0] = top[m][1] = -3e38f;

#pragma unroll 1
  for (int key = 0, stage = 0; key < end; key += S::kKeys, stage ^= 1) {
    ptx::wait_copies<0>();  // mutant: sm80-forward-wait
    // mutant: sm80-forward-sync
    __syncthreads();  // this block of keys is here, and nobody reads the one before any more
    const int next = key + S::kKeys;
    if (next < end) {
      const uint32_t to = stages + (stage ^ 1) * 2 * S::kKeyBytes;  // mutant: sm80-forward-to
      copy_tile<kDim, S::kKeys, S::kThreads>(to, keys + next * p.k.token_stride, p.k.token_stride,
                                             tile.length - next);  // mutant: sm80-forward-next-keys
      // mutant: sm80-forward-next-values
      copy_tile<kDim, S::kKeys, S::kThreads>(to + S::kKeyBytes, values + next * p.v.token_stride,
                                             p.v.token_stride, tile.length - next);
      ptx::commit_copies();
    }
    // mutant: sm80-forward-negate
    if (key == 0 && p.scale < 0.f) negate_rows<kDim, S::kBlocks * 16>(mine);
    // mutant: sm80-forward-causal-skip
    if (p.causal && key >= first + S::kBlocks * 16) continue;  // later than all of its queries

    const uint32_t now = stages + stage * 2 * S::kKeyBytes;  // mutant: sm80-forward-now
    float s[S::kBlocks][S::kKeys / 8][4] = {};
    add_row_products<Math, kDim>(s, mine, now);
    if (next > tile.length || (p.causal && next > first + 1)) {  // mutant: sm80-forward-mask
      mask_keys(s, key, first, p.causal, tile.length);
    }
#pragma unroll
    for (int m = 0; m < S::kBlocks; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float highest = top[m][r];  // mutant: sm80-forward-max-init
#pragma unroll
        for (int n = 0; n < S::kKeys / 8; ++n) {
          highest = fmaxf(highest, fmaxf(s[m][n][r * 2], s[m][n][r * 2 + 1]));
        }
        highest = fmaxf(highest, ptx::exchange(highest, 1));
        highest = fmaxf(highest, ptx::exchange(highest, 2));  // mutant: sm80-forward-max
        // As multiply-adds they would differ where the highest stays: long rows' sums would drift.
        const float offset = __fmul_rn(highest, exponent);
        const float correction = ptx::exp2_approx(__fmul_rn(top[m][r], exponent) - offset);
        top[m][r] = highest;
        float part = 0.f;
#pragma unroll
        for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
          for (int e = r * 2; e < r * 2 + 2; ++e) {
            s[m][n][e] = ptx::exp2_approx(fmaf(s[m][n][e], exponent, -offset));
            part += s[m][n][e];
          }
        }
        sum[m][r] = sum[m][r] * correction + part;  // mutant: sm80-forward-sum
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          out[m][n][r * 2] *= correction;  // mutant: sm80-forward-out
          out[m][n][r * 2 + 1] *= correction;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; n += 2) {
      uint32_t probabilities[S::kBlocks][4];
      as_operand<Math>(probabilities, s, n);
      // mutant: sm80-forward-add-product
      add_product<Math, kDim>(out, probabilities, now + S::kKeyBytes + n * 8 * kPitch<kDim>);
    }
  }

  float factor[S::kBlocks][2];
#pragma unroll
  for (int m = 0; m < S::kBlocks; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[m][r] += ptx::exchange(sum[m][r], 1);
      sum[m][r] += ptx::exchange(sum[m][r], 2);  // mutant: sm80-forward-sum-lanes
      factor[m][r] = 1.f / sum[m][r];
      const int query = first + m * 16 + r * 8 + lane / 4;
      if (lane % 4 == 0 && query < tile.length) {
        const int64_t at = head * p.tokens + tile.begin + query;  // mutant: sm80-forward-at
        p.row_max[at] = top[m][r];
        p.row_sum[at] = sum[m][r];
      }
    }
  }
  store_rows<Math, kDim>(out, factor, mine, tile.length - first, p.out, tile.begin + first, head);
}

}  // namespace
}  // namespace vlmk
