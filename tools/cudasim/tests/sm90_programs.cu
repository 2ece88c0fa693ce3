// Small kernels on csrc/cuda/ptx/sm90.cuh, for both simulators: a copied box as it lies in shared
// memory, and products of copied tiles.
#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/ptx/sm90.cuh"

namespace vlmk {
namespace {

using ptx::kWarpgroupSize;
using ptx::kWarpSize;

// One thread makes the barrier and starts `boxes` copies, side by side in columns; all threads
// wait.
template <class Start>
__device__ __forceinline__ void copy_all(uint32_t barrier, uint32_t bytes, const Start& start) {
  if (threadIdx.x == 0) {
    ptx::barrier_init(barrier, 1);
    ptx::fence_barrier_init();
    ptx::barrier_arrive_expect(barrier, bytes);
    start();
  }
  __syncthreads();
  ptx::barrier_wait(barrier, 0);
}

// out [rows * kRowBytes / 4]: the box at (column, head, token) as it lies in shared memory,
// `offset` bytes after the start.
template <int kRowBytes>
__global__ void copied_box(const __grid_constant__ CUtensorMap map, int column, int head, int token,
                           int rows, int offset, uint32_t* out) {
  extern __shared__ __align__(1024) char shared[];
  const uint32_t barrier = ptx::shared_address(shared), tile = barrier + 1024 + offset;
  if (threadIdx.x == 0) ptx::prefetch_map(&map);
  copy_all(barrier, rows * kRowBytes,
           [&] { ptx::load_box(tile, &map, barrier, column, head, token); });
  const auto* words = reinterpret_cast<const uint32_t*>(shared + 1024 + offset);
  for (int i = threadIdx.x; i < rows * kRowBytes / 4; i += blockDim.x) out[i] = words[i];
}

// The products' result: c [64, kColumns], of the layout of ptx/sm90.cuh.
template <int kColumns>
__device__ __forceinline__ void store_result(const float (&c)[kColumns / 2], float* out) {
  const int lane = threadIdx.x % kWarpSize, first = threadIdx.x / kWarpSize * 16;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const int row = first + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    out[row * kColumns + column] = c[i];
  }
}

// c [64, kColumns] = a [64, kDepth] b [kColumns, kDepth]^T; kChunk columns of a and b a copy.
template <class Math, int kColumns, int kChunk, int kDepth>
__global__ void __launch_bounds__(kWarpgroupSize, 1)
    row_products(const __grid_constant__ CUtensorMap a_map,
                 const __grid_constant__ CUtensorMap b_map, float* out) {
  constexpr int kRowBytes = kChunk * 2, kChunks = kDepth / kChunk;
  constexpr int kLeft = 64 * kRowBytes, kRight = kColumns * kRowBytes;  // bytes of a chunk
  extern __shared__ __align__(1024) char shared[];
  const uint32_t barrier = ptx::shared_address(shared), a = barrier + 1024, b = a + kChunks * kLeft;
  copy_all(barrier, kChunks * (kLeft + kRight), [&] {
    for (int i = 0; i < kChunks; ++i) {
      ptx::load_box(a + i * kLeft, &a_map, barrier, i * kChunk, 0, 0);
      ptx::load_box(b + i * kRight, &b_map, barrier, i * kChunk, 0, 0);
    }
  });
  float c[kColumns / 2];
  ptx::wgmma_fence();
#pragma unroll
  for (int d = 0; d < kDepth; d += 16) {
    const int chunk = d / kChunk, inside = d % kChunk * 2;
    ptx::Wgmma<Math, kColumns>::rows(
        c, ptx::matrix_descriptor<kRowBytes, 0, 8 * kRowBytes>(a + chunk * kLeft + inside),
        ptx::matrix_descriptor<kRowBytes, 0, 8 * kRowBytes>(b + chunk * kRight + inside), d > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_results(c);
  store_result<kColumns>(c, out);
}

// c [64, kColumns] = 1 + a [64, kDepth] b [kDepth, kColumns]; a from registers.
template <class Math, int kColumns, int kChunk, int kDepth>
__global__ void __launch_bounds__(kWarpgroupSize, 1)
    column_products(const __grid_constant__ CUtensorMap map, const uint32_t* left, float* out) {
  constexpr int kRowBytes = kChunk * 2, kChunks = kColumns / kChunk;
  constexpr int kRight = kDepth * kRowBytes;  // bytes of a chunk
  extern __shared__ __align__(1024) char shared[];
  const uint32_t barrier = ptx::shared_address(shared), b = barrier + 1024;
  copy_all(barrier, kChunks * kRight, [&] {
    for (int i = 0; i < kChunks; ++i)
      ptx::load_box(b + i * kRight, &map, barrier, i * kChunk, 0, 0);
  });
  float c[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) c[i] = 1.f;
  uint32_t a[kDepth / 16][4];
  const int lane = threadIdx.x % kWarpSize;
  const int row = threadIdx.x / kWarpSize * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kDepth / 4; ++i) {
    a[i / 4][i % 4] = left[((row + i % 2 * 8) * kDepth + i / 2 * 8) / 2 + lane % 4];
  }
  ptx::wgmma_results(c);  // or nvcc would set c after the fence
  ptx::wgmma_fence();
#pragma unroll
  for (int d = 0; d < kDepth; d += 16) {
    ptx::Wgmma<Math, kColumns>::columns(
        c, a[d / 16], ptx::matrix_descriptor<kRowBytes, kRight, 8 * kRowBytes>(b + d * kRowBytes));
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_results(c);
  store_result<kColumns>(c, out);
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// A map of x [tokens, heads, columns], dense, in boxes of `rows` tokens and `chunk` columns.
bool encode(CUtensorMap* map, const void* x, bool bf16, int columns, int heads, int tokens,
            int chunk, int rows) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                       &status) != cudaSuccess ||
      status != cudaDriverEntryPointSuccess)
    return false;
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(heads), cuuint64_t(tokens)};
  const cuuint64_t strides[] = {cuuint64_t(columns) * 2, cuuint64_t(columns) * 2 * heads};
  const cuuint32_t box[] = {cuuint32_t(chunk), 1, cuuint32_t(rows)}, steps[] = {1, 1, 1};
  return reinterpret_cast<Encode>(found)(
             map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
             const_cast<void*>(x), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             chunk == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
             : chunk == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                           : CU_TENSOR_MAP_SWIZZLE_32B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class Kernel>
bool allow(Kernel kernel, int shared) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared) ==
         cudaSuccess;
}

template <class Math, int kColumns, int kChunk, int kDepth>
int row_product(bool bf16, const void* a, const void* b, float* out) {
  constexpr int kShared = 1024 + (64 + kColumns) * kDepth * 2;
  CUtensorMap a_map, b_map;
  if (!encode(&a_map, a, bf16, kDepth, 1, 64, kChunk, 64) ||
      !encode(&b_map, b, bf16, kDepth, 1, kColumns, kChunk, kColumns) ||
      !allow(row_products<Math, kColumns, kChunk, kDepth>, kShared))
    return cudaErrorInvalidValue;
  row_products<Math, kColumns, kChunk, kDepth>
      <<<1, kWarpgroupSize, kShared, nullptr>>>(a_map, b_map, out);
  return cudaGetLastError();
}

template <class Math, int kColumns, int kChunk, int kDepth>
int column_product(bool bf16, const void* a, const void* b, float* out) {
  constexpr int kShared = 1024 + kColumns * kDepth * 2;
  CUtensorMap map;
  if (!encode(&map, b, bf16, kColumns, 1, kDepth, kChunk, kDepth) ||
      !allow(column_products<Math, kColumns, kChunk, kDepth>, kShared))
    return cudaErrorInvalidValue;
  column_products<Math, kColumns, kChunk, kDepth>
      <<<1, kWarpgroupSize, kShared, nullptr>>>(map, static_cast<const uint32_t*>(a), out);
  return cudaGetLastError();
}

}  // namespace

// x [tokens, heads, columns] of 16-bit numbers.
int hopper_box(int chunk, const void* x, int columns, int heads, int tokens, int rows, int column,
               int head, int token, int offset, uint32_t* out) {
  CUtensorMap map;
  if (!encode(&map, x, true, columns, heads, tokens, chunk, rows)) return cudaErrorInvalidValue;
  const int shared = 1024 + offset + rows * chunk * 2;
  if (chunk == 64)
    copied_box<128><<<1, 64, shared, nullptr>>>(map, column, head, token, rows, offset, out);
  else if (chunk == 32)
    copied_box<64><<<1, 64, shared, nullptr>>>(map, column, head, token, rows, offset, out);
  else
    copied_box<32><<<1, 64, shared, nullptr>>>(map, column, head, token, rows, offset, out);
  return cudaGetLastError();
}

// Instances: what sm90/forward.cu can ask for, the type alternating.
int hopper_row_product(int columns, int chunk, const void* a, const void* b, float* out) {
  using ptx::Bf16Math, ptx::Fp16Math;
  if (columns == 64 && chunk == 64) return row_product<Bf16Math, 64, 64, 128>(true, a, b, out);
  if (columns == 32 && chunk == 32) return row_product<Fp16Math, 32, 32, 96>(false, a, b, out);
  if (columns == 96 && chunk == 16) return row_product<Bf16Math, 96, 16, 80>(true, a, b, out);
  if (columns == 128 && chunk == 64) return row_product<Fp16Math, 128, 64, 64>(false, a, b, out);
  return cudaErrorInvalidValue;
}

int hopper_column_product(int columns, int chunk, const void* a, const void* b, float* out) {
  using ptx::Bf16Math, ptx::Fp16Math;
  if (columns == 64 && chunk == 64) return column_product<Fp16Math, 64, 64, 32>(false, a, b, out);
  if (columns == 16 && chunk == 16) return column_product<Bf16Math, 16, 16, 48>(true, a, b, out);
  if (columns == 96 && chunk == 16) return column_product<Bf16Math, 96, 16, 48>(true, a, b, out);
  if (columns == 96 && chunk == 32) return column_product<Fp16Math, 96, 32, 32>(false, a, b, out);
  if (columns == 128 && chunk == 64) return column_product<Bf16Math, 128, 64, 64>(true, a, b, out);
  return cudaErrorInvalidValue;
}

}  // namespace vlmk
