// Attention inside segments of any length: the backward of varlen_attention (backward.cuh).
#include "cuda/attention/attention.h"
#include "cuda/attention/sm80/backward.cuh"

namespace vlmk {
namespace {

template <class Math, int kDim>
int launch_backward(const AttentionGradParams& p, void* stream) {
  using K = DkDvShape<kDim>;
  using Q = DqShape<kDim>;
  const AttentionParams& f = p.forward;
  const int64_t tiles = list_length(f);
  if (const int error = launch_preprocess<Math, kDim>(p, stream)) return error;
  if (const int error = launch(sm80_backward_dkdv<Math, kDim, PackedRows>, tiles * f.kv_heads,
                               K::kThreads, K::kShared, stream, p)) {
    return error;
  }
  return launch(sm80_backward_dq<Math, kDim, PackedRows>, tiles * f.heads, Q::kThreads, Q::kShared,
                stream, p);
}

}  // namespace

int sm80_backward_cuda(const AttentionGradParams& p, void* stream) {
  const AttentionParams& f = p.forward;
  if (f.dtype == DType::kFloat32 || f.tokens > 0x7fffffff) return cudaErrorInvalidValue;
  if (f.segments == 0) return cudaSuccess;
  VLMK_INSTANCES(launch_backward, f.dtype, f.head_dim)
}

}  // namespace vlmk
