// Attention inside segments of any length on tensor cores: the backward, deterministic.
//
// Three launches after the list of tiles: `backward_preprocess` (the rows' sums of out * dout),
// `sm80_backward_dkdv` (one block per 128 keys and key/value head: dk and dv, summed in registers
// over all queries of the group's heads) and `sm80_backward_dq` (one block per 128 queries and
// head: dq). Scores are computed in both, 14 L^2 D FLOPs where one pass would do with 10; in
// exchange no gradient is added to memory, neither by atomics nor through an fp32 buffer, and the
// same bits come out every time.
//
// Probabilities and dS go from the accumulators of one product into the operands of the next, never
// through shared memory: in `sm80_backward_dkdv` they are computed transposed, keys x queries.
#pragma once

#include "cuda/attention/launch.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/tile.cuh"

namespace vlmk {
namespace {

// ---- lse and delta

inline constexpr int kPreprocessThreads = 256;
inline constexpr int kPreprocessLanes = 4;  // of a row
inline constexpr int kPreprocessRows = kPreprocessThreads / kPreprocessLanes;

// lse_delta[0] = log2 of the sum of a row's exponentials, its maximum put back, lse_delta[1] = sum
// of out * dout. One block per 64 tokens and head.
template <class Math, int kDim>
__global__ void __launch_bounds__(kPreprocessThreads)
    backward_preprocess(const AttentionGradParams params) {
  const AttentionParams& p = params.forward;
  const unsigned heads = static_cast<unsigned>(p.heads);
  const int64_t head = blockIdx.x % heads;
  const int64_t token = int64_t{blockIdx.x / heads} * kPreprocessRows +
                        static_cast<int>(threadIdx.x / kPreprocessLanes);
  const bool inside = token < p.tokens;
  const int64_t safe = inside ? token : 0;
  const uint16_t *out = rows_of(p.out, safe, head), *dout = rows_of(params.dout, safe, head);
  const int lane = threadIdx.x % kPreprocessLanes;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kDim / 8; i += kPreprocessLanes) {
    const int unit = i + lane;
    const bool on = inside && (kDim / 8 % kPreprocessLanes == 0 || unit < kDim / 8);
    const uint4 a = ptx::load_once(reinterpret_cast<const uint4*>(out) + unit, on);
    const uint4 b = ptx::load_once(reinterpret_cast<const uint4*>(dout) + unit, on);
    sum = add_dot<Math>(sum, a, b);
  }
  sum += ptx::exchange(sum, 1);
  sum += ptx::exchange(sum, 2);  // mutant: sm80-preprocess-sum
  if (lane == 0 && inside) {
    const int64_t at = head * p.tokens + token;
    // mutant: sm80-preprocess-log-sum
    params.lse_delta[at] = p.row_max[at] * exponent_of(p.scale) + ptx::log2_approx(p.row_sum[at]);
    params.lse_delta[p.heads * p.tokens + at] = sum;
  }
}

template <class Math, int kDim>
int launch_preprocess(const AttentionGradParams& params, void* stream) {
  const AttentionParams& p = params.forward;
  // mutant: sm80-preprocess-launch
  return launch(backward_preprocess<Math, kDim>,
                (p.tokens + kPreprocessRows - 1) / kPreprocessRows * p.heads, kPreprocessThreads, 0,
                stream, params);
}

// ---- dk and dv

template <int kDim>
struct DkDvShape {
  // Blocks of 16 keys of a warp: dk and dv of 32 keys fill the registers at 80.
  static constexpr int kBlocks = kDim > 80 ? 1 : 2;
  static constexpr int kWarps = kTileRows / 16 / kBlocks;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kQueries = kDim > 72 ? 32 : 64;  // of a step
  static constexpr int kChunk = 32 / kBlocks;           // of them, scores in registers at a time
  static constexpr int kKeyBytes = kTileRows * kPitch<kDim>;
  static constexpr int kQueryBytes = kQueries * kPitch<kDim>;
  static constexpr int kStageBytes = 2 * kQueryBytes + 2 * kQueries * 4;
  static constexpr int kShared = 2 * kKeyBytes + 2 * kStageBytes;
  static constexpr int kMinBlocks = kThreads == 128 ? 2 : 1;
};

// Starts copying the queries of a step, their dout, and lse and delta of each row.
template <int kDim>
__device__ __forceinline__ void copy_queries(uint32_t to, const AttentionGradParams& params,
                                             const Tile& tile, int64_t head, int query) {
  using S = DkDvShape<kDim>;
  const AttentionParams& p = params.forward;
  const HeadsView& dout = params.dout;
  const int64_t token = tile.begin + query;
  const int left = tile.length - query;
  copy_tile<kDim, S::kQueries, S::kThreads>(to, rows_of(p.q, token, head), p.q.token_stride, left);
  copy_tile<kDim, S::kQueries, S::kThreads>(to + S::kQueryBytes, rows_of(dout, token, head),
                                            dout.token_stride, left);
  static_assert(S::kThreads >= 2 * S::kQueries);
  const int row = threadIdx.x % S::kQueries, which = threadIdx.x / S::kQueries;
  if (which < 2) {
    const float* from = params.lse_delta + (which * p.heads + head) * p.tokens + token;
    ptx::copy_word_async(to + 2 * S::kQueryBytes + threadIdx.x * 4, from + (row < left ? row : 0),
                         row < left);  // mutant: sm80-copy-queries-numbers
  }
  ptx::commit_copies();
}

template <class Math, int kDim, class Rows>
__global__ void __launch_bounds__(DkDvShape<kDim>::kThreads, DkDvShape<kDim>::kMinBlocks)
    sm80_backward_dkdv(const AttentionGradParams params) {
  using S = DkDvShape<kDim>;
  extern __shared__ __align__(128) char shared[];
  const AttentionParams& p = params.forward;
  const unsigned kv_heads = static_cast<unsigned>(p.kv_heads);
  const unsigned kv_head = blockIdx.x % kv_heads;
  const int32_t* tiles = p.tiles + 4 * list_length(p);
  const Tile tile = tile_at(tiles, blockIdx.x / kv_heads);
  if (tile.length == 0) return;
  if (threadIdx.x == 0) check_list(p, tile);
  const int group = static_cast<int>(p.heads) / static_cast<int>(kv_heads);

  const uint32_t keys = ptx::shared_address(shared), values = keys + S::kKeyBytes;
  const uint32_t stages = values + S::kKeyBytes;  // queries, dout, lse and delta; twice
  const int lane = threadIdx.x % kWarpSize, warp_row = threadIdx.x / kWarpSize * S::kBlocks * 16;
  const int first = tile.first + warp_row;  // of the warp's keys
  const uint32_t my_keys = keys + warp_row * kPitch<kDim>;
  const uint32_t my_values = values + warp_row * kPitch<kDim>;
  const float exponent = exponent_of(p.scale);
  copy_tile<kDim, kTileRows, S::kThreads>(keys, rows_of(p.k, tile.begin + tile.first, kv_head),
                                          p.k.token_stride, tile.length - tile.first);
  if constexpr (Rows::kVision) ptx::commit_copies();  // mutant: sm80-dkdv-commit
  copy_tile<kDim, kTileRows, S::kThreads>(values, rows_of(p.v, tile.begin + tile.first, kv_head),
                                          p.v.token_stride, tile.length - tile.first);
  const int first_query = p.causal ? tile.first : 0;  // of those that see a key
  copy_queries<kDim>(stages, params, tile, kv_head * group, first_query);
  if constexpr (Rows::kVision) {
    RowRotations<kDim, S::kBlocks * 16> rotations(lane);
    rotations.load(p.rotary, tile.length - first,
                   [&](int64_t row) { return tile.begin + first + row; });
    ptx::wait_copies<1>();  // mutant: sm80-dkdv-wait-rotate
    // mutant: sm80-dkdv-sync-rotate
    __syncthreads();                                 // the keys are here, to be rotated
    rotations.template apply<Math, false>(my_keys);  // mutant: sm80-dkdv-rotate
  }

  float dk[S::kBlocks][kDim / 8][4] = {}, dv[S::kBlocks][kDim / 8][4] = {};
  const int steps = (tile.length - first_query + S::kQueries - 1) / S::kQueries;
  int query = first_query, head = 0;  // of the group
#pragma unroll 1
  for (int i = 0; i < steps * group; ++i) {  // mutant: sm80-dkdv-loop
    ptx::wait_copies<0>();                   // mutant: sm80-dkdv-wait
    // mutant: sm80-dkdv-sync
    __syncthreads();  // these queries are here, and nobody reads the ones before any more
    const int now_query = query;
    const uint32_t now = stages + i % 2 * S::kStageBytes;
    query += S::kQueries;
    if (query >= tile.length) {
      query = first_query;  // mutant: sm80-dkdv-query
      ++head;
    }
    if (head < group) {
      copy_queries<kDim>(stages + (i + 1) % 2 * S::kStageBytes, params, tile,
                         kv_head * group + head, query);  // mutant: sm80-dkdv-copy-queries
    }
    // mutant: sm80-dkdv-negate
    if (i == 0 && p.scale < 0.f) negate_rows<kDim, S::kBlocks * 16>(my_keys);

#pragma unroll 1
    for (int c = 0; c < S::kQueries; c += S::kChunk) {
      // mutant: sm80-dkdv-causal-skip
      if (p.causal && now_query + c + S::kChunk <= first) continue;  // earlier than all its keys
      const uint32_t queries = /* mutant: sm80-dkdv-queries */ now + c * kPitch<kDim>,
                     douts = queries + S::kQueryBytes;
      float s[S::kBlocks][S::kChunk / 8][4] = {}, ds[S::kBlocks][S::kChunk / 8][4] = {};
      add_row_products<Math, kDim>(s, my_keys, queries);
      add_row_products<Math, kDim>(ds, my_values, douts);
      if (p.causal && now_query + c < first + S::kBlocks * 16) {  // mutant: sm80-dkdv-causal-if
#pragma unroll
        for (int m = 0; m < S::kBlocks; ++m) {
#pragma unroll
          for (int n = 0; n < S::kChunk / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int key = first + m * 16 + e / 2 * 8 + lane / 4;
              const int column = now_query + c + n * 8 + lane % 4 * 2 + e % 2;
              if (key > column) s[m][n][e] = -INFINITY;  // mutant: sm80-dkdv-causal-mask
            }
          }
        }
      }
      // Rows of keys past the segment hold anything: they are not stored. Queries past it are
      // zeros, as are their lse and delta, and add nothing.
#pragma unroll
      for (int n = 0; n < S::kChunk / 8; ++n) {
        const uint32_t at = now + 2 * S::kQueryBytes + (c + n * 8 + lane % 4 * 2) * 4;
        const float2 lse = ptx::load_shared_pair(at);
        const float2 delta = ptx::load_shared_pair(at + S::kQueries * 4);
#pragma unroll
        for (int m = 0; m < S::kBlocks; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float offset = e % 2 ? lse.y : lse.x;  // mutant: sm80-dkdv-offset
            s[m][n][e] = ptx::exp2_approx(fmaf(s[m][n][e], exponent, -offset));
            // mutant: sm80-dkdv-ds
            ds[m][n][e] = s[m][n][e] * (ds[m][n][e] - (e % 2 ? delta.y : delta.x));
          }
        }
      }
#pragma unroll
      for (int n = 0; n < S::kChunk / 8; n += 2) {
        uint32_t left[S::kBlocks][4];
        as_operand<Math>(left, s, n);
        add_product<Math, kDim>(dv, left, douts + n * 8 * kPitch<kDim>);
        as_operand<Math>(left, ds, n);
        add_product<Math, kDim>(dk, left, queries + n * 8 * kPitch<kDim>);
      }
    }
  }

  float factor[S::kBlocks][2], one[S::kBlocks][2];
#pragma unroll
  for (int m = 0; m < S::kBlocks; ++m) {
    factor[m][0] = factor[m][1] = p.scale;  // mutant: sm80-dkdv-factor
    one[m][0] = one[m][1] = 1.f;
  }
  const int64_t token = tile.begin + first;
  const int length = tile.length - first;
  if constexpr (Rows::kVision) {
    // mutant: sm80-dkdv-store-rotated
    store_rows_back<Math, kDim>(dk, factor, my_keys, length, params.dk, token, kv_head, p.rotary);
  } else {
    store_rows<Math, kDim>(dk, factor, my_keys, length, params.dk, token, kv_head);
  }
  store_rows<Math, kDim>(dv, one, my_values, length, params.dv, token, kv_head);
}

// ---- dq

template <int kDim>
struct DqShape {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kBlocks = kTileRows / kWarps / 16;  // of 16 queries, a warp's
  static constexpr int kKeys = kDim > 72 ? 32 : 64;        // of a step
  static constexpr int kChunk = kDim > 96 ? 16 : 32;       // of them, scores in registers at a time
  static constexpr int kQueryBytes = kTileRows * kPitch<kDim>;
  static constexpr int kKeyBytes = kKeys * kPitch<kDim>;
  static constexpr int kShared = 2 * kQueryBytes + 4 * kKeyBytes;
};

template <class Math, int kDim, class Rows>
__global__ void __launch_bounds__(DqShape<kDim>::kThreads, 2)
    sm80_backward_dq(const AttentionGradParams params) {
  using S = DqShape<kDim>;
  extern __shared__ __align__(128) char shared[];
  const AttentionParams& p = params.forward;
  const HeadsView& dout = params.dout;
  const unsigned heads = static_cast<unsigned>(p.heads);
  const unsigned head = blockIdx.x % heads;
  const Tile tile = tile_at(p.tiles, blockIdx.x / heads);
  if (tile.length == 0) return;
  if (threadIdx.x == 0) check_list(p, tile);
  // mutant: sm80-dq-kv-head
  const unsigned kv_head = head / (heads / static_cast<unsigned>(p.kv_heads));

  const uint32_t queries = ptx::shared_address(shared), douts = queries + S::kQueryBytes;
  const uint32_t stages = douts + S::kQueryBytes;  // keys, values, keys, values
  const uint16_t* keys = rows_of(p.k, tile.begin, kv_head);
  const uint16_t* values = rows_of(p.v, tile.begin, kv_head);
  const int lane = threadIdx.x % kWarpSize, warp_row = threadIdx.x / kWarpSize * S::kBlocks * 16;
  const int first = tile.first + warp_row;  // of the warp's queries
  const uint32_t my_queries = queries + warp_row * kPitch<kDim>;
  const uint32_t my_douts = douts + warp_row * kPitch<kDim>;
  const int end = p.causal ? min(tile.length, tile.first + kTileRows) : tile.length;
  const float exponent = exponent_of(p.scale);
  copy_tile<kDim, kTileRows, S::kThreads>(queries, rows_of(p.q, tile.begin + tile.first, head),
                                          p.q.token_stride, tile.length - tile.first);
  if constexpr (Rows::kVision) ptx::commit_copies();
  copy_tile<kDim, kTileRows, S::kThreads>(douts, rows_of(dout, tile.begin + tile.first, head),
                                          dout.token_stride, tile.length - tile.first);
  copy_tile<kDim, S::kKeys, S::kThreads>(stages, keys, p.k.token_stride, tile.length);
  copy_tile<kDim, S::kKeys, S::kThreads>(stages + S::kKeyBytes, values, p.v.token_stride,
                                         tile.length);
  ptx::commit_copies();
  if constexpr (Rows::kVision) {
    RowRotations<kDim, S::kBlocks * 16> rotations(lane);
    rotations.load(p.rotary, tile.length - first,
                   [&](int64_t row) { return tile.begin + first + row; });
    ptx::wait_copies<1>();
    // mutant: sm80-dq-sync-rotate
    __syncthreads();                                    // the queries are here, to be rotated
    rotations.template apply<Math, false>(my_queries);  // mutant: sm80-dq-rotate
  }

  float lse[S::kBlocks][2], delta[S::kBlocks][2];
#pragma unroll
  for (int m = 0; m < S::kBlocks; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first + m * 16 + r * 8 + lane / 4;
      const bool inside = query < tile.length;
      const float* from = params.lse_delta + head * p.tokens + tile.begin + (inside ? query : 0);
      lse[m][r] = inside ? from[0] : 0.f;
      delta[m][r] = inside ? from[p.heads * p.tokens] : 0.f;
    }
  }

  float sum[S::kBlocks][kDim / 8][4] = {};
#pragma unroll 1
  for (int key = 0, stage = 0; key < end; key += S::kKeys, stage ^= 1) {
    ptx::wait_copies<0>();
    // mutant: sm80-dq-sync
    __syncthreads();  // this block of keys is here, and nobody reads the one before any more
    const int next = key + S::kKeys;
    if (next < end) {
      const uint32_t to = stages + (stage ^ 1) * 2 * S::kKeyBytes;
      copy_tile<kDim, S::kKeys, S::kThreads>(to, keys + next * p.k.token_stride, p.k.token_stride,
                                             tile.length - next);
      copy_tile<kDim, S::kKeys, S::kThreads>(to + S::kKeyBytes, values + next * p.v.token_stride,
                                             p.v.token_stride, tile.length - next);
      ptx::commit_copies();
    }
    // mutant: sm80-dq-negate
    if (key == 0 && p.scale < 0.f) negate_rows<kDim, S::kBlocks * 16>(my_queries);

#pragma unroll 1
    for (int c = 0; c < S::kKeys; c += S::kChunk) {
      if (p.causal && key + c >= first + S::kBlocks * 16) break;  // later than all of its queries
      // mutant: sm80-dq-now
      const uint32_t now = stages + stage * 2 * S::kKeyBytes + c * kPitch<kDim>;
      float s[S::kBlocks][S::kChunk / 8][4] = {}, ds[S::kBlocks][S::kChunk / 8][4] = {};
      add_row_products<Math, kDim>(s, my_queries, now);
      add_row_products<Math, kDim>(ds, my_douts, now + S::kKeyBytes);
      const int after = key + c + S::kChunk;
      if (after > tile.length || (p.causal && after > first + 1)) {  // mutant: sm80-dq-mask
        mask_keys(s, key + c, first, p.causal, tile.length);
      }
#pragma unroll
      for (int m = 0; m < S::kBlocks; ++m) {
#pragma unroll
        for (int n = 0; n < S::kChunk / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float probability = ptx::exp2_approx(fmaf(s[m][n][e], exponent, -lse[m][e / 2]));
            ds[m][n][e] = probability * (ds[m][n][e] - delta[m][e / 2]);  // mutant: sm80-dq-ds
          }
        }
      }
#pragma unroll
      for (int n = 0; n < S::kChunk / 8; n += 2) {
        uint32_t left[S::kBlocks][4];
        as_operand<Math>(left, ds, n);
        add_product<Math, kDim>(sum, left, now + n * 8 * kPitch<kDim>);
      }
    }
  }

  float factor[S::kBlocks][2];
#pragma unroll
  for (int m = 0; m < S::kBlocks; ++m) factor[m][0] = factor[m][1] = p.scale;
  const int64_t token = tile.begin + first;
  const int length = tile.length - first;
  if constexpr (Rows::kVision) {
    // mutant: sm80-dq-store-rotated
    store_rows_back<Math, kDim>(sum, factor, my_queries, length, params.dq, token, head, p.rotary);
  } else {
    store_rows<Math, kDim>(sum, factor, my_queries, length, params.dq, token, head);
  }
}

}  // namespace
}  // namespace vlmk
