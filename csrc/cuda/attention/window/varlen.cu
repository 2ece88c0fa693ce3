// varlen_attention of windows: the window kernels on rows that lie one after another.
#include "cuda/attention/attention.h"
#include "cuda/attention/window/backward.cuh"
#include "cuda/attention/window/forward.cuh"

namespace vlmk {

int window_forward_cuda(const AttentionParams& p, void* stream) {
  return forward<PackedRows>(p, stream);
}

int window_backward_cuda(const AttentionGradParams& p, void* stream) {
  return backward<PackedRows>(p, stream);
}

}  // namespace vlmk
