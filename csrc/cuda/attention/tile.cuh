// Tiles in shared memory, their rotary embedding, and their products on tensor cores by mma.sync.
#pragma once

#include <cuda_runtime.h>

#include "cuda/attention/rotary.cuh"
#include "cuda/attention/rows.cuh"
#include "cuda/ptx/sm80.cuh"

namespace vlmk {
namespace {

using ptx::kWarpSize;

// ---- tiles in shared memory: rows of kDim 16-bit elements

// Bytes of a row: an odd multiple of 16, so that the 8 rows of a matrix lie in different banks.
template <int kDim>
inline constexpr int kPitch = kDim / 8 % 2 ? kDim * 2 : kDim * 2 + 16;

// Starts copying [kRows, kDim] of global memory to a tile; rows from `length` on become zeros. A
// thread copies the same unit of every kStep-th row, so that its addresses are a step apart;
// threads that are left over (8 of 128 at kDim = 80) copy nothing.
template <int kDim, int kRows, int kThreads>
__device__ __forceinline__ void copy_tile(uint32_t tile, const uint16_t* from, int64_t stride,
                                          int length) {
  constexpr int kUnits = kDim / 8;  // of 16 bytes, in a row
  constexpr int kStep = kThreads / kUnits;
  const int row = threadIdx.x / kUnits, unit = threadIdx.x % kUnits;
  if (kThreads % kUnits != 0 && row >= kStep) return;  // mutant: tiles-copy-tile-spare
  const uint32_t to = tile + row * kPitch<kDim> + unit * 16;
  const uint16_t* source = from + row * stride + unit * 8;
#pragma unroll
  for (int i = 0; i < kRows; i += kStep) {
    if (i + kStep <= kRows || row + i < kRows) {  // mutant: tiles-copy-tile-if-row
      // mutant: tiles-copy-tile-copy
      ptx::copy_async(to + i * kPitch<kDim>, source, row + i < length);
    }
    source += kStep * stride;  // mutant: tiles-copy-tile-source
  }
}

// 8 elements with the other sign.
__device__ __forceinline__ uint4 negated(const uint4& v) {
  constexpr uint32_t kSigns = 0x80008000u;
  return {v.x ^ kSigns, v.y ^ kSigns, v.z ^ kSigns, v.w ^ kSigns};
}

// Adds the products of 8 elements each to a sum.
template <class Math>
__device__ __forceinline__ float add_dot(float sum, const uint4& a, const uint4& b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    sum += Math::low(x[w]) * Math::low(y[w]);
    sum += Math::high(x[w]) * Math::high(y[w]);
  }
  return sum;
}

// Changes the sign of a warp's own kRows rows of a tile, which it begins with.
template <int kDim, int kRows>
__device__ __forceinline__ void negate_rows(uint32_t rows) {
#pragma unroll 1
  for (int i = threadIdx.x % kWarpSize; i < kRows * (kDim / 8); i += kWarpSize) {
    const uint32_t at = rows + i / (kDim / 8) * kPitch<kDim> + i % (kDim / 8) * 16;
    ptx::store_shared(at, negated(ptx::load_shared(at)));
  }
  __syncwarp();
}

// The rotary embedding of kRows rows of a tile by kThreads threads: what each rotates of them,
// pairs of pieces half a row apart. Loaded while the tile is copied.
template <int kDim, int kRows, int kThreads = kWarpSize>
struct RowRotations {
  static constexpr int kColumns = kRotaryColumns<kDim>;
  static constexpr int kPairs = kDim / 2 / kColumns;  // of a row
  static constexpr int kAll = kRows * kPairs;
  static constexpr int kMine = (kAll + kThreads - 1) / kThreads;
  const int thread;
  Rotation<kColumns> rotations[kMine];

  __device__ __forceinline__ explicit RowRotations(int thread_) : thread(thread_) {}
  // table: [T, kDim]; `length` rows exist, and token_of(row) is a row's token, a valid one for all.
  template <class TokenOf>
  __device__ __forceinline__ void load(const float* table, int length, const TokenOf& token_of) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int index = thread + i * kThreads, row = index / kPairs;
      // mutant: tiles-load-on
      const bool on = row < length && (kAll % kThreads == 0 || index < kAll);
      // mutant: tiles-load-rotary
      rotations[i].template load<kDim>(table, token_of(row), index % kPairs * kColumns, on);
    }
  }
  // Rotates the rows where they are; other threads may read them after a barrier.
  template <class Math, bool kBack>
  __device__ __forceinline__ void apply(uint32_t rows) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int index = thread + i * kThreads;
      if (kAll % kThreads != 0 && index >= kAll) break;  // mutant: tiles-apply-if-index
      const uint32_t at = rows + index / kPairs * kPitch<kDim> + index % kPairs * kColumns * 2;
      typename Columns<kColumns>::Unit a, b;
      ptx::load_shared(at, a);
      ptx::load_shared(at + kDim, b);  // mutant: tiles-apply-load-shared
      rotations[i].template apply<Math, kBack>(a, b);
      ptx::store_shared(at, a);
      ptx::store_shared(at + kDim, b);  // mutant: tiles-apply-store-shared
    }
  }
};

// ---- products. A warp has kBlocks blocks of 16 rows; a result is [kBlocks][columns / 8][4], in
// mma's layout: of a block and 8 columns, rows lane / 4 and lane / 4 + 8, columns lane % 4 * 2 and
// the next one.

// This lane's address for matrices in the order of mma's A operand: 16 rows, two times 8 columns.
template <int kDim>
__device__ __forceinline__ uint32_t a_piece(uint32_t rows) {
  const int lane = threadIdx.x % kWarpSize;
  return rows + lane % 16 * kPitch<kDim> + lane / 16 * 16;
}
// For two B operands side by side: rows are B's columns, columns its depth.
template <int kDim>
__device__ __forceinline__ uint32_t b_piece(uint32_t rows) {
  const int lane = threadIdx.x % kWarpSize;
  return rows + (lane % 8 + lane / 16 * 8) * kPitch<kDim> + lane / 8 % 2 * 16;
}

// c += a b^T: rows of two tiles, kDim deep. kUnroll: steps of 16 whose operands may be in registers
// at once.
template <class Math, int kDim, int kUnroll = kDim / 16, int kBlocks, int kColumns>
__device__ __forceinline__ void add_row_products(float (&c)[kBlocks][kColumns][4], uint32_t a,
                                                 uint32_t b) {
  const uint32_t a_lane = a_piece<kDim>(a), b_lane = b_piece<kDim>(b);
#pragma unroll kUnroll
  for (int d = 0; d < kDim / 16; ++d) {
    uint32_t left[kBlocks][4];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      // mutant: tiles-row-products-left
      ptx::load_matrices(left[m], a_lane + m * 16 * kPitch<kDim> + d * 32);
    }
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
      uint32_t right[4];
      ptx::load_matrices(right, b_lane + n * 8 * kPitch<kDim> + d * 32);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        Math::multiply_add(c[m][n], left[m], right[0], right[1]);
        Math::multiply_add(c[m][n + 1], left[m], right[2], right[3]);
      }
    }
  }
  if constexpr (kDim % 16 != 0) {  // the last 8 of the depth
    const uint32_t a_tail = a_lane + kDim / 16 * 32;
    const uint32_t b_tail = a_piece<kDim>(b) + kDim / 16 * 32;
    uint32_t left[kBlocks][2];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      ptx::load_matrices(left[m], a_tail + m * 16 * kPitch<kDim>);
    }
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
      uint32_t right[2];
      ptx::load_matrices(right, b_tail + n * 8 * kPitch<kDim>);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        Math::multiply_add(c[m][n], left[m], right[0]);
        Math::multiply_add(c[m][n + 1], left[m], right[1]);
      }
    }
  }
}

// c += left [.., 16] b: b is 16 rows of a tile, all columns of it or as many as c has.
template <class Math, int kDim, int kBlocks, int kColumns>
__device__ __forceinline__ void add_product(float (&c)[kBlocks][kColumns][4],
                                            const uint32_t (&left)[kBlocks][4], uint32_t b) {
  const uint32_t lane = a_piece<kDim>(b);
#pragma unroll
  for (int n = 0; n < kColumns / 2 * 2; n += 2) {
    uint32_t right[4];
    // mutant: tiles-product-right
    ptx::load_matrices_transposed(right, lane + n * 16);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      Math::multiply_add(c[m][n], left[m], right[0], right[1]);
      Math::multiply_add(c[m][n + 1], left[m], right[2], right[3]);
    }
  }
  if constexpr (kColumns % 2 != 0) {  // the last 8 columns
    uint32_t right[2];
    ptx::load_matrices_transposed(right, lane + kColumns / 2 * 32);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      Math::multiply_add(c[m][kColumns - 1], left[m], right[0], right[1]);
    }
  }
}

// Columns n * 8 to n * 8 + 15 of a result as the A operand of the next product.
template <class Math, int kBlocks, int kColumns>
__device__ __forceinline__ void as_operand(uint32_t (&a)[kBlocks][4],
                                           const float (&c)[kBlocks][kColumns][4], int n) {
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    a[m][0] = Math::pack(c[m][n][0], c[m][n][1]);
    a[m][1] = Math::pack(c[m][n][2], c[m][n][3]);          // mutant: tiles-as-operand-low
    a[m][2] = Math::pack(c[m][n + 1][0], c[m][n + 1][1]);  // mutant: tiles-as-operand-high
    a[m][3] = Math::pack(c[m][n + 1][2], c[m][n + 1][3]);
  }
}

// Scores of queries from `query` on with keys from `key` on: `unseen` where a key is past the
// segment or, if causal, later than the query.
template <int kBlocks, int kColumns>
__device__ __forceinline__ void mask_keys(float (&s)[kBlocks][kColumns][4], int key, int query,
                                          bool causal, int length, float unseen = -INFINITY) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int mine = query + m * 16 + r * 8 + lane / 4;
      // mutant: tiles-mask-keys-seen
      const int seen = (causal ? min(mine + 1, length) : length) - key - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if (n * 8 >= seen) s[m][n][r * 2] = unseen;
        if (n * 8 + 1 >= seen) s[m][n][r * 2 + 1] = unseen;  // mutant: tiles-mask-keys-if-n
      }
    }
  }
}

// Puts the warp's rows, times `factor` of each, into the warp's own rows of a tile that no other
// warp reads any more: all columns of it or as many as c has.
template <class Math, int kDim, int kBlocks, int kColumns>
__device__ __forceinline__ void stage_rows(const float (&c)[kBlocks][kColumns][4],
                                           const float (&factor)[kBlocks][2], uint32_t rows) {
  const int lane = threadIdx.x % kWarpSize;
  __syncwarp();  // mutant: tiles-stage-rows-before
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      // mutant: tiles-stage-rows-at
      const uint32_t at = rows + (m * 16 + lane / 4) * kPitch<kDim> + n * 16 + lane % 4 * 4;
      ptx::store_shared(at, Math::pack(c[m][n][0] * factor[m][0], c[m][n][1] * factor[m][0]));
      ptx::store_shared(at + 8 * kPitch<kDim>,
                        Math::pack(c[m][n][2] * factor[m][1], c[m][n][3] * factor[m][1]));
    }
  }
  __syncwarp();  // mutant: tiles-stage-rows-syncwarp
}

// Writes kRows staged rows, of which `length` exist, to global memory: whole 16-byte units.
template <int kDim, int kRows>
__device__ __forceinline__ void write_rows(uint32_t rows, int length, uint16_t* to,
                                           int64_t stride) {
  constexpr int kUnits = kDim / 8;
#pragma unroll 2
  for (int i = threadIdx.x % kWarpSize; i < kRows * kUnits; i += kWarpSize) {
    const int row = i / kUnits, unit = i % kUnits;
    const bool inside = row < length;  // mutant: tiles-write-rows-inside
    ptx::store(reinterpret_cast<uint4*>(to + (inside ? row : 0) * stride + unit * 8),
               ptx::load_shared(rows + row * kPitch<kDim> + unit * 16), inside);
  }
}

// The warp's rows, times `factor` of each, from `token` on to `to`, by way of `rows` in shared
// memory.
template <class Math, int kDim, int kBlocks>
__device__ __forceinline__ void store_rows(const float (&c)[kBlocks][kDim / 8][4],
                                           const float (&factor)[kBlocks][2], uint32_t rows,
                                           int length, const HeadsView& to, int64_t token,
                                           int64_t head) {
  stage_rows<Math, kDim>(c, factor, rows);
  write_rows<kDim, kBlocks * 16>(rows, length, rows_of(to, token, head), to.token_stride);
}

// The same, rotated back by the table's angles of these tokens.
template <class Math, int kDim, int kBlocks>
__device__ __forceinline__ void store_rows_back(const float (&c)[kBlocks][kDim / 8][4],
                                                const float (&factor)[kBlocks][2], uint32_t rows,
                                                int length, const HeadsView& to, int64_t token,
                                                int64_t head, const float* table) {
  stage_rows<Math, kDim>(c, factor, rows);
  // Else the table's addresses stay in registers from the first rotation to here, and spill.
  RowRotations<kDim, kBlocks * 16> rotations(ptx::anew(threadIdx.x % kWarpSize));
  rotations.load(table, length, [&](int64_t row) { return token + row; });
  rotations.template apply<Math, true>(rows);  // mutant: tiles-store-rotated-apply
  __syncwarp();                                // mutant: tiles-store-rotated-syncwarp
  write_rows<kDim, kBlocks * 16>(rows, length, rows_of(to, token, head), to.token_stride);
}

// Powers of two of the scores' |scale|: exp(|scale| x) = 2^(exponent * x). The sign of the scale is
// put into one of the factors of the scores.
__device__ __forceinline__ float exponent_of(float scale) {
  return fmaxf(fabsf(scale) * 1.44269504f, 1e-30f);  // mutant: tiles-exponent
}

}  // namespace
}  // namespace vlmk
