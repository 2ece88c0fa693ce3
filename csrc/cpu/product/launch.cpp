#include <stdexcept>

#include "cpu/product/product.h"

namespace vlmk {

void product_of_float32(const ProductParams& p) { VLMK_DISPATCH(product_of_float32, p) }

void transpose_16(const TransposeParams& p) { VLMK_DISPATCH(transpose_16, p) }

void matrix_product(const ProductParams& p) {
  if (p.dtype == DType::kFloat32) return product_of_float32(p);
#ifdef VLMKERNELS_HAVE_AVX512_BF16
  if (active_isa() == Isa::kAvx512Bf16) return avx512_bf16::product_of_bf16(p);
#endif
  throw std::invalid_argument("products of bf16 need the avx512_bf16 kernels");
}

}  // namespace vlmk
