#include <stdexcept>

#include "cpu/product/product.h"

namespace vlmk {

void product_of_float32(const ProductParams& p) { VLMK_DISPATCH(product_of_float32, p) }

void matrix_product(const ProductParams& p) {
#ifdef VLMKERNELS_HAVE_AMX_BF16
  if (active_isa() == Isa::kAmxBf16) return amx_bf16::product_on_tiles(p);
#endif
#ifdef VLMKERNELS_HAVE_AMX_EMULATED
  if (active_isa() == Isa::kAmxEmulated) return amx_emulated::product_on_tiles(p);
#endif
  if (p.dtype == DType::kFloat32) return product_of_float32(p);
#ifdef VLMKERNELS_HAVE_AVX512_BF16
  if (active_isa() == Isa::kAvx512Bf16) return avx512_bf16::product_of_bf16(p);
#endif
  throw std::invalid_argument("products of bf16 need the avx512_bf16 or the amx_bf16 kernels");
}

}  // namespace vlmk
