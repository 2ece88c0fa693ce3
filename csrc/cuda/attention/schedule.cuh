// The lists of tiles that the kernels for segments of any length work on; schedule.cu writes them.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>

#include "common/params.h"
#include "cuda/ptx/sm80.cuh"

namespace vlmk {
namespace {

// An entry of a list. A list is as long as it can become, T / kTileRows + n; what is left at its
// end has length 0. Behind both stand tile_counts.
struct Tile {
  int begin;   // of the segment
  int length;  // of the segment
  int first;   // row of the segment
  int segment;
};

__device__ __forceinline__ Tile tile_at(const int32_t* tiles, unsigned index) {
  const uint4 v = ptx::load_once(reinterpret_cast<const uint4*>(tiles) + index, true);
  return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z),
          static_cast<int>(v.w)};
}

// Whether cu_seqlens still has a tile's segment: lists are kept from call to call. One thread of
// each tile asks; the segments of all tiles are all tokens, so no change stays unseen.
__device__ __forceinline__ bool is_listed(const int32_t* cu_seqlens, const Tile& tile) {
  // mutant: tiles-listed
  return cu_seqlens[tile.segment] == tile.begin &&
         cu_seqlens[tile.segment + 1] == tile.begin + tile.length;
}

// The same, as an error; not in kernels of wgmma, where after a call ptxas waits for each product.
__device__ __forceinline__ void check_list(const AttentionParams& p, const Tile& tile) {
  if (is_listed(p.cu_seqlens, tile)) return;
  printf(
      "vlmkernels: cu_seqlens[%d] is %d and the next %d, and was %d when tiles were listed: it was "
      "written to where torch does not count it; pass a clone\n",
      tile.segment, p.cu_seqlens[tile.segment], p.cu_seqlens[tile.segment + 1], tile.begin);
  ptx::trap();
}

// Of AttentionParams or TileListParams.
template <class Params>
__host__ __device__ int64_t list_length(const Params& p) {
  return p.tokens / kTileRows + p.segments;
}

// Behind the lists: tiles that the blocks of a launch have taken (0 between launches), tiles of
// queries, tiles of keys, 0.
template <class Params>
__device__ __forceinline__ int32_t* tile_counts(const Params& p) {
  return p.tiles + 8 * list_length(p);
}

}  // namespace
}  // namespace vlmk
