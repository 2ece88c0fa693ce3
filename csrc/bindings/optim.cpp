#include <cstring>
#include <string_view>

#include "bindings/bindings.h"
#include "cpu/adam/adam.h"

namespace vlmk {
namespace {

void step(std::string_view packed, int grad_dtype, int moments, double lr, double beta1,
          double beta2, double eps, double weight_decay, bool decoupled, double grad_factor,
          double grad_scale) {
  if (packed.size() % sizeof(AdamRow)) throw std::invalid_argument("rows are not whole");
  std::vector<AdamRow> rows(packed.size() / sizeof(AdamRow));
  if (!rows.empty()) std::memcpy(rows.data(), packed.data(), packed.size());
  const py::gil_scoped_release no_gil;
  std::vector<AdamTensor> tensors;
  tensors.reserve(rows.size());
  for (const auto& r : rows) {
    tensors.push_back({pointer<float>(r[0]), pointer<const void>(r[9]), pointer<void>(r[1]),
                       pointer<void>(r[2]), pointer<float>(r[7]), pointer<float>(r[8]),
                       pointer<void>(r[3]), r[5], r[6], *pointer<float>(r[4]) + 1.0,
                       static_cast<DType>(grad_dtype), static_cast<MomentType>(moments)});
  }
  adam_step({tensors.data(), static_cast<int64_t>(tensors.size()), lr, beta1, beta2, eps,
             weight_decay, decoupled, static_cast<float>(grad_factor),
             static_cast<float>(grad_scale)});
  for (size_t i = 0; i < rows.size(); ++i) {
    *pointer<float>(rows[i][4]) = static_cast<float>(tensors[i].step);
  }
}

// A row: address, numel, dtype.
double squares(const std::vector<std::array<int64_t, 3>>& rows) {
  std::vector<AdamGradient> grads;
  grads.reserve(rows.size());
  for (const auto& r : rows) {
    grads.push_back({pointer<const void>(r[0]), r[1], static_cast<DType>(r[2])});
  }
  return sum_of_squares(grads.data(), static_cast<int64_t>(grads.size()));
}

}  // namespace

void register_optim(py::module_& m) {
  m.def("adam_step", &step, "rows"_a, "grad_dtype"_a, "moments"_a, "lr"_a, "beta1"_a, "beta2"_a,
        "eps"_a, "weight_decay"_a, "decoupled"_a, "grad_factor"_a, "grad_scale"_a);
  m.def("sum_of_squares", &squares, "rows"_a, VLMK_NO_GIL);
}

}  // namespace vlmk
