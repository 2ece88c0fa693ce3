// Packed variable-length attention on the CPU, fp32 arithmetic for every storage type but bf16 on
// processors with fast bf16 dot products or with AMX, and fp16 on those with AMX-FP16. With AMX
// fp32 is multiplied by parts of bf16, as accurately (cpu/parts.h). Method: FlashAttention-2's
// online softmax (Dao 2023, arXiv:2307.08691) with transposed scores.
#pragma once
#include <cstdint>

#include "common/params.h"
#include "cpu/dispatch.h"

namespace vlmk {

// Segments up to which all rows of an item are fetched beforehand (prefetch.inl), and each thread
// has a range of them (cpu/ranges.h).
constexpr int64_t kPrefetchLength = 128;

// dq of a segment and key/value head whose keys are dealt out to several items: they add to it one
// after the other, block by block of queries, so that every sum has the order that one item gives.
struct SharedDq {
  int64_t rows;   // keys of an item, a multiple of 64; the last one may have fewer
  float* dq;      // [heads / kv_heads, length, padded head_dim], in blocks of 64 rows
  int32_t* done;  // [heads / kv_heads, blocks of 64 queries]: items that have added, atomic
};

// Forward: query rows [rows_begin, rows_end) of a segment, one head. Backward: keys
// [rows_begin, rows_end) of a segment, one key/value head with all its query heads. But for a
// shared dq, items are independent: results don't depend on which thread runs which.
struct AttentionItem {
  int64_t begin;       // first token of the segment
  int64_t length;      // tokens in the segment, > 0
  int64_t rows_begin;  // multiples of 64, but for the end of the segment
  int64_t rows_end;
  int64_t head;
  const SharedDq* shared_dq = nullptr;  // backward, if there are other items with other keys
};

struct AttentionWork {
  const AttentionItem* items;
  int64_t count;
  int64_t max_rows;    // of an item
  int64_t max_seqlen;  // of a segment
  int64_t chunk;       // consecutive items whose rows a thread fetches at a time, >= 1
  int64_t chunks;      // consecutive chunks that a thread takes at once, >= 1
  bool non_temporal;   // the results are too large to be found in a cache by whoever reads them; to
                       // an item: and go past the caches
  bool bf16_dots;      // multiply bf16 by dot products, where the instruction set has them
  // [count], or null where an item is one thread's: blocks of 64 queries that were taken of each.
  int32_t* blocks_taken = nullptr;
};

VLMK_DECLARE(attention_forward_items, const AttentionParams&, const AttentionWork&);
VLMK_DECLARE(attention_backward_items, const AttentionGradParams&, const AttentionWork&);

// For bf16 only: its conversions, and work.bf16_dots.
namespace avx512_bf16 {
void attention_forward_items(const AttentionParams&, const AttentionWork&);
void attention_backward_items(const AttentionGradParams&, const AttentionWork&);
}  // namespace avx512_bf16
// On the tiles of AMX and on what stands in for them (cpu/tile.h).
namespace amx_bf16 {
void attention_forward_items(const AttentionParams&, const AttentionWork&);
void attention_backward_items(const AttentionGradParams&, const AttentionWork&);
}  // namespace amx_bf16
namespace amx_emulated {
void attention_forward_items(const AttentionParams&, const AttentionWork&);
void attention_backward_items(const AttentionGradParams&, const AttentionWork&);
}  // namespace amx_emulated

// Floats a token and head of AttentionParams::probabilities, 0 where the kernels of segments of at
// most 64 tokens leave none: those on tiles.
int64_t attention_kept_floats(DType dtype);

// Throws std::runtime_error when memory is short. Arguments are the launcher's to check
// (vlmkernels/attention/launch.py), but for cu_seqlens: std::invalid_argument unless 0 <= ... <= T,
// starting at 0, never falling, ending at T.
void attention_forward(const AttentionParams& p);
void attention_backward(const AttentionGradParams& p);

}  // namespace vlmk
