#include "cpu/layer/layer.h"

namespace vlmk {

void rms_norm(const RmsNormParams& p) { VLMK_DISPATCH(rms_norm, p) }
void rms_norm_backward(const RmsNormGradParams& p) { VLMK_DISPATCH(rms_norm_backward, p) }
void swiglu(const SwigluParams& p) { VLMK_DISPATCH(swiglu, p) }
void swiglu_backward(const SwigluGradParams& p) { VLMK_DISPATCH(swiglu_backward, p) }

}  // namespace vlmk
