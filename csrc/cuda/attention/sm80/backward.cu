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
  if (const int error = launch_list(f, f.max_seqlen, f.tiles, 2, stream)) return error;
  if (const int error = launch(backward_preprocess<Math, kDim>,
                               (f.tokens + kPreprocessRows - 1) / kPreprocessRows * f.heads,
                               kPreprocessThreads, 0, stream, p)) {
    return error;
  }
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
  if (f.dtype == DType::kBFloat16) {
    VLMK_HEAD_DIMS(launch_backward, ptx::Bf16Math, f.head_dim)
  }
  VLMK_HEAD_DIMS(launch_backward, ptx::Fp16Math, f.head_dim)
}

}  // namespace vlmk
