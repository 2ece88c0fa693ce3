// RMSNorm and SwiGLU of a transformer layer, each in one pass over its rows either way.
#pragma once
#include "common/params.h"
#include "cpu/dispatch.h"

namespace vlmk {

VLMK_DECLARE(rms_norm, const RmsNormParams&);
VLMK_DECLARE(rms_norm_backward, const RmsNormGradParams&);
VLMK_DECLARE(swiglu, const SwigluParams&);
VLMK_DECLARE(swiglu_backward, const SwigluGradParams&);
namespace avx512_bf16 {
void rms_norm(const RmsNormParams&);
void rms_norm_backward(const RmsNormGradParams&);
void swiglu(const SwigluParams&);
void swiglu_backward(const SwigluGradParams&);
}  // namespace avx512_bf16

}  // namespace vlmk
