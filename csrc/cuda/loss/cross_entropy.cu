// Softmax cross entropy on CUDA, formulas as in cpu/loss/kernel.cpp: a block has a whole row, goes
// through it once for the statistics and once more, backwards, for the gradient, so that what its
// L1 and the L2 cache still hold is read first.
//
// Floor: a chunk is read once and written once; read twice where neither cache holds it. A row of
// 151,936 classes is 0.3 MB in 16 bits and one block on one SM takes it through in less time than
// a product over that row's logits takes to read the weight, so a row is never shared by blocks.
// Sums are taken in one order, which the number of columns fixes.
#include <cuda_runtime.h>

#include "common/params.h"
#include "cuda/block.cuh"
#include "cuda/loss/cross_entropy.h"
#include "cuda/ptx/sm80.cuh"

namespace vlmk {
namespace {

// 512 threads with 4 loads of 16 bytes each are 32 KB in flight, where latency times bandwidth asks
// for about 22 KB a SM (H200: 4.8 TB/s, 0.6 us, 132 SMs); a block of fewer has a short row.
constexpr int kMostThreads = 512, kFewestThreads = 128;
constexpr int kUnroll = 4;
constexpr float kLog2e = 1.44269504f, kLog2eRest = 1.925963033e-8f, kLn2 = 0.693147181f;

// A type of logits: an element as its bits, and kCount of them in one access.
struct Fp32 {
  static constexpr int kCount = 4;
  static constexpr bool kExact = true;
  using Bits = ptx::Unit4;
  static __device__ __forceinline__ float value(Bits x) { return __uint_as_float(x); }
  static __device__ __forceinline__ Bits bits(float x) { return __float_as_uint(x); }
  static __device__ __forceinline__ void unpack(float (&v)[4], const ptx::Unit16& u) {
    v[0] = value(u.x), v[1] = value(u.y), v[2] = value(u.z), v[3] = value(u.w);
  }
  static __device__ __forceinline__ ptx::Unit16 pack(const float (&v)[4]) {
    return {bits(v[0]), bits(v[1]), bits(v[2]), bits(v[3])};
  }
};
template <class Math>
struct Half {
  static constexpr int kCount = 8;
  static constexpr bool kExact = false;
  using Bits = ptx::Unit2;
  static __device__ __forceinline__ float value(Bits x) { return Math::low(x); }
  static __device__ __forceinline__ Bits bits(float x) {
    return static_cast<Bits>(Math::pack(x, 0.f));
  }
  static __device__ __forceinline__ void unpack(float (&v)[8], const ptx::Unit16& u) {
    const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      v[2 * w] = Math::low(words[w]);
      v[2 * w + 1] = Math::high(words[w]);  // mutant: loss-unpack
    }
  }
  static __device__ __forceinline__ ptx::Unit16 pack(const float (&v)[8]) {
    return {Math::pack(v[0], v[1]), Math::pack(v[2], v[3]), Math::pack(v[4], v[5]),
            Math::pack(v[6], v[7])};
  }
};

// exp(x - largest). kExact: with what the product by kLog2e loses, which at a difference of 10 is
// more than the error of the exponential, 2^-22.
template <bool kExact>
__device__ __forceinline__ float exp_below(float x, float largest) {
  float d = x - largest;
  // Zero below; of -inf there is no rest.
  if constexpr (kExact) d = d < -150.f ? -150.f : d;  // mutant: loss-exp-far
  const float product = d * kLog2e, power = ptx::exp2_approx(product);
  if constexpr (!kExact) return power;
  // mutant: loss-exp-rest
  const float rest = fmaf(d, kLog2eRest, fmaf(d, kLog2e, -product));
  return fmaf(power, rest * kLn2, power);
}

// A row: whole units of 16 aligned bytes, and fewer than two units of elements before and after.
template <class Type>
struct Row {
  typename Type::Bits* x;
  int units;
  int before;  // elements
  int rest;    // elements before and after

  __device__ __forceinline__ Row(const CrossEntropyParams& p, int64_t row)
      : x(static_cast<typename Type::Bits*>(p.logits) + row * p.columns) {
    const auto columns = static_cast<int>(p.columns);
    const int past = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(*x));
    before = (Type::kCount - past) % Type::kCount;  // mutant: loss-row-before
    before = before < columns ? before : columns;
    units = (columns - before) / Type::kCount;
    rest = columns - units * Type::kCount;
  }
  __device__ __forceinline__ ptx::Unit16* unit(int i) const {
    return reinterpret_cast<ptx::Unit16*>(x + before) + i;
  }
  // The i-th element before and after.
  __device__ __forceinline__ typename Type::Bits* single(int i) const {
    return x + (i < before ? i : units * Type::kCount + i);  // mutant: loss-row-single
  }
};

// What a thread has seen: the largest logit, and sums of exp(logit - largest) and of logits.
template <bool kExact>
struct Statistics {
  float largest = kLowest, sum = 0, logit_sum = 0;

  template <int kCount>
  __device__ __forceinline__ void add(const float (&v)[kCount]) {
    float most = largest;
#pragma unroll
    // NaN is passed over here; it arrives in the sum.
    for (int e = 0; e < kCount; ++e) most = fmaxf(most, v[e]);
    sum *= exp_below<kExact>(largest, most);  // mutant: loss-add-sum
    largest = most;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      sum += exp_below<kExact>(v[e], most);
      logit_sum += v[e];  // mutant: loss-add-logit-sum
    }
  }
};

// The settings that a gradient needs, in float: label_smoothing / classes, 1 - label_smoothing and
// 2 z_loss.
struct Factors {
  float even;
  float hit;
  float two_z;
};

template <class Type>
__global__ void __launch_bounds__(kMostThreads)
    cross_entropy(const CrossEntropyParams p, const Factors factors) {
  extern __shared__ __align__(128) char shared_bytes[];
  auto* const shared = reinterpret_cast<float*>(shared_bytes);
  constexpr int kCount = Type::kCount;
  constexpr bool kExact = Type::kExact;
  const int thread = threadIdx.x, threads = blockDim.x, stride = threads * kUnroll;
  const int64_t row = blockIdx.x;
  const Row<Type> logits(p, row);
  const int64_t target = p.targets[row] - p.first_class;  // mutant: loss-target
  const bool here = target >= 0 && target < p.columns;    // mutant: loss-here
  const float at_target = here ? Type::value(logits.x[target]) : 0.f;
  float largest = p.row_max[row], sum = p.row_sum[row];

  if (p.statistics) {
    const float logit_sum = p.logit_sum[row];
    Statistics<kExact> seen;
    if (thread < logits.rest) {  // mutant: loss-rest
      const float one[1] = {Type::value(*logits.single(thread))};
      seen.add(one);
    }
#pragma unroll 1
    for (int base = thread; base < logits.units; base += /* mutant: loss-stride */ stride) {
      ptx::Unit16 u[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        const int i = base + k * threads;
        u[k] = ptx::load(logits.unit(i), i < logits.units);  // mutant: loss-load
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (base + k * threads >= logits.units) break;  // mutant: loss-if-unit
        float v[kCount];
        Type::unpack(v, u[k]);
        seen.add(v);
      }
    }
    const float of_these = of_block<true>(seen.largest, shared);
    // mutant: loss-sum
    const float sum_of_these =
        of_block<false>(seen.sum * exp_below<kExact>(seen.largest, of_these), shared);
    const float logits_of_these = of_block<false>(seen.logit_sum, shared);
    const float earlier = largest;
    largest = fmaxf(earlier, of_these);  // mutant: loss-largest
    sum = sum * exp_below<kExact>(earlier, largest) +
          sum_of_these * exp_below<kExact>(of_these, largest);
    if (thread == 0) {
      p.row_max[row] = largest;
      p.row_sum[row] = sum;
      p.logit_sum[row] = logit_sum + logits_of_these;  // mutant: loss-logit-sum
      if (here) p.target_logit[row] = at_target;       // mutant: loss-target-logit
    }
  }
  if (p.scale == nullptr) return;
  __syncthreads();  // mutant: loss-sync
  const float scale = p.scale[row];
  const float lse = largest + kLn2 * ptx::log2_approx(sum);
  const float slope = scale * (1.f + factors.two_z * lse) * (1.f / sum);  // mutant: loss-slope
  const float even = scale * factors.even;                                // mutant: loss-even
  const auto gradient = [&](float x) { return exp_below<kExact>(x, largest) * slope - even; };
  // From the last batch to the first; that of a thread without units is empty.
  const int last = thread + (logits.units - 1 - thread) / stride * stride;  // mutant: loss-last
#pragma unroll 1
  for (int base = last; base >= 0; base -= stride) {
    ptx::Unit16 u[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int i = base + k * threads;
      u[k] = ptx::load(logits.unit(i), i < logits.units);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int i = base + k * threads;
      if (i >= logits.units) break;
      float v[kCount];
      Type::unpack(v, u[k]);
#pragma unroll
      for (int e = 0; e < kCount; ++e) v[e] = gradient(v[e]);
      *logits.unit(i) = Type::pack(v);  // mutant: loss-store
    }
  }
  if (thread < logits.rest) {
    auto* const x = logits.single(thread);
    *x = Type::bits(gradient(Type::value(*x)));  // mutant: loss-store-rest
  }
  __syncthreads();  // mutant: loss-sync-at-target
  if (thread == 0 && here) {
    const float g = gradient(at_target) - scale * factors.hit;  // mutant: loss-hit
    logits.x[target] = Type::bits(g);
  }
}

// As many threads as have kUnroll units each, a power of two.
int threads_of(int64_t columns, int count) {
  int threads = kMostThreads;
  while (threads > kFewestThreads && threads * count * kUnroll > columns) threads /= 2;
  return threads;
}

template <class Type>
void launch(const CrossEntropyParams& p, cudaStream_t stream) {
  const Factors factors = {static_cast<float>(p.label_smoothing / static_cast<double>(p.classes)),
                           static_cast<float>(1 - p.label_smoothing),
                           static_cast<float>(2 * p.z_loss)};
  const int threads = threads_of(p.columns, Type::kCount);
  const int shared = threads / ptx::kWarpSize * static_cast<int>(sizeof(float));
  cross_entropy<Type><<<static_cast<unsigned>(p.rows), threads, shared, stream>>>(p, factors);
}

}  // namespace

int cross_entropy_cuda(const CrossEntropyParams& p, void* stream) {
  if (p.rows == 0) return cudaSuccess;
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.dtype == DType::kFloat32)
    launch<Fp32>(p, s);
  else if (p.dtype == DType::kBFloat16)  // mutant: loss-if-dtype
    launch<Half<ptx::Bf16Math>>(p, s);
  else
    launch<Half<ptx::Fp16Math>>(p, s);
  return cudaGetLastError();
}

}  // namespace vlmk
