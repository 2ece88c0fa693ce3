// Launchers of tiled attention on CUDA, for segments of any length; each returns a cudaError_t.
// `stream` is a cudaStream_t.
#pragma once

#include "params.h"

namespace vlmk {

// bf16 or fp16, head_dim 64, 72, 80, 96 or 128, fewer than 2^31 tokens, else cudaErrorInvalidValue.
int flash_attention_forward_cuda(const FlashAttentionParams& p, void* stream);
int flash_attention_backward_cuda(const FlashAttentionGradParams& p, void* stream);

// With rotary, without order; as many key heads as query heads.
int flash_vision_forward_cuda(const FlashVisionParams& p, void* stream);
int flash_vision_backward_cuda(const FlashVisionGradParams& p, void* stream);

}  // namespace vlmk
