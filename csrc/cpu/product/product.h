// Matrix products C = A B of float32 or bf16, of matrices that lie as torch's views do, and
// transposes.
#pragma once
#include <cstdint>

#include "common/params.h"
#include "cpu/dispatch.h"

namespace vlmk {

VLMK_DECLARE(product_of_float32, const ProductParams&);
namespace avx512_bf16 {
void product_of_bf16(const ProductParams&);
}

// to [columns, rows], dense, is the transpose of from, whose rows lie from_row elements apart.
struct TransposeParams {
  const uint16_t* from;
  uint16_t* to;
  int64_t rows;
  int64_t columns;
  int64_t from_row;
};

VLMK_DECLARE(transpose_16, const TransposeParams&);

// Throws std::invalid_argument for bf16 where AVX-512 BF16 is not the active instruction set.
void matrix_product(const ProductParams& p);

}  // namespace vlmk
