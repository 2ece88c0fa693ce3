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
// Errors: bad cu_seqlens (find_window) print a line and trap; nothing out of range is read.
#pragma once
#include <cuda_runtime.h>

#include "common/params.h"
#include "cuda/attention/launch.cuh"
#include "cuda/attention/tile.cuh"

namespace vlmk {
namespace {

template <int kDim, int kKeys>
struct Shape {
  static constexpr int kWarps = kKeys / 16;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kTile = kKeys * kPitch<kDim>;
  static constexpr int kSquare = kKeys * kPitch<kKeys>;  // keys x queries
  static constexpr int kForwardShared = 3 * kTile;
  static constexpr int kBackwardShared = 4 * kTile + kSquare + 3 * kKeys * 4;
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
    ptx::copy_async(tile + row * kPitch<kDim> + unit * 16,
                    from + rows.of(inside ? row : 0) * x.token_stride + unit * 8, inside);
  }
}

// Writes kColumns * 8 elements of each of the warp's 16 rows, staged, in whole 16-byte units.
template <int kDim, int kColumns, class Rows>
__device__ __forceinline__ void write_rows(uint32_t tile, int row, int column, const HeadsView& x,
                                           int64_t head, const Rows& rows, int length) {
  uint16_t* to = rows.base(x, head) + column;
#pragma unroll
  for (int i = threadIdx.x % kWarpSize; i < 16 * kColumns; i += kWarpSize) {
    const int r = row + i / kColumns, unit = i % kColumns;
    const bool inside = r < length;  // mutant: window-write-rows-inside
    // mutant: window-write-rows-store
    ptx::store(reinterpret_cast<uint4*>(to + rows.of(inside ? r : 0) * x.token_stride + unit * 8),
               ptx::load_shared(tile + r * kPitch<kDim> + column * 2 + unit * 16), inside);
  }
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
