#include <cstring>
#include <string_view>

#include "bindings/bindings.h"
#include "cpu/adam/adam.h"

namespace vlmk {
namespace {

// A row: addresses of param, exp_avg, exp_avg_sq, the low-precision copy (or 0) and step (one
// float), then numel and the number of the first element, addresses of the two moments' scales (0).
using Row = std::array<int64_t, 9>;

// Of a list of bytes: integers of Python's take longer to unpack than small tensors to step.
std::vector<Row> rows_of(const py::list& packed) {
  std::vector<Row> rows(packed.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto bytes = packed[i].cast<std::string_view>();
    if (bytes.size() != sizeof(Row)) throw std::invalid_argument("a row has 9 numbers of 8 bytes");
    std::memcpy(rows[i].data(), bytes.data(), sizeof(Row));
  }
  return rows;
}

// The first gradient that has no memory or its parameter's, or -1.
int64_t first_misplaced(const py::list& packed, const std::vector<int64_t>& grads) {
  const std::vector<Row> rows = rows_of(packed);
  if (grads.size() != rows.size()) throw std::invalid_argument("rows and grads differ in length");
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& r = rows[i];
    if ((grads[i] == 0 || grads[i] == r[0]) && r[5] > 0) return static_cast<int64_t>(i);
  }
  return -1;
}

// grads: the address of each row's gradient.
void step(const py::list& packed, const std::vector<int64_t>& grads, int grad_dtype, int moments,
          double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
          double grad_factor, double grad_scale) {
  const std::vector<Row> rows = rows_of(packed);
  if (grads.size() != rows.size()) throw std::invalid_argument("rows and grads differ in length");
  const py::gil_scoped_release no_gil;
  std::vector<AdamTensor> tensors;
  tensors.reserve(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& r = rows[i];
    tensors.push_back({pointer<float>(r[0]), pointer<const void>(grads[i]), pointer<void>(r[1]),
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
  m.def("first_misplaced", &first_misplaced, "rows"_a, "grads"_a);
  m.def("adam_step", &step, "rows"_a, "grads"_a, "grad_dtype"_a, "moments"_a, "lr"_a, "beta1"_a,
        "beta2"_a, "eps"_a, "weight_decay"_a, "decoupled"_a, "grad_factor"_a, "grad_scale"_a);
  m.def("sum_of_squares", &squares, "rows"_a, VLMK_NO_GIL);
}

}  // namespace vlmk
