#include "cpu/loss/loss.h"

namespace vlmk {

void cross_entropy(const CrossEntropyParams& p) { VLMK_DISPATCH(cross_entropy, p) }

}  // namespace vlmk
