// What the binding files share. No torch here, but for tensors.cpp: a pointer is a uintptr_t, as
// CUDA's stream is; sizes and strides count elements. Tensors are checked by the Python launchers,
// which are the only callers (but for resize, which vlmtrain's decoder processes call without
// torch). A function fills the op's struct of params.h and calls its launcher without the GIL; a
// C++ exception arrives as ValueError (std::invalid_argument) or RuntimeError.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/params.h"

#ifdef VLMKERNELS_WITH_CUDA
#include <cuda_runtime.h>
#endif

// A kernel that runs for long must not hold the GIL.
#define VLMK_NO_GIL py::call_guard<py::gil_scoped_release>()

namespace vlmk {

namespace py = pybind11;
using namespace pybind11::literals;  // "name"_a

// One a family: each registers its functions, arguments named.
void register_attention(py::module_& m);
void register_embedding(py::module_& m);
void register_image(py::module_& m);
void register_layer(py::module_& m);
void register_loss(py::module_& m);
void register_optim(py::module_& m);
void register_product(py::module_& m);
void register_tensors(py::module_& m);

// Of a tensor to step: addresses of param, exp_avg, exp_avg_sq, the low-precision copy (or 0) and
// step (one float), then numel and the number of the first element, addresses of the two moments'
// scales (0), and of the gradient. Packed as bytes: integers of Python's take longer to unpack than
// small tensors to step.
using AdamRow = std::array<int64_t, 10>;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The Python callable of a launcher: the arguments of the function that fills its struct.
template <class Params, class Result, class... Args>
auto on_cpu(Params (*fill)(Args...), Result (*launch)(const Params&)) {
  return [=](Args... args) { return launch(fill(args...)); };
}

#ifdef VLMKERNELS_WITH_CUDA
// The same and the stream.
template <class Params, class... Args>
auto on_cuda(Params (*fill)(Args...), int (*launch)(const Params&, void*)) {
  return [=](Args... args, uintptr_t stream) {
    const int error = launch(fill(args...), pointer<void>(stream));
    if (error == cudaErrorNoKernelImageForDevice)
      throw std::runtime_error("vlmkernels was built for " VLMKERNELS_CUDA_ARCHS
                               ", not for this GPU (python -m vlmkernels.info)");
    if (error != cudaSuccess)
      throw std::runtime_error(std::string("CUDA: ") +
                               cudaGetErrorString(static_cast<cudaError_t>(error)));
  };
}
#endif

}  // namespace vlmk
