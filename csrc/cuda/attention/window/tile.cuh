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
// Errors: cu_seqlens that fall or leave [0, T], or a segment longer than max_seqlen, print one line
// and trap; nothing out of range is read.
#pragma once
#include <cuda_runtime.h>

#include "common/params.h"
#include "cuda/attention/launch.cuh"
#include "cuda/attention/rotary.cuh"
#include "cuda/attention/rows.cuh"
#include "cuda/ptx/sm80.cuh"

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

// What a thread rotates of a tile: pairs of units, half a row apart. Loaded while the tile is
// copied.
template <int kDim, int kKeys>
struct TileRotations {
  using S = Shape<kDim, kKeys>;
  static constexpr int kPairs = kDim / 16;  // of a row
  static constexpr int kMine = (kKeys * kPairs + S::kThreads - 1) / S::kThreads;
  Rotation<8> rotations[kMine];

  __device__ __forceinline__ void load(const float* table, const VisionRows& rows, int length) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int index = threadIdx.x + i * S::kThreads, row = index / kPairs;
      const bool on = index < kKeys * kPairs && row < length;
      // mutant: window-load-rotary
      rotations[i].template load<kDim>(table, rows.of(on ? row : 0), index % kPairs * 8, on);
    }
  }
  // Rotates the rows of a tile where they are. Needs a barrier before and after.
  template <class Math>
  __device__ __forceinline__ void apply(uint32_t tile) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int index = threadIdx.x + i * S::kThreads;
      if (index >= kKeys * kPairs) break;  // mutant: window-apply-if-index
      const uint32_t at = tile + index / kPairs * S::kPitch + index % kPairs * 16;
      uint4 a = ptx::load_shared(at), b = ptx::load_shared(at + kDim);
      rotations[i].template apply<Math, false>(a, b);
      ptx::store_shared(at, a);
      ptx::store_shared(at + kDim, b);
    }
  }
};

// write_rows of whole rows, rotated back.
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
    Rotation<8> rotation;
    // mutant: window-write-rotated-load
    rotation.template load<kDim>(table, token, pair * 8, inside);
    const uint32_t at = tile + r * kPitch + pair * 16;
    uint4 a = ptx::load_shared(at), b = ptx::load_shared(at + kDim);
    rotation.template apply<Math, true>(a, b);
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

}  // namespace
}  // namespace vlmk
