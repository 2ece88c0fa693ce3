// vision_attention of segments of any length on compute capability 9.0. TMA brings rows as they
// are, so queries and keys are rotated beforehand, into workspace; then the kernels of
// sm90/forward.cu and sm90/backward.cu run, or where there is workspace for it sm90/fused.cu's.
#include <cuda_runtime.h>

#include "cuda/attention/attention.h"

namespace vlmk {

namespace {

int rotate_both(const AttentionParams& p, void* queries, void* keys, void* stream) {
  // mutant: sm90-vision-rotate-queries
  if (const int error = rotate_cuda(p, p.q, queries, stream)) return error;
  return rotate_cuda(p, p.k, keys, stream);  // mutant: sm90-vision-rotate-keys
}

}  // namespace

int sm90_vision_forward_cuda(const AttentionParams& p, void* stream) {
  AttentionParams rotated = p;
  rotated.q = rotated_view(p, p.rotated_q);  // mutant: sm90-vision-forward-q
  rotated.k = rotated_view(p, p.rotated_k);  // mutant: sm90-vision-forward-k
  if (const int error = rotate_both(p, p.rotated_q, p.rotated_k, stream)) return error;
  return sm90_forward_cuda(rotated, stream);
}

int sm90_vision_backward_cuda(const AttentionGradParams& p, void* stream) {
  const AttentionParams& f = p.forward;
  AttentionGradParams rotated = p;
  rotated.forward.q = rotated_view(f, f.rotated_q);  // mutant: sm90-vision-backward-q
  rotated.forward.k = rotated_view(f, f.rotated_k);  // mutant: sm90-vision-backward-k
  if (const int error = rotate_both(f, f.rotated_q, f.rotated_k, stream)) return error;
  return p.dq_sum != nullptr ? sm90_fused_backward_cuda(rotated, stream)
                             : sm90_backward_cuda(rotated, stream);
}

}  // namespace vlmk
