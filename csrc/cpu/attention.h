// Packed variable-length attention on the CPU, fp32 arithmetic for every storage type.
// Method: FlashAttention-2's online softmax (Dao 2023, arXiv:2307.08691) with transposed scores.
#pragma once
#include <cstdint>

#include "cpu/dispatch.h"
#include "params.h"

namespace vlmk {

// Forward: query rows [q_begin, q_end) of a segment, one head. Backward: a whole segment, one
// key/value head with all its query heads. Items are independent, so that results don't depend on
// which thread runs which.
struct AttentionItem {
  int64_t begin;   // first token of the segment
  int64_t length;  // tokens in the segment, > 0
  int64_t q_begin;
  int64_t q_end;
  int64_t head;
};

struct AttentionWork {
  const AttentionItem* items;
  int64_t count;
  int64_t max_length;
};

VLMK_DECLARE(attention_forward_items, const AttentionParams&, const AttentionWork&);
VLMK_DECLARE(attention_backward_items, const AttentionGradParams&, const AttentionWork&);

// Throws std::runtime_error when memory is short. Arguments are the launcher's to check (vlmkernels/attention.py), but for
// cu_seqlens: std::invalid_argument unless 0 <= ... <= T, starting at 0, never falling, ending at T.
void attention_forward(const AttentionParams& p);
void attention_backward(const AttentionGradParams& p);

}  // namespace vlmk
