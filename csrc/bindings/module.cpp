// The module _C, and what it says of itself.
#include "bindings/bindings.h"
#include "cpu/dispatch.h"
#include "cpu/scratch.h"

namespace vlmk {
namespace {

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (int i = 0; i <= static_cast<int>(Isa::kAmxEmulated); ++i) {
    const auto isa = static_cast<Isa>(i);
    if (isa_available(isa)) names.emplace_back(isa_name(isa));
  }
  return names;
}

// What was compiled in, for vlmkernels.info and for load errors.
py::dict build_info() {
  py::dict info;
  info["version"] = VLMKERNELS_VERSION;
  info["compiler"] = __VERSION__;
#ifdef VLMKERNELS_WITH_CUDA
  info["cuda"] = VLMKERNELS_CUDA_VERSION;
  info["cuda_archs"] = VLMKERNELS_CUDA_ARCHS;
#else
  info["cuda"] = py::none();
  info["cuda_archs"] = "";
#endif
  return info;
}

}  // namespace
}  // namespace vlmk

PYBIND11_MODULE(_C, m) {
  using namespace vlmk;
  m.def("build_info", &build_info);
  m.def("isa", [] { return std::string(isa_name(active_isa())); });
  m.def("available_isas", &available_isas);
  m.def("why_no_amx", &why_no_amx);
  m.def("tiles_multiply_fp16", &tiles_multiply_fp16);
  m.def("set_isa", &set_isa, "name"_a);
  m.def("poison_scratch", &poison_scratch, "on"_a);
  register_attention(m);
  register_embedding(m);
  register_image(m);
  register_layer(m);
  register_loss(m);
  register_optim(m);
  register_product(m);
  register_tensors(m);
}
