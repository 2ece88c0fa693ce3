// Where the rows of a segment lie in memory.
#pragma once
#include <cuda_runtime.h>

#include <cstdio>

#include "common/params.h"
#include "cuda/ptx/sm80.cuh"

namespace vlmk {
namespace {

// One window: its tokens in the packed batch. Length 0: nothing to do.
struct Window {
  int64_t begin;
  int length;
};

__device__ __forceinline__ uint16_t* rows_of(const HeadsView& x, int64_t token, int64_t head) {
  return static_cast<uint16_t*>(x.data) + token * x.token_stride + head * x.head_stride;
}

#define VLMK_BAD_SEGMENT                                                                           \
  "segment %lld is tokens %lld to %lld of %lld, and max_seqlen is %lld: cu_seqlens must begin at " \
  "0, never fall, end at the number of tokens and have no segment longer than max_seqlen\n"

// Where the rows of a window are in memory: one after another ...
struct PackedRows {
  static constexpr bool kVision = false;
  static constexpr const char* kBadSegment = "vlmkernels.varlen_attention: " VLMK_BAD_SEGMENT;
  static constexpr int kShared = 0;  // bytes a key
  Window window;

  __device__ __forceinline__ PackedRows(const AttentionParams&, const Window& window_, char*)
      : window(window_) {}
  // Of a head: row `row` is of(row) tokens further.
  __device__ __forceinline__ uint16_t* base(const HeadsView& x, int64_t head) const {
    return rows_of(x, window.begin, head);
  }
  __device__ __forceinline__ int of(int row) const { return row; }
};

// ... or where the order says, each in its rotary position: a vision tower's. The tokens of the
// rows stand in shared memory.
struct VisionRows {
  static constexpr bool kVision = true;
  static constexpr const char* kBadSegment = "vlmkernels.vision_attention: " VLMK_BAD_SEGMENT;
  static constexpr int kShared = 4;
  const int* tokens;

  __device__ __forceinline__ VisionRows(const AttentionParams& p, const Window& window, char* at)
      : tokens(reinterpret_cast<int*>(at)) {
    const int row = threadIdx.x;  // a block has more threads than rows
    if (row < window.length) {
      int token = static_cast<int>(window.begin) + row;  // mutant: rows-place
      if (p.order != nullptr) {
        token = p.order[window.begin + row];  // mutant: rows-token
        if (token < 0 || token >= p.tokens) {
          printf("vlmkernels.vision_attention: window_order[%lld] is %d, but there are %lld rows\n",
                 static_cast<long long>(window.begin + row), token,
                 static_cast<long long>(p.tokens));
          ptx::trap();
        }
      }
      reinterpret_cast<int*>(at)[row] = token;
    }
    __syncthreads();  // mutant: rows-sync
  }
  __device__ __forceinline__ uint16_t* base(const HeadsView& x, int64_t head) const {
    return rows_of(x, 0, head);
  }
  __device__ __forceinline__ int of(int row) const { return tokens[row]; }
};

// Segment `segment` of AttentionParams or TileListParams. Of cu_seqlens that don't begin at 0, fall
// or don't end at T, so that a row would belong to no segment, or of a segment longer than
// max_seqlen, one thread prints a line and traps; the others, whose trap could end the grid before,
// get length 0.
template <class Params>
__device__ __forceinline__ Window find_window(const Params& p, int64_t segment, bool one,
                                              const char* message) {
  const int64_t begin = p.cu_seqlens[segment], end = p.cu_seqlens[segment + 1];
  const bool gap = (segment == 0 && begin != 0) ||
                   (segment + 1 == p.segments && end != p.tokens);  // mutant: rows-gap
  if (begin < 0 || end < begin || end > p.tokens || end - begin > p.max_seqlen || gap) {
    if (one) {
      printf(message, static_cast<long long>(segment), static_cast<long long>(begin),
             static_cast<long long>(end), static_cast<long long>(p.tokens),
             static_cast<long long>(p.max_seqlen));
      ptx::trap();
    }
    return {0, 0};
  }
  return {begin, static_cast<int>(end - begin)};
}

}  // namespace
}  // namespace vlmk
