#include "cpu/loss/loss.h"

#include "bindings/bindings.h"

#ifdef VLMKERNELS_WITH_CUDA
#include "cuda/loss/cross_entropy.h"
#endif

namespace vlmk {
namespace {

CrossEntropyParams cross_entropy_params(uintptr_t logits, uintptr_t targets, uintptr_t row_max,
                                        uintptr_t row_sum, uintptr_t target_logit,
                                        uintptr_t logit_sum, uintptr_t scale, int64_t rows,
                                        int64_t columns, int64_t first_class, int64_t classes,
                                        double label_smoothing, double z_loss, bool statistics,
                                        int dtype) {
  return {pointer<void>(logits),
          pointer<const int64_t>(targets),
          pointer<float>(row_max),
          pointer<float>(row_sum),
          pointer<float>(target_logit),
          pointer<float>(logit_sum),
          pointer<const float>(scale),
          rows,
          columns,
          first_class,
          classes,
          label_smoothing,
          z_loss,
          statistics,
          static_cast<DType>(dtype)};
}

}  // namespace

void register_loss(py::module_& m) {
  // `device...` is the stream on CUDA, and nothing on the CPU.
  const auto add = [&](const char* name, auto function, auto... device) {
    m.def(name, function, "logits"_a, "targets"_a, "row_max"_a, "row_sum"_a, "target_logit"_a,
          "logit_sum"_a, "scale"_a, "rows"_a, "columns"_a, "first_class"_a, "classes"_a,
          "label_smoothing"_a, "z_loss"_a, "statistics"_a, "dtype"_a, device..., VLMK_NO_GIL);
  };
  add("cross_entropy", on_cpu(cross_entropy_params, cross_entropy));
#ifdef VLMKERNELS_WITH_CUDA
  add("cross_entropy_cuda", on_cuda(cross_entropy_params, cross_entropy_cuda), "stream"_a);
#endif
}

}  // namespace vlmk
