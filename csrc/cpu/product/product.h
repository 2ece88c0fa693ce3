// Matrix products C = A B of float32 or bf16, of matrices that lie as torch's views do, and
// transposes.
#pragma once
#include "common/params.h"
#include "cpu/dispatch.h"

namespace vlmk {

VLMK_DECLARE(product_in_float32, const ProductParams&);
namespace avx512_bf16 {
void product_by_dots(const ProductParams&);  // of bf16
}
namespace amx_bf16 {
void product_on_tiles(const ProductParams&);
}
namespace amx_emulated {
void product_on_tiles(const ProductParams&);
}

void matrix_product(const ProductParams& p);

}  // namespace vlmk
