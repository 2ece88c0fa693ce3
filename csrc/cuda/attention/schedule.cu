// Lists the tiles of segments of any length, in the order in which blocks take them.
#include "cuda/attention/attention.h"
#include "cuda/attention/launch.cuh"
#include "cuda/attention/rows.cuh"
#include "cuda/attention/schedule.cuh"

namespace vlmk {
namespace {

using ptx::kWarpSize;

inline constexpr int kScheduleThreads = 256;
inline constexpr int kBuckets = 512;  // tiles with that much work or more count as equal
inline constexpr int kScheduleShared = (kBuckets + 1) * 4;

// Writes the lists, tiles with the most work first, so that the last blocks to start are short
// ones: a sort by counting. Block 0 lists tiles of queries, block 1 of keys, behind it. With causal
// attention the last query of a segment sees most keys, and the first key is seen by most queries.
// Tiles of equal work come in any order, but a segment's tiles of keys from its first on:
// sm90/fused.cu adds to dq in that order.
//
// Bad cu_seqlens print a line and trap, see find_window.
__global__ void __launch_bounds__(kScheduleThreads) list_tiles(const TileListParams p) {
  extern __shared__ __align__(128) char shared[];
  const uint32_t counts = ptx::shared_address(shared);  // tiles of each amount of work, then slots
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool of_keys = blockIdx.x == 1;
  const int64_t total = list_length(p);
  uint4* const list = reinterpret_cast<uint4*>(p.tiles) + (of_keys ? total : 0);
  for (int i = threadIdx.x; i < kBuckets; i += kScheduleThreads) {
    ptx::store_shared(counts + i * 4, 0u);
  }
  __syncthreads();

#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {  // count, then write
#pragma unroll 1
    for (int64_t base = warp * kWarpSize; base < p.segments; base += kScheduleThreads) {
      Window mine = {0, 0};
      if (base + lane < p.segments) {
        mine = find_window(p, base + lane, true,
                           p.vision ? VisionRows::kBadSegment : PackedRows::kBadSegment);
      }
      __syncwarp();
      const int64_t left = p.segments - base;
#pragma unroll 1
      for (int source = 0; source < kWarpSize && source < left; ++source) {
        const int begin = ptx::broadcast(static_cast<int>(mine.begin), source);
        const int length = ptx::broadcast(mine.length, source);
        const int tiles = (length + kTileRows - 1) / kTileRows;  // mutant: tiles-list-tiles-tiles
#pragma unroll 1
        for (int chunk = 0; chunk < tiles; chunk += kWarpSize) {
          const int i = chunk + lane;
          // mutant: tiles-list-tiles-work
          const int work = !p.causal ? tiles : of_keys ? tiles - i : i + 1;
          // mutant: tiles-list-tiles-bucket
          const int bucket = work < kBuckets ? kBuckets - work : 0;
          // Of keys, tiles with as much work as the chunk's first follow it: lane 0 takes their
          // slots.
          const int last = p.causal ? tiles - kBuckets : tiles - 1;
          // mutant: tiles-list-tiles-alike
          const int alike = of_keys ? min(last + 1 - chunk, kWarpSize) : 0;
          int slot = 0;
          if (lane < alike ? lane == 0 : i < tiles) {
            slot = ptx::add_shared(counts + bucket * 4, lane < alike ? alike : 1);
          }
          const int first = ptx::broadcast(slot, 0);
          if (lane < alike) slot = first + lane;
          if (pass == 1 && i < tiles) {
            const uint4 entry = {static_cast<uint32_t>(begin), static_cast<uint32_t>(length),
                                 static_cast<uint32_t>(i * kTileRows),
                                 static_cast<uint32_t>(base + source)};
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
  const uint32_t used = reinterpret_cast<const uint32_t*>(shared)[kBuckets];
  if (threadIdx.x == 0) {
    // mutant: tiles-list-tiles-counts
    const uint2 counts = of_keys ? uint2{used, 0} : uint2{0, used};
    ptx::store(reinterpret_cast<uint2*>(tile_counts(p)) + of_keys, counts, true);
  }
  // mutant: tiles-list-tiles-loop
  for (int64_t i = used + threadIdx.x; i < total; i += kScheduleThreads) {
    ptx::store(list + i, uint4{0, 0, 0, 0}, true);
  }
}

}  // namespace

int list_tiles_cuda(const TileListParams& p, void* stream) {
  if (p.tokens > 0x7fffffff) return cudaErrorInvalidValue;
  return launch(list_tiles, p.segments == 0 ? 0 : 2, kScheduleThreads, kScheduleShared, stream, p);
}

}  // namespace vlmk
