// Attention inside windows of at most 128 tokens on tensor cores, forward and backward.
//
// One block per window and head; keys, values and queries of the window stand whole in shared
// memory, so that the softmax is one pass, nothing is rescaled, the backward is one launch without
// atomics or an fp32 buffer, and the same bits come out every time. A warp owns 16 rows.
//
// Floor: a forward reads q, k, v and writes out once, 8 T H D bytes, for 4 T H D L FLOPs: 32 FLOPs
// a byte at L = 64, so memory-bound on every GPU that has tensor cores; the backward reads 5 and
// writes 3 such tensors. Several small blocks on each SM hide each other's loads.
//
// Errors: borders that fall or leave [0, T], or a segment longer than max_length, print one line
// and trap; nothing out of range is read.
#pragma once
#include <cuda_runtime.h>

#include "cuda/attention_rows.cuh"
#include "cuda/attention_window.h"
#include "cuda/primitives.cuh"
#include "params.h"

namespace vlmk {
namespace {

using ptx::kWarpSize;

template <int kDim, int kKeys>
struct Shape {
  static constexpr int kWarps = kKeys / 16;
  static constexpr int kThreads = kWarps * kWarpSize;
  // Bytes of a row in shared memory. 16 more than its data: an odd multiple of 16, so that the 8
  // rows of a matrix lie in different banks.
  static constexpr int kPitch = kDim * 2 + 16;
  static constexpr int kTile = kKeys * kPitch;
  static constexpr int kSquarePitch = kKeys * 2 + 16;  // of a row of keys x queries
  static constexpr int kForwardShared = 3 * kTile;
  static constexpr int kBackwardShared = 4 * kTile + kKeys * kSquarePitch + 3 * kKeys * 4;
};

// Starts copying [length, kDim] of global memory to a tile; rows from length on become zeros.
template <int kDim, int kKeys, class Rows>
__device__ __forceinline__ void copy_tile(uint32_t tile, const HeadsView& x, int64_t head,
                                          const Rows& rows, int length) {
  using S = Shape<kDim, kKeys>;
  constexpr int kUnits = kDim / 8;  // of 16 bytes, in a row
  const uint16_t* from = rows.base(x, head);
#pragma unroll 2
  for (int i = threadIdx.x; i < kKeys * kUnits; i += S::kThreads) {
    const int row = i / kUnits, unit = i % kUnits;
    const bool inside = row < length;
    // mutant: window-copy-tile-copy
    ptx::copy_async(tile + row * S::kPitch + unit * 16,
                    from + rows.of(inside ? row : 0) * x.token_stride + unit * 8, inside);
  }
}

// Address that this lane hands to load_matrices for a 16 x 16 piece of a tile at (row, column): the
// four matrices in the order of mma's A operand.
template <int kPitch>
__device__ __forceinline__ uint32_t a_piece(uint32_t tile, int row, int column) {
  const int lane = threadIdx.x % kWarpSize;
  return tile + (row + lane % 16) * kPitch + (column + lane / 16 * 8) * 2;
}
// The same for two B operands side by side: rows are B's columns, columns its depth.
template <int kPitch>
__device__ __forceinline__ uint32_t b_piece(uint32_t tile, int row, int column) {
  const int lane = threadIdx.x % kWarpSize;
  return tile + (row + lane % 8 + lane / 16 * 8) * kPitch + (column + lane / 8 % 2 * 8) * 2;
}

// c [16, 8 * kColumns] += a [16, kDim] b^T: both are tiles, a's rows from `row` on, b's from
// `other`.
// kUnroll: steps of kDim whose operands may be in registers at once.
template <class Math, int kDim, int kPitch, int kUnroll, int kColumns>
__device__ __forceinline__ void add_row_products(float (&c)[kColumns][4], uint32_t a, int row,
                                                 uint32_t b, int other) {
#pragma unroll kUnroll
  for (int d = 0; d < kDim; d += 16) {
    uint32_t left[4];
    ptx::load_matrices(left, a_piece<kPitch>(a, row, d));
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
      uint32_t right[4];
      ptx::load_matrices(right, b_piece<kPitch>(b, other + n * 8, d));
      Math::multiply_add(c[n], left, right[0], right[1]);
      Math::multiply_add(c[n + 1], left, right[2], right[3]);
    }
  }
}

// c [16, 8 * kColumns] += left [16, 16] b: b is a tile, its rows from `row` on are the depth.
template <class Math, int kPitch, int kColumns>
__device__ __forceinline__ void add_product(float (&c)[kColumns][4], const uint32_t (&left)[4],
                                            uint32_t b, int row, int column) {
#pragma unroll
  for (int n = 0; n < kColumns; n += 2) {
    uint32_t right[4];
    // mutant: window-product-right
    ptx::load_matrices_transposed(right, a_piece<kPitch>(b, row, column + n * 8));
    Math::multiply_add(c[n], left, right[0], right[1]);
    Math::multiply_add(c[n + 1], left, right[2], right[3]);
  }
}

// Two neighbouring 16 x 8 pieces of a result as the A operand of the next product.
template <class Math>
__device__ __forceinline__ void as_operand(uint32_t (&a)[4], const float (&c0)[4],
                                           const float (&c1)[4]) {
  a[0] = Math::pack(c0[0], c0[1]);
  a[1] = Math::pack(c0[2], c0[3]);  // mutant: window-as-operand-low
  a[2] = Math::pack(c1[0], c1[1]);  // mutant: window-as-operand-high
  a[3] = Math::pack(c1[2], c1[3]);
}

// Puts the warp's 16 rows, times `factor` of each thread's two rows, into the warp's own rows of a
// tile that no other warp reads any more, from `column` on.
template <class Math, int kPitch, int kColumns>
__device__ __forceinline__ void stage_rows(const float (&c)[kColumns][4], const float (&factor)[2],
                                           uint32_t tile, int row, int column) {
  const int lane = threadIdx.x % kWarpSize;
  __syncwarp();  // mutant: window-stage-rows-before
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    // mutant: window-stage-rows-at
    const uint32_t at = tile + (row + lane / 4) * kPitch + (column + n * 8 + lane % 4 * 2) * 2;
    ptx::store_shared(at, Math::pack(c[n][0] * factor[0], c[n][1] * factor[0]));
    ptx::store_shared(at + 8 * kPitch, Math::pack(c[n][2] * factor[1], c[n][3] * factor[1]));
  }
  __syncwarp();  // mutant: window-stage-rows-after
}

// Writes kColumns * 8 elements of each of the warp's 16 rows, staged, in whole 16-byte units.
template <int kPitch, int kColumns, class Rows>
__device__ __forceinline__ void write_rows(uint32_t tile, int row, int column, const HeadsView& x,
                                           int64_t head, const Rows& rows, int length) {
  uint16_t* to = rows.base(x, head) + column;
#pragma unroll
  for (int i = threadIdx.x % kWarpSize; i < 16 * kColumns; i += kWarpSize) {
    const int r = row + i / kColumns, unit = i % kColumns;
    const bool inside = r < length;  // mutant: window-write-rows-inside
    // mutant: window-write-rows-store
    ptx::store(reinterpret_cast<uint4*>(to + rows.of(inside ? r : 0) * x.token_stride + unit * 8),
               ptx::load_shared(tile + r * kPitch + column * 2 + unit * 16), inside);
  }
}

// ---- rotary embedding

// What a thread turns of a tile: pairs of units, half a row apart. Loaded while the tile is copied.
template <int kDim, int kKeys>
struct Turns {
  using S = Shape<kDim, kKeys>;
  static constexpr int kPairs = kDim / 16;  // of a row
  static constexpr int kMine = (kKeys * kPairs + S::kThreads - 1) / S::kThreads;
  Turn<8> turns[kMine];

  __device__ __forceinline__ void load(const float* table, const VisionRows& rows, int length) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int index = threadIdx.x + i * S::kThreads, row = index / kPairs;
      const bool on = index < kKeys * kPairs && row < length;
      // mutant: window-load-rotary
      turns[i].template load<kDim>(table, rows.of(on ? row : 0), index % kPairs * 8, on);
    }
  }
  // Turns the rows of a tile where they are. Needs a barrier before and after.
  template <class Math>
  __device__ __forceinline__ void apply(uint32_t tile) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int index = threadIdx.x + i * S::kThreads;
      if (index >= kKeys * kPairs) break;  // mutant: window-apply-if-index
      const uint32_t at = tile + index / kPairs * S::kPitch + index % kPairs * 16;
      uint4 a = ptx::load_shared(at), b = ptx::load_shared(at + kDim);
      turns[i].template apply<Math, false>(a, b);
      ptx::store_shared(at, a);
      ptx::store_shared(at + kDim, b);
    }
  }
};

// write_rows of whole rows, turned back.
template <class Math, int kDim, int kPitch>
__device__ __forceinline__ void write_rows_back(uint32_t tile, int row, const float* table,
                                                const HeadsView& x, int64_t head,
                                                const VisionRows& rows, int length) {
  constexpr int kPairs = kDim / 16;
  uint16_t* base = rows.base(x, head);
#pragma unroll 2
  for (int i = threadIdx.x % kWarpSize; i < 16 * kPairs; i += kWarpSize) {
    const int r = row + i / kPairs, pair = i % kPairs;
    const bool inside = r < length;  // mutant: window-write-rotated-inside
    const int token = rows.of(inside ? r : 0);
    Turn<8> turn;
    turn.template load<kDim>(table, token, pair * 8, inside);  // mutant: window-write-rotated-load
    const uint32_t at = tile + r * kPitch + pair * 16;
    uint4 a = ptx::load_shared(at), b = ptx::load_shared(at + kDim);
    turn.template apply<Math, true>(a, b);
    auto* to = reinterpret_cast<uint4*>(base + token * x.token_stride + pair * 8);
    ptx::store(to, a, inside);
    ptx::store(to + kPairs, b, inside);  // mutant: window-write-rotated-store
  }
}

// |scale| in base 2, and its sign, which the scores carry: their order is then the probabilities'.
struct Scale {
  float exponent;
  float sign;
};
__device__ __forceinline__ Scale split_scale(float scale) {
  // mutant: window-split-scale
  return {fmaxf(fabsf(scale) * 1.44269504f, 1e-30f), scale < 0.f ? -1.f : 1.f};
}

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
    Turns<kDim, kKeys> turns;
    turns.load(p.rotary, rows, length);
    ptx::wait_copies<1>();
    // mutant: window-forward-sync-rotate
    __syncthreads();  // queries and keys are there, to be turned
    turns.template apply<Math>(queries);
    turns.template apply<Math>(keys);  // mutant: window-forward-rotate-keys
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
      Turns<kDim, kKeys> turns;
      turns.load(p.rotary, rows, length);
      __syncthreads();  // queries and keys are there, to be turned
      turns.template apply<Math>(queries);
      // mutant: window-backward-rotate-keys
      turns.template apply<Math>(keys);  // once: with the rotation, a key head has one query head
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

template <class Params>
int launch(void (*kernel)(Params), const Params& params, int64_t blocks, int threads, int shared,
           void* stream) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  // Above 48 KB the kernel must have asked for it.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, shared, static_cast<cudaStream_t>(stream)>>>(
      params);
  return cudaGetLastError();
}

template <class Math, int kDim, int kKeys, class Rows>
int launch_forward(const AttentionParams& p, void* stream) {
  using S = Shape<kDim, kKeys>;
  // mutant: window-launch-forward
  return launch(window_forward<Math, kDim, kKeys, Rows>, p, p.segments * p.heads, S::kThreads,
                S::kForwardShared + Rows::kShared * kKeys, stream);
}
template <class Math, int kDim, int kKeys, class Rows>
int launch_backward(const AttentionGradParams& p, void* stream) {
  using S = Shape<kDim, kKeys>;
  const AttentionParams& f = p.forward;
  return launch(window_backward<Math, kDim, kKeys, Rows>, p, f.segments * f.kv_heads, S::kThreads,
                S::kBackwardShared + Rows::kShared * kKeys, stream);
}

// Returns launch<Math, kDim, kKeys, Rows>(p, stream) of the smallest instance that holds f's shape.
#define VLMK_WINDOW_KEYS(launch, Math, dim, Rows)                      \
  case dim:                                                            \
    return f.max_seqlen <= 64 ? launch<Math, dim, 64, Rows>(p, stream) \
                              : launch<Math, dim, 128, Rows>(p, stream);
#define VLMK_WINDOW_DIMS(launch, Math, Rows, head_dim) \
  switch (head_dim) {                                  \
    VLMK_WINDOW_KEYS(launch, Math, 64, Rows)           \
    VLMK_WINDOW_KEYS(launch, Math, 80, Rows)           \
    VLMK_WINDOW_KEYS(launch, Math, 96, Rows)           \
    case 128:                                          \
      return launch<Math, 128, 64, Rows>(p, stream);   \
    default:                                           \
      return cudaErrorInvalidValue;                    \
  }

// 128 keys of 128 elements would take 171 KB in the backward; an A100 has 163.
inline bool fits(const AttentionParams& p) {
  return p.max_seqlen <= (p.head_dim == 128 ? 64 : 128) && p.dtype != DType::kFloat32;
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
