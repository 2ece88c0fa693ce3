// vision_attention of windows: the window kernels with the 2D rotary embedding in the load, on
// rows that lie where the window permutation says.
//
// Floor: as for varlen_attention, 8 P H D bytes forward and 16 backward, from and to the
// projection's own memory; and D cosines and sines of 4 bytes a row, which 1 head in H brings from
// memory and all read from L2: 4 bytes for each 8 of q, k, v and out in bf16.
#include "cuda/attention/attention.h"
#include "cuda/attention/window/backward.cuh"
#include "cuda/attention/window/forward.cuh"

namespace vlmk {
namespace {

bool is_vision(const AttentionParams& p) { return p.rotary != nullptr && p.kv_heads == p.heads; }

}  // namespace

int window_vision_forward_cuda(const AttentionParams& p, void* stream) {
  return is_vision(p) ? forward<VisionRows>(p, stream) : cudaErrorInvalidValue;
}

int window_vision_backward_cuda(const AttentionGradParams& p, void* stream) {
  return is_vision(p.forward) ? backward<VisionRows>(p, stream) : cudaErrorInvalidValue;
}

}  // namespace vlmk
