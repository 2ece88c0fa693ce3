#include "cpu/layer/layer.h"

namespace vlmk {

void rms_norm(const RmsNormParams& p) { VLMK_DISPATCH_BF16(rms_norm, p) }
void rms_norm_backward(const RmsNormGradParams& p) { VLMK_DISPATCH_BF16(rms_norm_backward, p) }
void swiglu(const SwigluParams& p) { VLMK_DISPATCH_BF16(swiglu, p) }
void swiglu_backward(const SwigluGradParams& p) { VLMK_DISPATCH_BF16(swiglu_backward, p) }

}  // namespace vlmk
