// What the kernels of tiled attention share: tiles in shared memory, their rotary embedding, their
// products on tensor cores, and the list of tiles to work on. Included by attention_flash.cuh,
// attention_flash_backward.cuh and attention_hopper.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>

#include "cuda/attention_rows.cuh"
#include "cuda/primitives.cuh"
#include "params.h"

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

// Changes the sign of a warp's own kRows rows of a tile, which it begins with.
template <int kDim, int kRows>
__device__ __forceinline__ void negate_rows(uint32_t rows) {
#pragma unroll 1
  for (int i = threadIdx.x % kWarpSize; i < kRows * (kDim / 8); i += kWarpSize) {
    const uint32_t at = rows + i / (kDim / 8) * kPitch<kDim> + i % (kDim / 8) * 16;
    uint4 v = ptx::load_shared(at);
    v.x ^= 0x80008000u;
    v.y ^= 0x80008000u;
    v.z ^= 0x80008000u;
    v.w ^= 0x80008000u;
    ptx::store_shared(at, v);
  }
  __syncwarp();
}

// The rotary embedding of a warp's own kRows rows of a tile: what each lane turns of them, pairs of
// pieces half a row apart.
template <int kDim, int kRows>
struct RowTurns {
  static constexpr int kColumns = kTurnColumns<kDim>;
  static constexpr int kPairs = kDim / 2 / kColumns;  // of a row
  static constexpr int kAll = kRows * kPairs;
  static constexpr int kMine = (kAll + kWarpSize - 1) / kWarpSize;
  const int lane;
  Turn<kColumns> turns[kMine];

  __device__ __forceinline__ explicit RowTurns(int lane_) : lane(lane_) {}
  // table: [T, kDim]; `token` is that of the first row, and `length` rows exist.
  __device__ __forceinline__ void load(const float* table, int64_t token, int length) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int index = lane + i * kWarpSize, row = index / kPairs;
      // mutant: tiles-load-on
      const bool on = row < length && (kAll % kWarpSize == 0 || index < kAll);
      // mutant: tiles-load-rotary
      turns[i].template load<kDim>(table, token + row, index % kPairs * kColumns, on);
    }
  }
  // Turns the rows where they are; other lanes may read them after a __syncwarp().
  template <class Math, bool kBack>
  __device__ __forceinline__ void apply(uint32_t rows) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int index = lane + i * kWarpSize;
      if (kAll % kWarpSize != 0 && index >= kAll) break;  // mutant: tiles-apply-if-index
      const uint32_t at = rows + index / kPairs * kPitch<kDim> + index % kPairs * kColumns * 2;
      typename Columns<kColumns>::Unit a, b;
      ptx::load_shared(at, a);
      ptx::load_shared(at + kDim, b);  // mutant: tiles-apply-load-shared
      turns[i].template apply<Math, kBack>(a, b);
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

// c += a b^T: rows of two tiles, kDim deep.
template <class Math, int kDim, int kBlocks, int kColumns>
__device__ __forceinline__ void add_row_products(float (&c)[kBlocks][kColumns][4], uint32_t a,
                                                 uint32_t b) {
  const uint32_t a_lane = a_piece<kDim>(a), b_lane = b_piece<kDim>(b);
#pragma unroll
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

// c [.., kDim] += left [.., 16] b: b is 16 rows of a tile.
template <class Math, int kDim, int kBlocks>
__device__ __forceinline__ void add_product(float (&c)[kBlocks][kDim / 8][4],
                                            const uint32_t (&left)[kBlocks][4], uint32_t b) {
  const uint32_t lane = a_piece<kDim>(b);
#pragma unroll
  for (int n = 0; n < kDim / 16 * 2; n += 2) {
    uint32_t right[4];
    ptx::load_matrices_transposed(right, lane + n * 16);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      Math::multiply_add(c[m][n], left[m], right[0], right[1]);
      Math::multiply_add(c[m][n + 1], left[m], right[2], right[3]);
    }
  }
  if constexpr (kDim % 16 != 0) {  // the last 8 columns
    uint32_t right[2];
    ptx::load_matrices_transposed(right, lane + kDim / 16 * 32);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      Math::multiply_add(c[m][kDim / 8 - 1], left[m], right[0], right[1]);
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
    a[m][1] = Math::pack(c[m][n][2], c[m][n][3]);
    a[m][2] = Math::pack(c[m][n + 1][0], c[m][n + 1][1]);  // mutant: tiles-as-operand-high
    a[m][3] = Math::pack(c[m][n + 1][2], c[m][n + 1][3]);
  }
}

// Scores of queries from `query` on with keys from `key` on: -infinity where a key is past the
// segment or, if causal, later than the query.
template <int kBlocks, int kColumns>
__device__ __forceinline__ void mask_keys(float (&s)[kBlocks][kColumns][4], int key, int query,
                                          bool causal, int length) {
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
        if (n * 8 >= seen) s[m][n][r * 2] = -INFINITY;
        if (n * 8 + 1 >= seen) s[m][n][r * 2 + 1] = -INFINITY;  // mutant: tiles-mask-keys-if-n
      }
    }
  }
}

// Puts the warp's rows, times `factor` of each, into the warp's own rows of a tile that no other
// warp reads any more.
template <class Math, int kDim, int kBlocks>
__device__ __forceinline__ void stage_rows(const float (&c)[kBlocks][kDim / 8][4],
                                           const float (&factor)[kBlocks][2], uint32_t rows) {
  const int lane = threadIdx.x % kWarpSize;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
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

template <class Math, int kDim, int kBlocks>
__device__ __forceinline__ void store_rows(const float (&c)[kBlocks][kDim / 8][4],
                                           const float (&factor)[kBlocks][2], uint32_t rows,
                                           int length, uint16_t* to, int64_t stride) {
  stage_rows<Math, kDim>(c, factor, rows);
  write_rows<kDim, kBlocks * 16>(rows, length, to, stride);
}

// The same, turned back by the table's angles of `token`, the first row's, and those after it.
template <class Math, int kDim, int kBlocks>
__device__ __forceinline__ void store_rows_back(const float (&c)[kBlocks][kDim / 8][4],
                                                const float (&factor)[kBlocks][2], uint32_t rows,
                                                int length, const float* table, int64_t token,
                                                uint16_t* to, int64_t stride) {
  stage_rows<Math, kDim>(c, factor, rows);
  // Else the table's addresses stay in registers from the first turn to here, and spill.
  RowTurns<kDim, kBlocks * 16> turns(ptx::anew(threadIdx.x % kWarpSize));
  turns.load(table, token, length);
  turns.template apply<Math, true>(rows);  // mutant: tiles-store-rotated-apply
  __syncwarp();                            // mutant: tiles-store-rotated-syncwarp
  write_rows<kDim, kBlocks * 16>(rows, length, to, stride);
}

// Powers of two of the scores' |scale|: exp(|scale| x) = 2^(exponent * x). The sign of the scale is
// put into one of the factors of the scores.
__device__ __forceinline__ float exponent_of(float scale) {
  return fmaxf(fabsf(scale) * 1.44269504f, 1e-30f);  // mutant: tiles-exponent
}

// ---- the list of tiles

// Rows of a segment that one block works on: queries, or keys in the kernel of their gradients.
inline constexpr int kTileRows = 128;

// An entry of the list. The list is as long as it can become, T / 128 + n; what is left at its end
// has length 0.
struct Tile {
  int begin;   // of the segment
  int length;  // of the segment
  int first;   // row of the segment
};

__device__ __forceinline__ Tile tile_at(const int32_t* tiles, unsigned place) {
  const uint4 v = ptx::load_once(reinterpret_cast<const uint4*>(tiles) + place, true);
  return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z)};
}

inline int64_t list_length(const AttentionParams& p) { return p.tokens / kTileRows + p.segments; }

inline constexpr int kScheduleThreads = 256;
inline constexpr int kBuckets = 512;  // tiles with that much work or more count as equal
inline constexpr int kScheduleShared = (kBuckets + 1) * 4;

// Writes the list, tiles with the most work first, so that the last blocks to start are short ones:
// a sort by counting. Block 0 lists tiles of queries, block 1 of keys, behind it. With causal
// attention the last query of a segment sees most keys, and the first key is seen by most queries.
// Tiles of equal work come in any order: no result depends on it.
//
// Borders that fall or leave [0, T], or a segment longer than max_length, print one line and trap.
template <class Rows>
__global__ void __launch_bounds__(kScheduleThreads)
    list_tiles(const AttentionParams p, const int64_t max_length, int32_t* const lists) {
  extern __shared__ __align__(128) char shared[];
  const uint32_t counts = ptx::shared_address(shared);  // tiles of each amount of work, then places
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool of_keys = blockIdx.x == 1;
  const int64_t total = p.tokens / kTileRows + p.segments;
  uint4* const list = reinterpret_cast<uint4*>(lists) + (of_keys ? total : 0);
  for (int i = threadIdx.x; i < kBuckets; i += kScheduleThreads) {
    ptx::store_shared(counts + i * 4, 0u);
  }
  __syncthreads();

#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {  // count, then write
#pragma unroll 1
    for (int64_t base = warp * kWarpSize; base < p.segments; base += kScheduleThreads) {
      int mine_begin = 0, mine_end = 0;
      if (base + lane < p.segments) {
        mine_begin = p.cu_seqlens[base + lane];
        mine_end = p.cu_seqlens[base + lane + 1];
        if (mine_begin < 0 || mine_end < mine_begin || mine_end > p.tokens ||
            mine_end - mine_begin > max_length) {
          printf(Rows::kTooLong, static_cast<long long>(base + lane),
                 static_cast<long long>(mine_begin), static_cast<long long>(mine_end),
                 static_cast<long long>(p.tokens), static_cast<long long>(max_length));
          ptx::trap();
        }
      }
      __syncwarp();
      const int64_t left = p.segments - base;
#pragma unroll 1
      for (int source = 0; source < kWarpSize && source < left; ++source) {
        const int begin = ptx::broadcast(mine_begin, source);
        const int length = ptx::broadcast(mine_end, source) - begin;
        const int tiles = (length + kTileRows - 1) / kTileRows;  // mutant: tiles-list-tiles-tiles
#pragma unroll 1
        for (int i = lane; i < tiles; i += kWarpSize) {
          // mutant: tiles-list-tiles-work
          const int work = !p.causal ? tiles : of_keys ? tiles - i : i + 1;
          // mutant: tiles-list-tiles-bucket
          const int bucket = work < kBuckets ? kBuckets - work : 0;
          const int place = ptx::add_shared(counts + bucket * 4, 1);
          if (pass == 1) {
            const uint4 entry = {static_cast<uint32_t>(begin), static_cast<uint32_t>(length),
                                 static_cast<uint32_t>(i * kTileRows), 0};
            ptx::store(list + place, entry, true);
          }
        }
        __syncwarp();
      }
    }
    __syncthreads();
    if (pass == 1) break;
    if (warp == 0) {  // counts become the places of the first tiles
      constexpr int kEach = kBuckets / kWarpSize;
      int* const mine = reinterpret_cast<int*>(shared) + lane * kEach;
      int sum = 0;
      for (int i = 0; i < kEach; ++i) sum += mine[i];
      int before = sum;  // up to and with this lane, then without
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int below = ptx::from_below(before, distance);
        if (lane >= distance) before += below;
      }
      if (lane == kWarpSize - 1) ptx::store_shared(counts + kBuckets * 4, uint32_t(before));
      before -= sum;  // mutant: tiles-list-tiles-before
      for (int i = 0; i < kEach; ++i) {
        const int count = mine[i];
        mine[i] = before;
        before += count;
      }
    }
    __syncthreads();
  }
  const int64_t used = reinterpret_cast<const int*>(shared)[kBuckets];
  // mutant: tiles-list-tiles-loop
  for (int64_t i = used + threadIdx.x; i < total; i += kScheduleThreads) {
    ptx::store(list + i, uint4{0, 0, 0, 0}, true);
  }
}

// ---- launches

template <class... Params>
int launch(void (*kernel)(Params...), int64_t blocks, int threads, int shared, void* stream,
           const Params&... params) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  if (shared > 48 << 10) {  // so much only where the kernel asked for it
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared, static_cast<cudaStream_t>(stream)>>>(
      params...);
  return cudaGetLastError();
}

// Lists the tiles of queries and, of two lists, those of keys.
template <class Rows = PackedRows>
int launch_list(const AttentionParams& p, int64_t max_length, int32_t* tiles, int lists,
                void* stream) {
  if (p.segments == 0) return cudaSuccess;
  list_tiles<Rows><<<lists, kScheduleThreads, kScheduleShared, static_cast<cudaStream_t>(stream)>>>(
      p, max_length, tiles);
  return cudaGetLastError();
}

// Calls launch<Math, head_dim>(p, stream) for an instance.
#define VLMK_FLASH_DIMS(launch, Math, head_dim) \
  switch (head_dim) {                           \
    case 64:                                    \
      return launch<Math, 64>(p, stream);       \
    case 72:                                    \
      return launch<Math, 72>(p, stream);       \
    case 80:                                    \
      return launch<Math, 80>(p, stream);       \
    case 96:                                    \
      return launch<Math, 96>(p, stream);       \
    case 128:                                   \
      return launch<Math, 128>(p, stream);      \
    default:                                    \
      return cudaErrorInvalidValue;             \
  }

}  // namespace
}  // namespace vlmk
