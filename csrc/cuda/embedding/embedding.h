// Launchers of visual embedding on CUDA; each returns a cudaError_t. `stream` is a cudaStream_t.
#pragma once

#include "common/params.h"

namespace vlmk {

int embedding_forward_cuda(const EmbeddingParams& p, void* stream);
int embedding_add_cuda(const EmbeddingAddParams& p, void* stream);
int embedding_gather_cuda(const EmbeddingGatherParams& p, void* stream);
int embedding_reduce_cuda(const EmbeddingReduceParams& p, void* stream);

}  // namespace vlmk
