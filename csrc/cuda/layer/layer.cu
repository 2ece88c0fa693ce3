// RMSNorm and SwiGLU on CUDA, formulas as in cpu/layer/kernel.cpp: fp32, rounded once.
//
// Floor, in elements of memory: RMSNorm reads 1 and writes 1 a row's element, with a residual reads
// 2 and writes 2; its backward reads 2 or 3 and writes 1. SwiGLU of F columns reads 2 F and writes
// F, its backward reads 3 F and writes 2 F. A row of a norm is one block's, and stays in its
// registers between the sum over it and the result.
//
// A parameter's gradient: a block's rows are summed in registers, in their order, and `column_sums`
// adds the blocks' parts in theirs; the same bits every time.
#include <cuda_runtime.h>

#include <initializer_list>
#include <type_traits>
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

// Sums of unit `at` of parts [parts, units].
template <class E>
__device__ __forceinline__ void store_sums(float* parts, int64_t at, const E& sums, bool on) {
  using Word = std::conditional_t<E::kCount % 4 == 0, uint4, uint2>;
  using Sums = Elements<Fp32, Word>;
#pragma unroll
  for (int e = 0; e < E::kCount; e += Sums::kCount) {
    Sums some;
#pragma unroll
    for (int i = 0; i < Sums::kCount; ++i) some.v[i] = sums.v[e + i];
    ptx::store(reinterpret_cast<Word*>(parts + at * E::kCount + e), some.packed(), on);
  }
}

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
template <class Type, int kUnits, bool kBias>
__global__ void __launch_bounds__(kMostThreads)
    rms_norm_backward(const RmsNormGradParams p, int units) {
  using E = Elements<Type, uint4>;
  constexpr bool kAhead = kUnits <= (kBias ? 1 : 2);
  extern __shared__ __align__(128) char shared[];
  const int64_t begin = blockIdx.x * kCudaNormRows;
  const int64_t end = begin + kCudaNormRows < p.rows ? begin + kCudaNormRows : p.rows;
  E sums[kUnits] = {};                   // of dy n over the block's rows
  E bias_sums[kBias ? kUnits : 1] = {};  // of dx
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
        if constexpr (kBias) {
          bias_sums[k].v[e] += dx.v[e];  // mutant: layer-norm-bias-sums
        }
      }
      ptx::store(static_cast<uint4*>(p.dx) + row * units + i, dx.packed(), i < units);
    }
  }
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * units + i;
    if (p.dweight.parts != nullptr) store_sums(p.dweight.parts, at, sums[k], i < units);
    if constexpr (kBias) store_sums(p.dbias.parts, at, bias_sums[k], i < units);
  }
}

// of.total [columns] = the sum of of.parts [parts, columns], or if of.adds += that, in float32. A
// block has kWarp columns; each of its warps every warps-th part.
template <class Type>
__global__ void __launch_bounds__(1024)
    column_sums(const ColumnSums first, const ColumnSums second, int64_t parts, int64_t columns) {
  extern __shared__ __align__(128) char shared_bytes[];
  const ColumnSums of = blockIdx.y == 0 ? first : second;  // mutant: layer-sums-second
  auto* const shared = reinterpret_cast<float*>(shared_bytes);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  float sum = 0.f;
  if (column < columns) {
#pragma unroll 4
    for (int64_t part = warp; part < parts; part += warps) {  // mutant: layer-sums-part
      sum += of.parts[part * columns + column];
    }
  }
  shared[threadIdx.x] = sum;
  __syncthreads();  // mutant: layer-sums-sync
  if (warp != 0 || column >= columns) return;
  sum = 0.f;
  for (int w = 0; w < warps; ++w) sum += shared[w * kWarp + lane];
  if (of.adds) {
    static_cast<float*>(of.total)[column] += sum;  // mutant: layer-sums-adds
  } else if constexpr (Type::kCount == 1) {
    static_cast<float*>(of.total)[column] = sum;
  } else {
    const float pair[2] = {sum, 0.f};
    static_cast<uint16_t*>(of.total)[column] = static_cast<uint16_t>(Type::pack(pair));
  }
}

// ---- SwiGLU: a unit of `units` in half a row for each thread, or with the bias's gradient for the
// rows of a part

// 1 / (1 + exp(-x)), of exp(-|x|), which never overflows.
__device__ __forceinline__ float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0.f ? e : 1.f) / (1.f + e);  // mutant: layer-sigmoid
}

// Unit `i` of the gate and of up, of a row of [gate | up].
template <class Unit>
struct Halves {
  Unit gate, up;

  __device__ __forceinline__ static Halves load(const void* x, int64_t row, int i, int units,
                                                bool on) {
    const auto* from = static_cast<const Unit*>(x) + 2 * row * units + i;
    const Unit gate = ptx::load_once(from, on);
    const Unit up = ptx::load_once(from + units, on);  // mutant: layer-swiglu-up
    return {gate, up};
  }
  __device__ __forceinline__ void store(void* x, int64_t row, int i, int units) const {
    auto* to = static_cast<Unit*>(x) + 2 * row * units + i;
    ptx::store(to, gate, true);
    ptx::store(to + units, up, true);  // mutant: layer-swiglu-dup
  }
};

template <class Type, class Unit>
struct GateUp {
  Elements<Type, Unit> gate, up;

  // The bias of the same unit, if there is one.
  __device__ __forceinline__ GateUp(const Halves<Unit>& x, const Halves<Unit>& bias, bool biased)
      : gate(x.gate), up(x.up) {
    using E = Elements<Type, Unit>;
    if (!biased) return;
    gate.add(E(bias.gate)), up.add(E(bias.up));
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
    const bool biased = p.bias != nullptr;
    const GateUp<Type, Unit> of(Halves<Unit>::load(p.x, row, i, units, true),
                                Halves<Unit>::load(p.bias, 0, i, units, biased), biased);
#pragma unroll
    for (int e = 0; e < y.kCount; ++e) y.v[e] = of.gate.v[e] * sigmoid(of.gate.v[e]) * of.up.v[e];
  }
  ptx::store(static_cast<Unit*>(p.y) + index, y.packed(), true);
}

// Unit `i` of a row of dy.
template <class Type, class Unit>
__device__ __forceinline__ Unit load_dy(const SwigluGradParams& p, int64_t row, int i, bool on) {
  const int64_t at =
      row * (p.dy_stride / Elements<Type, Unit>::kCount) + i;  // mutant: layer-swiglu-dy
  return ptx::load_once(static_cast<const Unit*>(p.dy) + at, on);
}

// The gradients of gate and up.
template <class Type, class Unit>
__device__ __forceinline__ GateUp<Type, Unit> derivatives(const GateUp<Type, Unit>& of,
                                                          const Elements<Type, Unit>& dy) {
  GateUp<Type, Unit> d = of;
#pragma unroll
  for (int e = 0; e < dy.kCount; ++e) {
    const float gate = of.gate.v[e], s = sigmoid(gate), ds = dy.v[e] * s;
    d.up.v[e] = ds * gate;
    d.gate.v[e] = ds * of.up.v[e] * fmaf(gate, 1.f - s, 1.f);  // mutant: layer-swiglu-dgate
  }
  return d;
}

template <class Type, class Unit>
__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_backward(const SwigluGradParams p, int units) {
  const int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t row = index / units;
  const int i = static_cast<int>(index % units);
  if (row >= p.rows) return;
  const bool biased = p.bias != nullptr;
  const GateUp<Type, Unit> of(Halves<Unit>::load(p.x, row, i, units, true),
                              Halves<Unit>::load(p.bias, 0, i, units, biased), biased);
  const auto d = derivatives(of, Elements<Type, Unit>(load_dy<Type, Unit>(p, row, i, true)));
  Halves<Unit>{d.gate.packed(), d.up.packed()}.store(p.dx, row, i, units);
}

// The same and parts of the bias's gradient. Two rows are loaded ahead of the one that is computed.
template <class Type, class Unit>
__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_bias_backward(const SwigluGradParams p, int units) {
  using E = Elements<Type, Unit>;
  const int wide = (units + blockDim.x - 1) / blockDim.x;
  const int64_t part = blockIdx.x / wide, begin = part * kCudaSwigluRows;
  const int64_t end = begin + kCudaSwigluRows < p.rows ? begin + kCudaSwigluRows : p.rows;
  const int i = blockIdx.x % wide * blockDim.x + threadIdx.x;
  if (i >= units) return;  // mutant: layer-swiglu-units
  const bool biased = p.bias != nullptr;
  const auto bias = Halves<Unit>::load(p.bias, 0, i, units, biased);
  Halves<Unit> next_x[2];
  Unit next_dy[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    next_x[j] = Halves<Unit>::load(p.x, begin + j, i, units, begin + j < end);
    next_dy[j] = load_dy<Type, Unit>(p, begin + j, i, begin + j < end);
  }
  E gate_sums = {}, up_sums = {};
#pragma unroll 1
  for (int64_t first = begin; first < end; first += 2) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t row = first + j, next = row + 2;
      const GateUp<Type, Unit> of(next_x[j], bias, biased);
      const E dy(next_dy[j]);
      next_x[j] = Halves<Unit>::load(p.x, next, i, units, next < end);
      next_dy[j] = load_dy<Type, Unit>(p, next, i, next < end);  // mutant: layer-swiglu-next
      if (row >= end) break;                                     // mutant: layer-swiglu-end
      const auto d = derivatives(of, dy);
      Halves<Unit>{d.gate.packed(), d.up.packed()}.store(p.dx, row, i, units);
      gate_sums.add(d.gate), up_sums.add(d.up);  // mutant: layer-swiglu-sums
    }
  }
  const int64_t at = 2 * part * units + i;
  store_sums(p.dbias.parts, at, gate_sums, true);
  store_sums(p.dbias.parts, at + units, up_sums, true);
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

// The totals of one or two gradients; without parts nothing.
template <class Type>
int launch_sums(const ColumnSums& first, const ColumnSums& second, int64_t parts, int64_t columns,
                cudaStream_t stream) {
  const bool has_first = first.parts != nullptr, has_second = second.parts != nullptr;
  if (columns == 0 || !(has_first || has_second)) return cudaSuccess;
  const dim3 blocks(static_cast<unsigned>((columns + kWarp - 1) / kWarp),
                    has_first && has_second ? 2 : 1);
  column_sums<Type>
      <<<blocks, 1024, 1024 * 4, stream>>>(has_first ? first : second, second, parts, columns);
  return cudaGetLastError();
}

template <class Type, bool kBias>
int launch_norm_backward(const RmsNormGradParams& p, int64_t parts, cudaStream_t stream) {
  return launch_norm<RmsNormGradParams>(
      {{1, rms_norm_backward<Type, 1, kBias>},
       {2, rms_norm_backward<Type, 2, kBias>},
       {kUnits<Type>, rms_norm_backward<Type, kUnits<Type>, kBias>}},
      p, parts, Elements<Type, uint4>::kCount, stream);
}

template <class Type>
int backward_of(const RmsNormGradParams& p, cudaStream_t stream) {
  const int64_t parts = (p.rows + kCudaNormRows - 1) / kCudaNormRows;
  const int error = p.dbias.parts == nullptr ? launch_norm_backward<Type, false>(p, parts, stream)
                                             : launch_norm_backward<Type, true>(p, parts, stream);
  return error ? error : launch_sums<Type>(p.dweight, p.dbias, parts, p.width, stream);
}

// Elements of a thread's unit, `count` in 16 bytes: as many where all rows are whole ones, or half,
// else none. stride: of the rows that may be apart.
int64_t unit_of(int64_t width, int64_t stride, int64_t count) {
  for (const int64_t n : {count, count / 2}) {
    if (width % n == 0 && stride % n == 0 && stride >= width) return n;
  }
  return 0;
}

// One thread a unit of `columns` in each row.
template <class Params>
int launch_swiglu(void (*whole)(Params, int), void (*half)(Params, int), const Params& p, int count,
                  int64_t columns, int64_t stride, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  const int64_t unit = unit_of(p.width, stride, count);
  if (unit == 0) return cudaErrorInvalidValue;
  const int64_t blocks = (p.rows * (columns / unit) + kSwigluThreads - 1) / kSwigluThreads;
  if (blocks > 0x7fffffff || p.width / unit > 0x7fffffff) return cudaErrorInvalidValue;
  const auto kernel = unit == count ? whole : half;
  kernel<<<static_cast<unsigned>(blocks), kSwigluThreads, 0, stream>>>(
      p, static_cast<int>(p.width / unit));
  return cudaGetLastError();
}

// One thread a unit in the rows of a part.
template <class Type>
int launch_swiglu_bias(const SwigluGradParams& p, int64_t parts, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  constexpr int kCount = Elements<Type, uint4>::kCount, kThreads = kSwigluThreads / 2;
  const int64_t unit = unit_of(p.width, p.dy_stride, kCount);
  if (unit == 0) return cudaErrorInvalidValue;
  const int64_t blocks = parts * ((p.width / unit + kThreads - 1) / kThreads);
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  const auto kernel =
      unit == kCount ? swiglu_bias_backward<Type, uint4> : swiglu_bias_backward<Type, uint2>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p,
                                                                 static_cast<int>(p.width / unit));
  return cudaGetLastError();
}

template <class Type>
int forward_of(const SwigluParams& p, cudaStream_t stream) {
  return launch_swiglu<SwigluParams>(swiglu<Type, uint4>, swiglu<Type, uint2>, p,
                                     Elements<Type, uint4>::kCount, p.y_stride, p.y_stride, stream);
}

template <class Type>
int backward_of(const SwigluGradParams& p, cudaStream_t stream) {
  constexpr int kCount = Elements<Type, uint4>::kCount;
  if (p.dbias.parts == nullptr) {
    return launch_swiglu<SwigluGradParams>(swiglu_backward<Type, uint4>,
                                           swiglu_backward<Type, uint2>, p, kCount, p.width,
                                           p.dy_stride, stream);
  }
  const int64_t parts = (p.rows + kCudaSwigluRows - 1) / kCudaSwigluRows;
  const int error = launch_swiglu_bias<Type>(p, parts, stream);
  return error ? error : launch_sums<Type>(p.dbias, {}, parts, 2 * p.width, stream);
}

}  // namespace

int rms_norm_cuda(const RmsNormParams& p, void* stream) { VLMK_OF_TYPE(forward_of) }
int rms_norm_backward_cuda(const RmsNormGradParams& p, void* stream) { VLMK_OF_TYPE(backward_of) }
int swiglu_cuda(const SwigluParams& p, void* stream) { VLMK_OF_TYPE(forward_of) }
int swiglu_backward_cuda(const SwigluGradParams& p, void* stream) { VLMK_OF_TYPE(backward_of) }

}  // namespace vlmk
