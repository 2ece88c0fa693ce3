// Attention inside segments of any length: the forward of varlen_attention (forward.cuh).
#include "cuda/attention/attention.h"
#include "cuda/attention/sm80/forward.cuh"

namespace vlmk {
namespace {

template <class Math, int kDim>
int launch_forward(const AttentionParams& p, void* stream) {
  using S = ForwardShape<kDim>;
  return launch(sm80_forward<Math, kDim, PackedRows>, list_length(p) * p.heads, S::kThreads,
                S::kShared, stream, p);
}

}  // namespace

int sm80_forward_cuda(const AttentionParams& p, void* stream) {
  if (p.dtype == DType::kFloat32 || p.tokens > 0x7fffffff) return cudaErrorInvalidValue;
  if (p.segments == 0) return cudaSuccess;
  VLMK_INSTANCES(launch_forward, p.dtype, p.head_dim)
}

}  // namespace vlmk
