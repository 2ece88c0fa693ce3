// Launchers of attention on CUDA; each returns a cudaError_t. `stream` is a cudaStream_t.
#pragma once

#include "common/params.h"

namespace vlmk {

// ---- windows: segments whose keys stand whole in shared memory

// head_dim 64, 80, 96 or 128, max_seqlen <= 128 (head_dim 128: 64), else cudaErrorInvalidValue.
int window_forward_cuda(const AttentionParams& p, void* stream);
int window_backward_cuda(const AttentionGradParams& p, void* stream);

// With order and rotary; as many key heads as query heads.
int window_vision_forward_cuda(const AttentionParams& p, void* stream);
int window_vision_backward_cuda(const AttentionGradParams& p, void* stream);

// ---- segments of any length

// Writes the lists of tiles that the following read: cu_seqlens that are not [0, .., T] end the
// grid.
int list_tiles_cuda(const TileListParams& p, void* stream);

// bf16 or fp16, head_dim 64, 72, 80, 96 or 128, fewer than 2^31 tokens, else cudaErrorInvalidValue.
// By mma.sync, on every GPU from compute capability 8.0 on.
int sm80_forward_cuda(const AttentionParams& p, void* stream);
int sm80_backward_cuda(const AttentionGradParams& p, void* stream);
// By wgmma and TMA: compute capability 9.0 only; q, k, v and dout are what a tensor map describes:
// 16-byte aligned, strides positive (an expanded tensor's are 0), multiples of 8 and below 2^39
// (a dimension of one element has any). With rotary, q and k are rotated already, and the backward
// rotates dq and dk back.
int sm90_forward_cuda(const AttentionParams& p, void* stream);
int sm90_backward_cuda(const AttentionGradParams& p, void* stream);
// The same by one kernel, with workspace for it; sm90_vision_backward_cuda takes this one where
// there is workspace.
int sm90_fused_backward_cuda(const AttentionGradParams& p, void* stream);

// The same with rotary, without order; as many key heads as query heads.
int sm80_vision_forward_cuda(const AttentionParams& p, void* stream);
int sm80_vision_backward_cuda(const AttentionGradParams& p, void* stream);
int sm90_vision_forward_cuda(const AttentionParams& p, void* stream);
int sm90_vision_backward_cuda(const AttentionGradParams& p, void* stream);
// Writes q or k of p, `from`, rotated, to workspace [H, T, D].
int rotate_cuda(const AttentionParams& p, const HeadsView& from, void* workspace, void* stream);
// Where the rows then are.
inline HeadsView rotated_view(const AttentionParams& p, void* workspace) {
  return {workspace, p.head_dim, p.tokens * p.head_dim};
}

}  // namespace vlmk
