// Visual embedding on the CPU. Each throws std::invalid_argument, before it writes anything, where
// an id or an index is out of range.
#pragma once

#include "common/params.h"
#include "cpu/dispatch.h"

namespace vlmk {

void embedding_forward(const EmbeddingParams& p);
void embedding_add(const EmbeddingAddParams& p);
void embedding_gather(const EmbeddingGatherParams& p);
void embedding_reduce(const EmbeddingReduceParams& p);
// Returns the number of keys.
int64_t embedding_sort(const EmbeddingSortParams& p);

// The parts with one version per instruction set. The arguments are in range.
VLMK_DECLARE(embedding_copy, const EmbeddingParams&);
VLMK_DECLARE(embedding_add_rows, const EmbeddingAddParams&);
VLMK_DECLARE(embedding_copy_inverse, const EmbeddingGatherParams&);
// `starts` [runs]: the first entry of each run of equal keys below V.
VLMK_DECLARE(embedding_reduce_runs, const EmbeddingReduceParams&, const int64_t* starts,
             int64_t runs);

}  // namespace vlmk
