// RMSNorm and SwiGLU on CUDA, formulas as in cpu/layer/kernel.cpp: fp32, rounded once.
//
// Floor, in elements of memory: RMSNorm reads 1 and writes 1 a row's element, with a residual reads
// 2 and writes 2; its backward reads 2 or 3 and writes 1. SwiGLU of F columns reads 2 F and writes
// F, its backward reads 3 F and writes 2 F. A row of a norm is one block's, and stays in its
// registers between the sum over it and the result.
//
// A weight's gradient: a block's rows are summed in registers, in their order, and `column_sums`
// adds the blocks' sums in theirs; the same bits every time.
#include <cuda_runtime.h>

#include <initializer_list>
#include <utility>

#include "cuda/block.cuh"
#include "cuda/layer/elements.cuh"
#include "cuda/layer/layer.h"
#include "cuda/ptx/sm80.cuh"

namespace vlmk {
namespace {

constexpr int kMostThreads = 512;
constexpr int kSwigluThreads = 256;
constexpr int kWarp = ptx::kWarpSize;

// ---- RMSNorm: `units` of a row, kUnits of them a thread, blockDim.x apart

template <class Type, int kUnits>
__global__ void __launch_bounds__(kMostThreads) rms_norm(const RmsNormParams p, int units) {
  using E = Elements<Type, uint4>;
  extern __shared__ __align__(128) char shared[];
  const int64_t row = blockIdx.x, first = row * units;
  auto* const x = static_cast<uint4*>(p.x) + first;
  const auto* const residual = static_cast<const uint4*>(p.residual) + first;
  const auto* const bias = static_cast<const uint4*>(p.bias);
  E kept[kUnits];
  float squares = 0.f;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    const bool on = i < units;  // mutant: layer-norm-on
    kept[k] = E(ptx::load(x + i, on));
    if (p.residual != nullptr) {
      kept[k].add(E(ptx::load_once(residual + i, on)));
      kept[k].add(E(ptx::load_once(bias + i, on && bias != nullptr)));  // mutant: layer-norm-bias
      const uint4 sum = kept[k].packed();
      ptx::store(x + i, sum, on);
      kept[k] = E(sum);  // mutant: layer-norm-rounded
    }
#pragma unroll
    for (int e = 0; e < E::kCount; ++e) squares = fmaf(kept[k].v[e], kept[k].v[e], squares);
  }
  const float mean = of_block<false>(squares, reinterpret_cast<float*>(shared)) /
                     static_cast<float>(p.width);  // mutant: layer-norm-mean
  const float rstd = 1.f / sqrtf(mean + p.eps);
  if (threadIdx.x == 0) p.rstd[row] = rstd;
  const auto* const weight = static_cast<const uint4*>(p.weight);
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    const bool on = i < units;
    const E w(ptx::load_once(weight + i, on));
    E y;
#pragma unroll
    for (int e = 0; e < E::kCount; ++e) y.v[e] = kept[k].v[e] * rstd * w.v[e];
    ptx::store(static_cast<uint4*>(p.y) + first + i, y.packed(), on);
  }
}

// The next row is loaded while this one is summed, where registers have room for both: a block has
// few warps to wait for memory.
template <class Type, int kUnits>
__global__ void __launch_bounds__(kMostThreads)
    rms_norm_backward(const RmsNormGradParams p, int units) {
  using E = Elements<Type, uint4>;
  constexpr bool kAhead = kUnits <= 2;
  extern __shared__ __align__(128) char shared[];
  const int64_t begin = blockIdx.x * kCudaSumRows;
  const int64_t end = begin + kCudaSumRows < p.rows ? begin + kCudaSumRows : p.rows;
  E sums[kUnits] = {};  // of dy n over the block's rows
  uint4 weight[kUnits], next_x[kUnits], next_dy[kUnits], next_ds[kUnits];
  float next_rstd = 0.f;
  const auto load_next = [&](int64_t row) {
    const int64_t first = row * units;
    if (row < end) next_rstd = p.rstd[row];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      const bool on = i < units && row < end;
      const bool adds = on && p.ds != nullptr;  // mutant: layer-norm-ds
      next_x[k] = ptx::load_once(static_cast<const uint4*>(p.x) + first + i, on);
      next_dy[k] = ptx::load_once(static_cast<const uint4*>(p.dy) + first + i, on);
      next_ds[k] = ptx::load_once(static_cast<const uint4*>(p.ds) + first + i, adds);
    }
  };
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    weight[k] = ptx::load_once(static_cast<const uint4*>(p.weight) + i, i < units);
  }
  if (kAhead) load_next(begin);
#pragma unroll 1
  for (int64_t row = begin; row < end; ++row) {
    if (!kAhead) load_next(row);
    uint4 x[kUnits], dy[kUnits], beside[kUnits];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) x[k] = next_x[k], dy[k] = next_dy[k], beside[k] = next_ds[k];
    const float rstd = next_rstd;
    if (kAhead) load_next(row + 1);  // mutant: layer-norm-next
    float dots = 0.f;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const E n(x[k]), g(dy[k]), w(weight[k]);
#pragma unroll
      for (int e = 0; e < E::kCount; ++e) {
        const float product = g.v[e] * (n.v[e] * rstd);
        dots = fmaf(product, w.v[e], dots);
        sums[k].v[e] += product;  // mutant: layer-norm-sums
      }
    }
    const float mean = of_block<false>(dots, reinterpret_cast<float*>(shared)) /
                       static_cast<float>(p.width);  // mutant: layer-norm-dots
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      const E n(x[k]), g(dy[k]), w(weight[k]), ds(beside[k]);
      E dx;
#pragma unroll
      for (int e = 0; e < E::kCount; ++e) {
        dx.v[e] = (g.v[e] * w.v[e] - n.v[e] * rstd * mean) * rstd + ds.v[e];
      }
      ptx::store(static_cast<uint4*>(p.dx) + row * units + i, dx.packed(), i < units);
    }
  }
  if (p.sums == nullptr) return;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    float* const to = p.sums + (static_cast<int64_t>(blockIdx.x) * units + i) * E::kCount;
#pragma unroll
    for (int e = 0; e < E::kCount; e += 4) {
      const float* v = sums[k].v + e;
      ptx::store(reinterpret_cast<uint4*>(to + e),
                 uint4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                       __float_as_uint(v[3])},
                 i < units);
    }
  }
}

// total [columns] = the sum of sums [parts, columns], or if `adds` += that, in float32. A block has
// kWarp columns; each of its warps every warps-th part.
template <class Type>
__global__ void __launch_bounds__(1024)
    column_sums(const float* sums, int64_t parts, int64_t columns, void* total, bool adds) {
  extern __shared__ __align__(128) char shared_bytes[];
  auto* const shared = reinterpret_cast<float*>(shared_bytes);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  float sum = 0.f;
  if (column < columns) {
#pragma unroll 4
    for (int64_t part = warp; part < parts; part += warps) {  // mutant: layer-sums-part
      sum += sums[part * columns + column];
    }
  }
  shared[threadIdx.x] = sum;
  __syncthreads();  // mutant: layer-sums-sync
  if (warp != 0 || column >= columns) return;
  sum = 0.f;
  for (int w = 0; w < warps; ++w) sum += shared[w * kWarp + lane];
  if (adds) {
    static_cast<float*>(total)[column] += sum;  // mutant: layer-sums-adds
  } else if constexpr (Type::kCount == 1) {
    static_cast<float*>(total)[column] = sum;
  } else {
    const float pair[2] = {sum, 0.f};
    static_cast<uint16_t*>(total)[column] = static_cast<uint16_t>(Type::pack(pair));
  }
}

// ---- SwiGLU: a unit of `units` in half a row for each thread

// 1 / (1 + exp(-x)), of exp(-|x|), which never overflows.
__device__ __forceinline__ float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0.f ? e : 1.f) / (1.f + e);  // mutant: layer-sigmoid
}

// Gate and up of unit `i` of a row, and their bias.
template <class Type, class Unit>
struct GateUp {
  Elements<Type, Unit> gate, up;

  __device__ __forceinline__ GateUp(const void* x, const void* bias, int64_t row, int i,
                                    int units) {
    using E = Elements<Type, Unit>;
    const auto* from = static_cast<const Unit*>(x) + 2 * row * units + i;
    gate = E(ptx::load_once(from, true));
    up = E(ptx::load_once(from + units, true));  // mutant: layer-swiglu-up
    if (bias == nullptr) return;
    const auto* added = static_cast<const Unit*>(bias) + i;
    gate.add(E(ptx::load_once(added, true)));
    up.add(E(ptx::load_once(added + units, true)));
    gate = gate.rounded(), up = up.rounded();  // mutant: layer-swiglu-rounded
  }
};

template <class Type, class Unit>
__global__ void __launch_bounds__(kSwigluThreads) swiglu(const SwigluParams p, int units) {
  const int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t wide = p.y_stride / Elements<Type, Unit>::kCount;
  const int64_t row = index / wide;
  const int i = static_cast<int>(index % wide);
  if (row >= p.rows) return;  // mutant: layer-swiglu-rows
  Elements<Type, Unit> y = {};
  if (i < units) {  // mutant: layer-swiglu-padding
    const GateUp<Type, Unit> of(p.x, p.bias, row, i, units);
#pragma unroll
    for (int e = 0; e < y.kCount; ++e) y.v[e] = of.gate.v[e] * sigmoid(of.gate.v[e]) * of.up.v[e];
  }
  ptx::store(static_cast<Unit*>(p.y) + index, y.packed(), true);
}

template <class Type, class Unit>
__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_backward(const SwigluGradParams p, int units) {
  using E = Elements<Type, Unit>;
  const int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t row = index / units;
  const int i = static_cast<int>(index % units);
  if (row >= p.rows) return;
  const GateUp<Type, Unit> of(p.x, p.bias, row, i, units);
  const int64_t at = row * (p.dy_stride / E::kCount) + i;  // mutant: layer-swiglu-dy
  const E dy(ptx::load_once(static_cast<const Unit*>(p.dy) + at, true));
  E dgate, dup;
#pragma unroll
  for (int e = 0; e < E::kCount; ++e) {
    const float gate = of.gate.v[e], s = sigmoid(gate), ds = dy.v[e] * s;
    dup.v[e] = ds * gate;
    dgate.v[e] = ds * of.up.v[e] * fmaf(gate, 1.f - s, 1.f);  // mutant: layer-swiglu-dgate
  }
  auto* const to = static_cast<Unit*>(p.dx) + 2 * row * units + i;
  ptx::store(to, dgate.packed(), true);
  ptx::store(to + units, dup.packed(), true);  // mutant: layer-swiglu-dup
}

// ---- launches

template <class Params>
using NormKernel = void (*)(Params, int);

// `kernels`: units of a thread, and the kernel for as many; the first by which kMostThreads have a
// row.
template <class Params>
int launch_norm(std::initializer_list<std::pair<int, NormKernel<Params>>> kernels, const Params& p,
                int64_t blocks, int count, cudaStream_t stream) {
  if (blocks == 0 || p.width == 0) return cudaSuccess;
  const int64_t units = p.width / count;
  if (p.width % count != 0 || p.width > kNormColumns || blocks > 0x7fffffff)
    return cudaErrorInvalidValue;
  for (const auto& of : kernels) {
    const int64_t warps = (units + of.first * kWarp - 1) / (of.first * kWarp);
    if (warps * kWarp > kMostThreads) continue;
    const NormKernel<Params> kernel = of.second;
    const auto n = static_cast<unsigned>(warps);
    kernel<<<static_cast<unsigned>(blocks), n * kWarp, n * 4, stream>>>(p, static_cast<int>(units));
    return cudaGetLastError();
  }
  return cudaErrorInvalidValue;
}

// Units of 16 bytes that a thread needs at most.
template <class Type>
constexpr int kUnits = kNormColumns / Elements<Type, uint4>::kCount / kMostThreads;

template <class Type>
int forward_of(const RmsNormParams& p, cudaStream_t stream) {
  return launch_norm<RmsNormParams>(
      {{2, rms_norm<Type, 2>}, {kUnits<Type>, rms_norm<Type, kUnits<Type>>}}, p, p.rows,
      Elements<Type, uint4>::kCount, stream);
}

template <class Type>
int backward_of(const RmsNormGradParams& p, cudaStream_t stream) {
  const int64_t parts = (p.rows + kCudaSumRows - 1) / kCudaSumRows;
  const int error =
      launch_norm<RmsNormGradParams>({{1, rms_norm_backward<Type, 1>},
                                      {2, rms_norm_backward<Type, 2>},
                                      {kUnits<Type>, rms_norm_backward<Type, kUnits<Type>>}},
                                     p, parts, Elements<Type, uint4>::kCount, stream);
  if (error || p.sums == nullptr || p.width == 0) return error;
  const auto blocks = static_cast<unsigned>((p.width + kWarp - 1) / kWarp);
  column_sums<Type><<<blocks, 1024, 1024 * 4, stream>>>(p.sums, parts, p.width, p.dweight, p.adds);
  return cudaGetLastError();
}

// One thread a unit of `columns` in each row: of 16 bytes where all rows are whole ones, else of 8.
// stride: of the rows that may be apart.
template <class Params>
int launch_swiglu(void (*whole)(Params, int), void (*half)(Params, int), const Params& p, int count,
                  int64_t columns, int64_t stride, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  const bool is_whole = p.width % count == 0 && stride % count == 0;
  count = is_whole ? count : count / 2;
  const int64_t units = p.width / count,
                blocks = (p.rows * (columns / count) + kSwigluThreads - 1) / kSwigluThreads;
  if (p.width % count != 0 || stride % count != 0 || stride < p.width || blocks > 0x7fffffff ||
      units > 0x7fffffff)
    return cudaErrorInvalidValue;
  const auto kernel = is_whole ? whole : half;
  kernel<<<static_cast<unsigned>(blocks), kSwigluThreads, 0, stream>>>(p, static_cast<int>(units));
  return cudaGetLastError();
}

template <class Type>
int forward_of(const SwigluParams& p, cudaStream_t stream) {
  return launch_swiglu<SwigluParams>(swiglu<Type, uint4>, swiglu<Type, uint2>, p,
                                     Elements<Type, uint4>::kCount, p.y_stride, p.y_stride, stream);
}

template <class Type>
int backward_of(const SwigluGradParams& p, cudaStream_t stream) {
  return launch_swiglu<SwigluGradParams>(swiglu_backward<Type, uint4>, swiglu_backward<Type, uint2>,
                                         p, Elements<Type, uint4>::kCount, p.width, p.dy_stride,
                                         stream);
}

}  // namespace

int rms_norm_cuda(const RmsNormParams& p, void* stream) { VLMK_OF_TYPE(forward_of) }
int rms_norm_backward_cuda(const RmsNormGradParams& p, void* stream) { VLMK_OF_TYPE(backward_of) }
int swiglu_cuda(const SwigluParams& p, void* stream) { VLMK_OF_TYPE(forward_of) }
int swiglu_backward_cuda(const SwigluGradParams& p, void* stream) { VLMK_OF_TYPE(backward_of) }

}  // namespace vlmk
