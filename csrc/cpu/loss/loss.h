// Softmax cross entropy of a chunk of logits: what linear_cross_entropy does between its products.
#pragma once
#include <cstdint>

#include "common/params.h"
#include "cpu/dispatch.h"

namespace vlmk {

// Rows of logits to statistics and, in their place, gradients. N = rows, C = columns, which are
// classes [first_class, first_class + C). A row's statistics may be of many calls: each adds its
// columns. Gradients take them as they are then.
struct CrossEntropyParams {
  void* logits;            // [N, C], dtype
  const int64_t* targets;  // [N], a class; one of other columns than these adds nothing
  float* row_max;          // [N], at first the lowest float
  float* row_sum;          // [N], sum of exp(logit - row_max), at first 0
  float* target_logit;     // [N], at first 0
  float* logit_sum;        // [N], at first 0; used with label_smoothing only
  const float* scale;      // [N]: factor of each row's gradient, or null: logits are not written
  int64_t rows;            // N
  int64_t columns;         // C
  int64_t first_class;
  int64_t classes;  // in all, for label_smoothing
  double label_smoothing;
  double z_loss;
  bool statistics;  // add these columns to the statistics first
  DType dtype;
};

VLMK_DECLARE(cross_entropy, const CrossEntropyParams&);

}  // namespace vlmk
