// Rotary embedding of heads ("rotate half", arXiv 2104.09864) on CUDA, in float32, cosines and
// sines rounded to the heads' type as transformers has them, the result rounded once.
//
// Floor: reads and writes an element once, and 8 bytes of the table for two elements of each head,
// which the heads of a token share in the caches. (rotate_rows of a vision tower, in
// attention/sm80/vision.cu, rounds no angles and writes head by head, as its kernels read.)
#include <cuda_runtime.h>

#include "cuda/layer/elements.cuh"
#include "cuda/layer/layer.h"
#include "cuda/ptx/sm80.cuh"

namespace vlmk {
namespace {

constexpr int kRotaryThreads = 256;

// Those of a row of the table from column `first` on, rounded to the type.
template <class Type>
__device__ __forceinline__ Elements<Type, uint4> angles(const float* row, int first) {
  using E = Elements<Type, uint4>;
  E of;
#pragma unroll
  for (int e = 0; e < E::kCount; e += 4) {
    const Elements<Fp32, uint4> part(
        ptx::load(reinterpret_cast<const uint4*>(row + first + e), true));
#pragma unroll
    for (int j = 0; j < 4; ++j) of.v[e + j] = part.v[j];
  }
  return of.rounded();  // mutant: layer-rotary-rounded
}

// A unit of 16 bytes of a head's first half and its partner of the second for each thread.
template <class Type>
__global__ void __launch_bounds__(kRotaryThreads) rotate_heads(const RotaryParams p, int units) {
  using E = Elements<Type, uint4>;
  const int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int i = static_cast<int>(index % units);
  const int64_t row = index / units, head = row % p.heads;  // row of [T, groups, heads]
  const int64_t group = row / p.heads % p.groups, token = row / p.heads / p.groups;
  if (token >= p.tokens) return;  // mutant: layer-rotary-tokens
  const int first = i * E::kCount;
  const E cos = angles<Type>(p.cos + token * p.table_stride, first);
  E sin = angles<Type>(p.sin + token * p.table_stride, first);
#pragma unroll
  for (int e = 0; e < E::kCount; ++e) {
    sin.v[e] = p.conjugate ? -sin.v[e] : sin.v[e];  // mutant: layer-rotary-sign
  }

  const int64_t at = token * p.x_token + group * p.x_group + head * p.x_head;
  const auto* const from = static_cast<const uint4*>(p.x) + at / E::kCount + i;
  const E a(ptx::load_once(from, true)), b(ptx::load_once(from + units, true));
  E y, z;
#pragma unroll
  for (int e = 0; e < E::kCount; ++e) {
    y.v[e] = a.v[e] * cos.v[e] - b.v[e] * sin.v[e];
    z.v[e] = b.v[e] * cos.v[e] + a.v[e] * sin.v[e];  // mutant: layer-rotary-second
  }
  const int64_t to = token * p.out_token + group * p.out_group + head * p.out_head;
  auto* const out = static_cast<uint4*>(p.out) + to / E::kCount + i;
  ptx::store(out, y.packed(), true);
  ptx::store(out + units, z.packed(), true);
}

template <class Type>
int rotate_of(const RotaryParams& p, cudaStream_t stream) {
  constexpr int kCount = Elements<Type, uint4>::kCount;
  const int64_t units = p.head_dim / 2 / kCount, threads = p.tokens * p.groups * p.heads * units;
  if (threads == 0) return cudaSuccess;
  const int64_t blocks = (threads + kRotaryThreads - 1) / kRotaryThreads;
  for (const int64_t stride :
       {p.head_dim / 2, p.x_token, p.x_group, p.x_head, p.out_token, p.out_group, p.out_head}) {
    if (stride % kCount != 0) return cudaErrorInvalidValue;
  }
  if (p.head_dim % 2 != 0 || p.table_stride % 4 != 0 || blocks > 0x7fffffff)
    return cudaErrorInvalidValue;
  rotate_heads<Type>
      <<<static_cast<unsigned>(blocks), kRotaryThreads, 0, stream>>>(p, static_cast<int>(units));
  return cudaGetLastError();
}

}  // namespace

int rotate_heads_cuda(const RotaryParams& p, void* stream) { VLMK_OF_TYPE(rotate_of) }

}  // namespace vlmk
