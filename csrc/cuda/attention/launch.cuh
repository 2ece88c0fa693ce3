// Launches of attention's kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/params.h"

namespace vlmk {
namespace {

template <class... Params>
int launch(void (*kernel)(Params...), int64_t blocks, int threads, int shared, void* stream,
           const Params&... params) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  if (shared > 48 << 10) {  // so much only where the kernel asked for it
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared, static_cast<cudaStream_t>(stream)>>>(
      params...);
  return cudaGetLastError();
}

// Returns launch<Math, head_dim>(p, stream) of an instance.
#define VLMK_HEAD_DIMS(launch, Math, head_dim) \
  switch (head_dim) {                          \
    case 64:                                   \
      return launch<Math, 64>(p, stream);      \
    case 72:                                   \
      return launch<Math, 72>(p, stream);      \
    case 80:                                   \
      return launch<Math, 80>(p, stream);      \
    case 96:                                   \
      return launch<Math, 96>(p, stream);      \
    case 128:                                  \
      return launch<Math, 128>(p, stream);     \
    default:                                   \
      return cudaErrorInvalidValue;            \
  }
#define VLMK_INSTANCES(launch, dtype, head_dim)     \
  if (dtype == DType::kBFloat16) {                  \
    VLMK_HEAD_DIMS(launch, ptx::Bf16Math, head_dim) \
  }                                                 \
  VLMK_HEAD_DIMS(launch, ptx::Fp16Math, head_dim)

}  // namespace
}  // namespace vlmk
