// Launchers of window attention on CUDA; each returns a cudaError_t. `stream` is a cudaStream_t.
#pragma once

#include "params.h"

namespace vlmk {

// head_dim 64, 80, 96 or 128, max_seqlen <= 128 (head_dim 128: 64), else cudaErrorInvalidValue.
int window_attention_forward_cuda(const AttentionParams& p, void* stream);
int window_attention_backward_cuda(const AttentionGradParams& p, void* stream);

// With order and rotary; as many key heads as query heads.
int vision_window_forward_cuda(const AttentionParams& p, void* stream);
int vision_window_backward_cuda(const AttentionGradParams& p, void* stream);

}  // namespace vlmk
