// The launcher of softmax cross entropy on CUDA; it returns a cudaError_t. `stream` is a
// cudaStream_t.
#pragma once

#include "common/params.h"

namespace vlmk {

int cross_entropy_cuda(const CrossEntropyParams& p, void* stream);

}  // namespace vlmk
