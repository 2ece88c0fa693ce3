// Launchers of tiled attention on CUDA, for segments of any length; each returns a cudaError_t.
// `stream` is a cudaStream_t.
#pragma once

#include "params.h"

namespace vlmk {

// bf16 or fp16, head_dim 64, 72, 80, 96 or 128, fewer than 2^31 tokens, else cudaErrorInvalidValue.
// Each is one of the two below.
int flash_attention_forward_cuda(const AttentionParams& p, void* stream);
int flash_attention_backward_cuda(const AttentionGradParams& p, void* stream);

// With rotary, without order; as many key heads as query heads. Each is flash_vision_mma_..._cuda
// or, on what flash_vision_turn_cuda made, flash_hopper_..._cuda.
int flash_vision_forward_cuda(const AttentionParams& p, void* stream);
int flash_vision_backward_cuda(const AttentionGradParams& p, void* stream);
int flash_vision_mma_forward_cuda(const AttentionParams& p, void* stream);
int flash_vision_mma_backward_cuda(const AttentionGradParams& p, void* stream);
// Writes q or k of p, `from`, turned, to workspace [H, T, D].
int flash_vision_turn_cuda(const AttentionParams& p, const HeadsView& from, void* workspace,
                           void* stream);
// Where the rows then are.
inline HeadsView turned_rows(const AttentionParams& p, void* workspace) {
  return {workspace, p.head_dim, p.tokens * p.head_dim};
}

// By mma.sync, on every GPU from compute capability 8.0 on.
int flash_mma_forward_cuda(const AttentionParams& p, void* stream);
int flash_mma_backward_cuda(const AttentionGradParams& p, void* stream);
// By wgmma and TMA: compute capability 9.0 only, and strides as hopper_takes asks for. With rotary,
// q and k are turned already, and the backward turns dq and dk back.
int flash_hopper_forward_cuda(const AttentionParams& p, void* stream);
int flash_hopper_backward_cuda(const AttentionGradParams& p, void* stream);

// Whether the second can be used: q, k and v, in the backward dout too, must be what a tensor map
// describes. Compute capability 9.0 is 90.
bool hopper_takes(const AttentionParams& p, int capability);
bool hopper_takes_gradients(const AttentionGradParams& p, int capability);

}  // namespace vlmk
