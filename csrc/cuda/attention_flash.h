// Launchers of tiled attention on CUDA, for segments of any length; each returns a cudaError_t.
// `stream` is a cudaStream_t.
#pragma once

#include "params.h"

namespace vlmk {

// bf16 or fp16, head_dim 64, 72, 80, 96 or 128, fewer than 2^31 tokens, else cudaErrorInvalidValue.
// The forward is one of the two below.
int flash_attention_forward_cuda(const FlashAttentionParams& p, void* stream);
int flash_attention_backward_cuda(const FlashAttentionGradParams& p, void* stream);

// With rotary, without order; as many key heads as query heads.
int flash_vision_forward_cuda(const FlashVisionParams& p, void* stream);
int flash_vision_backward_cuda(const FlashVisionGradParams& p, void* stream);

// By mma.sync, on every GPU from compute capability 8.0 on.
int flash_mma_forward_cuda(const FlashAttentionParams& p, void* stream);
// By wgmma and TMA: compute capability 9.0 only, and strides as hopper_takes asks for.
int flash_hopper_forward_cuda(const FlashAttentionParams& p, void* stream);

// Whether the second can be used: q, k and v must be what a tensor map describes. Compute
// capability 9.0 is 90.
bool hopper_takes(const AttentionParams& p, int capability);

}  // namespace vlmk
