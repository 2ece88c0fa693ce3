#include "cpu/layer/layer.h"

#include <tuple>

#include "bindings/bindings.h"

#ifdef VLMKERNELS_WITH_CUDA
#include "cuda/layer/layer.h"
#endif

namespace vlmk {
namespace {

RmsNormParams rms_norm_params(uintptr_t x, uintptr_t residual, uintptr_t bias, uintptr_t weight,
                              uintptr_t y, uintptr_t rstd, int64_t rows, int64_t width, double eps,
                              int dtype) {
  return {pointer<void>(x),
          pointer<const void>(residual),
          pointer<const void>(bias),
          pointer<const void>(weight),
          pointer<void>(y),
          pointer<float>(rstd),
          rows,
          width,
          static_cast<float>(eps),
          static_cast<DType>(dtype)};
}

using Sums = std::tuple<uintptr_t, uintptr_t, bool>;

ColumnSums column_sums(const Sums& of) {
  return {pointer<void>(std::get<0>(of)), pointer<float>(std::get<1>(of)), std::get<2>(of)};
}

RmsNormGradParams rms_norm_grad_params(uintptr_t dy, uintptr_t ds, uintptr_t x, uintptr_t weight,
                                       uintptr_t rstd, uintptr_t dx, Sums dweight, Sums dbias,
                                       int64_t rows, int64_t width, int dtype) {
  return {pointer<const void>(dy),
          pointer<const void>(ds),
          pointer<const void>(x),
          pointer<const void>(weight),
          pointer<const float>(rstd),
          pointer<void>(dx),
          column_sums(dweight),
          column_sums(dbias),
          rows,
          width,
          static_cast<DType>(dtype)};
}

SwigluParams swiglu_params(uintptr_t x, uintptr_t bias, uintptr_t y, int64_t rows, int64_t width,
                           int dtype, int64_t y_stride) {
  return {
      pointer<void>(x),         pointer<const void>(bias), pointer<void>(y), y_stride, rows, width,
      static_cast<DType>(dtype)};
}

SwigluGradParams swiglu_grad_params(uintptr_t dy, int64_t dy_stride, uintptr_t x, uintptr_t bias,
                                    uintptr_t dx, Sums dbias, int64_t rows, int64_t width,
                                    int dtype) {
  return {pointer<const void>(dy),
          dy_stride,
          pointer<const void>(x),
          pointer<const void>(bias),
          pointer<void>(dx),
          column_sums(dbias),
          rows,
          width,
          static_cast<DType>(dtype)};
}

#ifdef VLMKERNELS_WITH_CUDA
using Strides = std::array<int64_t, 3>;  // of tokens, groups and heads

RotaryParams rotate_params(uintptr_t x, Strides x_strides, uintptr_t out, Strides out_strides,
                           uintptr_t cos, uintptr_t sin, int64_t table_stride,
                           std::array<int64_t, 4> shape, bool conjugate, int dtype) {
  return {pointer<const void>(x),
          x_strides[0],
          x_strides[1],
          x_strides[2],
          pointer<void>(out),
          out_strides[0],
          out_strides[1],
          out_strides[2],
          pointer<const float>(cos),
          pointer<const float>(sin),
          table_stride,
          shape[0],
          shape[1],
          shape[2],
          shape[3],
          conjugate,
          static_cast<DType>(dtype)};
}
#endif

}  // namespace

void register_layer(py::module_& m) {
  m.attr("SUM_ROWS") = kSumRows;
  m.attr("CUDA_NORM_ROWS") = kCudaNormRows;
  m.attr("CUDA_SWIGLU_ROWS") = kCudaSwigluRows;
  m.attr("NORM_COLUMNS") = kNormColumns;
  // `device...` is the stream on CUDA, and nothing on the CPU.
  const auto norm = [&](const char* name, auto function, auto... device) {
    m.def(name, function, "x"_a, "residual"_a, "bias"_a, "weight"_a, "y"_a, "rstd"_a, "rows"_a,
          "width"_a, "eps"_a, "dtype"_a, device..., VLMK_NO_GIL);
  };
  const auto norm_backward = [&](const char* name, auto function, auto... device) {
    m.def(name, function, "dy"_a, "ds"_a, "x"_a, "weight"_a, "rstd"_a, "dx"_a, "dweight"_a,
          "dbias"_a, "rows"_a, "width"_a, "dtype"_a, device..., VLMK_NO_GIL);
  };
  const auto gate = [&](const char* name, auto function, auto... device) {
    m.def(name, function, "x"_a, "bias"_a, "y"_a, "rows"_a, "width"_a, "dtype"_a, "y_stride"_a,
          device..., VLMK_NO_GIL);
  };
  const auto gate_backward = [&](const char* name, auto function, auto... device) {
    m.def(name, function, "dy"_a, "dy_stride"_a, "x"_a, "bias"_a, "dx"_a, "dbias"_a, "rows"_a,
          "width"_a, "dtype"_a, device..., VLMK_NO_GIL);
  };
  norm("rms_norm", on_cpu(rms_norm_params, rms_norm));
  norm_backward("rms_norm_backward", on_cpu(rms_norm_grad_params, rms_norm_backward));
  gate("swiglu", on_cpu(swiglu_params, swiglu));
  gate_backward("swiglu_backward", on_cpu(swiglu_grad_params, swiglu_backward));
#ifdef VLMKERNELS_WITH_CUDA
  const auto stream = "stream"_a;
  norm("rms_norm_cuda", on_cuda(rms_norm_params, rms_norm_cuda), stream);
  norm_backward("rms_norm_backward_cuda", on_cuda(rms_norm_grad_params, rms_norm_backward_cuda),
                stream);
  gate("swiglu_cuda", on_cuda(swiglu_params, swiglu_cuda), stream);
  gate_backward("swiglu_backward_cuda", on_cuda(swiglu_grad_params, swiglu_backward_cuda), stream);
  m.def("rotate_heads_cuda", on_cuda(rotate_params, rotate_heads_cuda), "x"_a, "x_strides"_a,
        "out"_a, "out_strides"_a, "cos"_a, "sin"_a, "table_stride"_a, "shape"_a, "conjugate"_a,
        "dtype"_a, stream, VLMK_NO_GIL);
#endif
}

}  // namespace vlmk
