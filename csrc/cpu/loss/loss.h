// Softmax cross entropy of a chunk of logits: what linear_cross_entropy does between its products.
#pragma once
#include "common/params.h"
#include "cpu/dispatch.h"

namespace vlmk {

VLMK_DECLARE(cross_entropy, const CrossEntropyParams&);

}  // namespace vlmk
