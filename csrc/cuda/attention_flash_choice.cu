// Which kernels of tiled attention a launch takes.
#include <cuda_runtime.h>

#include "cuda/attention_flash.h"

namespace vlmk {

namespace {

// Whether a tensor map describes x. Strides in bytes: positive (an expanded tensor's are 0),
// multiples of 16, less than 2^40. A dimension of one element has any stride.
bool describes(const HeadsView& x, int64_t tokens, int64_t heads) {
  const auto fits = [](int64_t size, int64_t stride) {
    // mutant: choice-fits
    return size == 1 || (stride > 0 && stride % 8 == 0 && stride < int64_t{1} << 39);
  };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && fits(tokens, x.token_stride) &&
         fits(heads, x.head_stride);  // mutant: choice-address
}

// Compute capability of the current device: 90 is 9.0.
cudaError_t find_capability(int* capability) {
  int device, major, minor;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  *capability = major * 10 + minor;
  return error;
}

// TMA brings rows as they are: what the kernels of 9.0 read is turned beforehand.
int turn_both(const AttentionParams& p, void* queries, void* keys, void* stream) {
  // mutant: choice-rotate-queries
  if (const int error = flash_vision_turn_cuda(p, p.q, queries, stream)) return error;
  return flash_vision_turn_cuda(p, p.k, keys, stream);  // mutant: choice-rotate-keys
}

}  // namespace

bool hopper_takes(const AttentionParams& p, int capability) {
  // mutant: choice-takes
  return capability == 90 && describes(p.q, p.tokens, p.heads) &&
         describes(p.k, p.tokens, p.kv_heads) && describes(p.v, p.tokens, p.kv_heads);
}

bool hopper_takes_gradients(const AttentionGradParams& p, int capability) {
  return hopper_takes(p.forward, capability) &&
         describes(p.dout, p.forward.tokens, p.forward.heads);  // mutant: choice-takes-gradients
}

int flash_attention_forward_cuda(const AttentionParams& p, void* stream) {
  int capability;
  if (const cudaError_t error = find_capability(&capability)) return error;
  return hopper_takes(p, capability) ? flash_hopper_forward_cuda(p, stream)
                                     : flash_mma_forward_cuda(p, stream);
}

int flash_attention_backward_cuda(const AttentionGradParams& p, void* stream) {
  int capability;
  if (const cudaError_t error = find_capability(&capability)) return error;
  return hopper_takes_gradients(p, capability) ? flash_hopper_backward_cuda(p, stream)
                                               : flash_mma_backward_cuda(p, stream);
}

int flash_vision_forward_cuda(const AttentionParams& p, void* stream) {
  int capability;
  if (const cudaError_t error = find_capability(&capability)) return error;
  AttentionParams turned = p;
  turned.q = turned_rows(p, p.rotated_q);  // mutant: choice-forward-q
  turned.k = turned_rows(p, p.rotated_k);  // mutant: choice-forward-k
  // mutant: choice-forward-takes
  if (p.rotated_q == nullptr || !hopper_takes(turned, capability)) {
    return flash_vision_mma_forward_cuda(p, stream);
  }
  if (const int error = turn_both(p, p.rotated_q, p.rotated_k, stream)) return error;
  return flash_hopper_forward_cuda(turned, stream);
}

int flash_vision_backward_cuda(const AttentionGradParams& p, void* stream) {
  int capability;
  if (const cudaError_t error = find_capability(&capability)) return error;
  const AttentionParams& f = p.forward;
  AttentionGradParams turned = p;
  turned.forward.q = turned_rows(f, f.rotated_q);  // mutant: choice-backward-q
  turned.forward.k = turned_rows(f, f.rotated_k);  // mutant: choice-backward-k
  // mutant: choice-backward-takes
  if (f.rotated_q == nullptr || !hopper_takes_gradients(turned, capability)) {
    return flash_vision_mma_backward_cuda(p, stream);
  }
  if (const int error = turn_both(f, f.rotated_q, f.rotated_k, stream)) return error;
  return flash_hopper_backward_cuda(turned, stream);
}

}  // namespace vlmk
