#include "cpu/product/product.h"

namespace vlmk {

void matrix_product(const ProductParams& p) { VLMK_DISPATCH(matrix_product, p) }

}  // namespace vlmk
