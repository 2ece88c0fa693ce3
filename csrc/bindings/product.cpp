#include "cpu/product/product.h"

#include "bindings/bindings.h"

namespace vlmk {
namespace {

ProductParams product_params(uintptr_t a, uintptr_t b, uintptr_t bias, uintptr_t c, int64_t rows,
                             int64_t columns, int64_t depth, int64_t a_row, int64_t a_column,
                             int64_t b_row, int64_t b_column, int64_t c_row, bool add, int dtype,
                             int c_dtype) {
  return {pointer<const void>(a),
          pointer<const void>(b),
          pointer<const void>(bias),
          pointer<void>(c),
          rows,
          columns,
          depth,
          a_row,
          a_column,
          b_row,
          b_column,
          c_row,
          add,
          static_cast<DType>(dtype),
          static_cast<DType>(c_dtype)};
}

}  // namespace

void register_product(py::module_& m) {
  m.def("is_amd", &is_amd);
  m.def("matrix_product", on_cpu(product_params, matrix_product), "a"_a, "b"_a, "bias"_a, "c"_a,
        "rows"_a, "columns"_a, "depth"_a, "a_row"_a, "a_column"_a, "b_row"_a, "b_column"_a,
        "c_row"_a, "add"_a, "dtype"_a, "c_dtype"_a, VLMK_NO_GIL);
}

}  // namespace vlmk
