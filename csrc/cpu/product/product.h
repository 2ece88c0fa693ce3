// C = A B in float32, of matrices that lie as torch's views do.
#pragma once
#include "common/params.h"
#include "cpu/dispatch.h"

namespace vlmk {

VLMK_DECLARE(matrix_product, const ProductParams&);

}  // namespace vlmk
