// Attention inside segments of any length: the forward of varlen_attention (attention_flash.cuh).
#include "cuda/attention_flash.cuh"
#include "cuda/attention_flash.h"

namespace vlmk {
namespace {

template <class Math, int kDim>
int launch_forward(const FlashAttentionParams& p, void* stream) {
  using S = ForwardShape<kDim>;
  return launch(flash_forward<Math, kDim, PackedRows>, list_length(p.forward) * p.forward.heads,
                S::kThreads, S::kShared, stream, p);
}

}  // namespace

int flash_mma_forward_cuda(const FlashAttentionParams& p, void* stream) {
  const AttentionParams& f = p.forward;
  if (f.dtype == DType::kFloat32 || f.tokens > 0x7fffffff) return cudaErrorInvalidValue;
  if (f.segments == 0) return cudaSuccess;
  if (const int error = launch_list(f, p.max_length, p.tiles, 1, stream)) return error;
  if (f.dtype == DType::kBFloat16) {
    VLMK_FLASH_DIMS(launch_forward, ptx::Bf16Math, f.head_dim)
  }
  VLMK_FLASH_DIMS(launch_forward, ptx::Fp16Math, f.head_dim)
}

}  // namespace vlmk
