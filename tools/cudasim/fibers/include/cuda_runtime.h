// CUDA's language and runtime for a host compiler, as far as csrc/cuda uses them. Found before the
// toolkit's; what is missing here is a compile error, never a guess.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>  // before printf becomes a macro
#include <cstdlib>

#include "emulator.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::emu::thread_index())
#define blockIdx (::emu::block_index())
#define blockDim (::emu::block_size())
#define gridDim (::emu::grid_size())
#define printf(...) ::emu::print(__VA_ARGS__)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};

// ---- device functions

__forceinline__ void __syncthreads() { ::emu::barrier(); }
__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu) { ::emu::sync_warp(mask); }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __fmul_rn(float x, float y) { return x * y; }
using std::max;
using std::min;

// ---- the runtime, on the host

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorSymbolNotFound = 500 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) ::emu::allow_shared(value);
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// One device, with few multiprocessors, so that a block that takes several tiles does.
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76
};
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? ::emu::capability() / 10
           : attribute == cudaDevAttrComputeCapabilityMinor ? ::emu::capability() % 10
                                                            : 3;
  return cudaSuccess;
}

enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1
};
enum { cudaEnableDefault = 0 };
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found);
