#include "cpu/product/product.h"

namespace vlmk {

void product_in_float32(const ProductParams& p) { VLMK_DISPATCH(product_in_float32, p) }

void matrix_product(const ProductParams& p) {
#ifdef VLMKERNELS_HAVE_AMX_BF16
  if (active_isa() == Isa::kAmxBf16) return amx_bf16::product_on_tiles(p);
#endif
#ifdef VLMKERNELS_HAVE_AMX_EMULATED
  if (active_isa() == Isa::kAmxEmulated) return amx_emulated::product_on_tiles(p);
#endif
#ifdef VLMKERNELS_HAVE_AVX512_BF16
  if (p.dtype == DType::kBFloat16 && uses_bf16_dots()) return avx512_bf16::product_by_dots(p);
#endif
  product_in_float32(p);
}

}  // namespace vlmk
