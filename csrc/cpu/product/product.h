// Matrix products C = A B of float32 or bf16, of matrices that lie as torch's views do, and
// transposes.
#pragma once
#include "common/params.h"
#include "cpu/dispatch.h"

namespace vlmk {

VLMK_DECLARE(product_of_float32, const ProductParams&);
namespace avx512_bf16 {
void product_of_bf16(const ProductParams&);
}
namespace amx_bf16 {
void product_on_tiles(const ProductParams&);
}
namespace amx_emulated {
void product_on_tiles(const ProductParams&);
}

// Throws std::invalid_argument for bf16 where neither AVX-512 BF16 nor AMX is the active
// instruction set.
void matrix_product(const ProductParams& p);

}  // namespace vlmk
