// The list of tiles that the kernels for segments of any length work on.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>

#include "common/params.h"
#include "cuda/attention/rows.cuh"
#include "cuda/ptx/sm80.cuh"

namespace vlmk {
namespace {

using ptx::kWarpSize;

// Rows of a segment that one block works on: queries, or keys in the kernel of their gradients.
inline constexpr int kTileRows = 128;

// An entry of the list. The list is as long as it can become, T / 128 + n; what is left at its end
// has length 0.
struct Tile {
  int begin;   // of the segment
  int length;  // of the segment
  int first;   // row of the segment
};

__device__ __forceinline__ Tile tile_at(const int32_t* tiles, unsigned index) {
  const uint4 v = ptx::load_once(reinterpret_cast<const uint4*>(tiles) + index, true);
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
// cu_seqlens that fall or leave [0, T], or a segment longer than max_seqlen, print one line and
// trap.
template <class Rows>
__global__ void __launch_bounds__(kScheduleThreads)
    list_tiles(const AttentionParams p, const int64_t max_seqlen, int32_t* const lists) {
  extern __shared__ __align__(128) char shared[];
  const uint32_t counts = ptx::shared_address(shared);  // tiles of each amount of work, then slots
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
            mine_end - mine_begin > max_seqlen) {
          printf(Rows::kTooLong, static_cast<long long>(base + lane),
                 static_cast<long long>(mine_begin), static_cast<long long>(mine_end),
                 static_cast<long long>(p.tokens), static_cast<long long>(max_seqlen));
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
          const int slot = ptx::add_shared(counts + bucket * 4, 1);
          if (pass == 1) {
            const uint4 entry = {static_cast<uint32_t>(begin), static_cast<uint32_t>(length),
                                 static_cast<uint32_t>(i * kTileRows), 0};
            ptx::store(list + slot, entry, true);
          }
        }
        __syncwarp();
      }
    }
    __syncthreads();
    if (pass == 1) break;
    if (warp == 0) {  // counts become the slots of the first tiles
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

// Lists the tiles of queries and, of two lists, those of keys.
template <class Rows = PackedRows>
int launch_list(const AttentionParams& p, int64_t max_seqlen, int32_t* tiles, int lists,
                void* stream) {
  if (p.segments == 0) return cudaSuccess;
  list_tiles<Rows><<<lists, kScheduleThreads, kScheduleShared, static_cast<cudaStream_t>(stream)>>>(
      p, max_seqlen, tiles);
  return cudaGetLastError();
}

}  // namespace
}  // namespace vlmk
