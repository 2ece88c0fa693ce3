// The launchers of RMSNorm, SwiGLU and rotary embedding on CUDA; they return a cudaError_t.
// `stream` is a cudaStream_t.
#pragma once

#include "common/params.h"

namespace vlmk {

int rms_norm_cuda(const RmsNormParams& p, void* stream);
int rms_norm_backward_cuda(const RmsNormGradParams& p, void* stream);
int swiglu_cuda(const SwigluParams& p, void* stream);
int swiglu_backward_cuda(const SwigluGradParams& p, void* stream);
int rotate_heads_cuda(const RotaryParams& p, void* stream);

}  // namespace vlmk
