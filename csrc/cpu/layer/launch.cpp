#include "cpu/layer/layer.h"

// Kernels for AVX-512 BF16 round to bf16 by one instruction, on a processor with AMX too.
#ifdef VLMKERNELS_HAVE_AVX512_BF16
#define VLMK_LAYER_DISPATCH(function, params)                              \
  if (active_isa() == Isa::kAvx512Bf16 || active_isa() == Isa::kAmxBf16) { \
    return avx512_bf16::function(params);                                  \
  }                                                                        \
  VLMK_DISPATCH(function, params)
#else
#define VLMK_LAYER_DISPATCH(function, params) VLMK_DISPATCH(function, params)
#endif

namespace vlmk {

void rms_norm(const RmsNormParams& p) { VLMK_LAYER_DISPATCH(rms_norm, p) }
void rms_norm_backward(const RmsNormGradParams& p) { VLMK_LAYER_DISPATCH(rms_norm_backward, p) }
void swiglu(const SwigluParams& p) { VLMK_LAYER_DISPATCH(swiglu, p) }
void swiglu_backward(const SwigluGradParams& p) { VLMK_LAYER_DISPATCH(swiglu_backward, p) }

}  // namespace vlmk
