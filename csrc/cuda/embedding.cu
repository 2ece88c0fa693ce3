// Visual embedding on CUDA: out rows gathered from two sources, and the two gradients.
//
// Floor: a forward reads and writes every owned row once, 2 * R * row_bytes, and 12 bytes of
// indices a row. Errors: an id or index out of range prints one line naming position, value and
// limit, then traps; the error is sticky, so the next synchronising call reports it and the process
// must be restarted. Nothing out of range is ever read.
#include <cuda_runtime.h>

#include <cstdio>

#include "cuda/embedding.h"
#include "cuda/primitives.cuh"
#include "params.h"

namespace vlmk {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * ptx::kWarpSize;
// One warp resolves 4 rows at once, so the chain index -> id -> address is paid once for the four.
constexpr int kRowsPerWarp = 4;
// 4 loads of 16 bytes a lane, 2 KB a warp: with 40 warps a SM, 80 KB in flight, where latency times
// bandwidth asks for about 20 KB (H200: 2.2 TB/s read, 1 us, 132 SMs). 8 would spill at 32
// registers.
constexpr int kUnroll = 4;

// The source of output row i: a base row, a visual row, or nullptr for a row of zeros.
template <class Unit>
struct EmbeddingSource {
  EmbeddingParams p;
  int64_t units;  // of a row

  __device__ __forceinline__ const Unit* operator()(int64_t i) const {
    const int64_t position = p.first + i;
    const int32_t index = p.visual_index[position];
    if (index >= 0) {
      if (p.visual_rows < 0) return nullptr;
      if (index >= p.visual_rows) {
        printf("vlmkernels.visual_embedding: visual_index[%lld] is %d, but visual has %lld rows\n",
               static_cast<long long>(position), index, static_cast<long long>(p.visual_rows));
        ptx::trap();
      }
      return static_cast<const Unit*>(p.visual) + index * units;
    }
    if (p.ids == nullptr) return static_cast<const Unit*>(p.table) + i * units;
    const int64_t id = p.ids[position];
    // Unsigned, so that an id below the range, however far, is above V too.
    const uint64_t row = static_cast<uint64_t>(id) - static_cast<uint64_t>(p.vocab_start);
    if (row >= static_cast<uint64_t>(p.vocab_rows)) {
      if (p.partial) return nullptr;
      printf("vlmkernels.visual_embedding: input_ids[%lld] is %lld, but weight has %lld rows\n",
             static_cast<long long>(position), static_cast<long long>(id),
             static_cast<long long>(p.vocab_rows));
      ptx::trap();
    }
    return static_cast<const Unit*>(p.table) + static_cast<int64_t>(row) * units;
  }
};

// The source of dvisual row r: the row of grad whose position named r, or nullptr for zeros.
template <class Unit>
struct GatherSource {
  EmbeddingGatherParams p;
  int64_t units;

  __device__ __forceinline__ const Unit* operator()(int64_t r) const {
    const int32_t row = p.inverse[r];
    return row < 0 ? nullptr : static_cast<const Unit*>(p.grad) + row * units;
  }
};

// out[i] = *source(i) for every row; one warp copies kRowsPerWarp consecutive rows.
template <class Unit, class Source>
__global__ void __launch_bounds__(kThreads)
    copy_rows(const Source source, Unit* __restrict__ out, const int64_t rows) {
  const int lane = threadIdx.x % ptx::kWarpSize;
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / ptx::kWarpSize) * kRowsPerWarp;
  const int64_t left = rows - first;
  if (left <= 0) return;  // the whole warp
  const int count = left < kRowsPerWarp ? static_cast<int>(left) : kRowsPerWarp;

  const Unit* mine = lane < count ? source(first + lane) : nullptr;
  const int units = static_cast<int>(source.units);
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    const Unit* from = ptx::broadcast(mine, k);
    Unit* to = out + (first + k) * units;
#pragma unroll 1
    for (int base = lane; base < units; base += ptx::kWarpSize * kUnroll) {
      Unit v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int c = base + u * ptx::kWarpSize;
        v[u] = ptx::load_once(from + c, from != nullptr && c < units);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int c = base + u * ptx::kWarpSize;
        ptx::store(to + c, v[u], c < units);
      }
    }
  }
}

// inverse[visual_index[first + i]] = i. The compare-and-swap finds a row named twice.
__global__ void __launch_bounds__(kThreads) invert_index(const EmbeddingGatherParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.rows) return;
  const int64_t position = p.first + i;
  const int32_t index = p.visual_index[position];
  if (index < 0) return;
  if (index >= p.visual_rows) {
    printf("vlmkernels.visual_embedding: visual_index[%lld] is %d, but visual has %lld rows\n",
           static_cast<long long>(position), index, static_cast<long long>(p.visual_rows));
    ptx::trap();
  }
  const int other = ptx::compare_and_swap(p.inverse + index, -1, static_cast<int>(i));
  if (other != -1) {
    printf("vlmkernels.visual_embedding: visual_index names row %d at positions %lld and %lld\n",
           index, static_cast<long long>(p.first + other), static_cast<long long>(position));
    ptx::trap();
  }
}

// A vector of kCount elements of one type, read and written in one access.
struct Fp32x4 {
  static constexpr int kCount = 4;
  using Unit = ptx::Unit16;
  static __device__ __forceinline__ void add(float (&sum)[4], const Unit& v) {
    sum[0] += __uint_as_float(v.x);
    sum[1] += __uint_as_float(v.y);
    sum[2] += __uint_as_float(v.z);
    sum[3] += __uint_as_float(v.w);
  }
  static __device__ __forceinline__ Unit pack(const float (&sum)[4]) {
    return {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
            __float_as_uint(sum[3])};
  }
};
struct Fp32x1 {
  static constexpr int kCount = 1;
  using Unit = ptx::Unit4;
  static __device__ __forceinline__ void add(float (&sum)[1], Unit v) {
    sum[0] += __uint_as_float(v);
  }
  static __device__ __forceinline__ Unit pack(const float (&sum)[1]) {
    return __float_as_uint(sum[0]);
  }
};
struct Bf16 {
  static __device__ __forceinline__ float to_float(uint16_t bits) { return ptx::from_bf16(bits); }
  static __device__ __forceinline__ uint16_t from_float(float v) { return ptx::to_bf16(v); }
};
struct Fp16 {
  static __device__ __forceinline__ float to_float(uint16_t bits) { return ptx::from_fp16(bits); }
  static __device__ __forceinline__ uint16_t from_float(float v) { return ptx::to_fp16(v); }
};
template <class Half>
struct Halfx8 {
  static constexpr int kCount = 8;
  using Unit = ptx::Unit16;
  static __device__ __forceinline__ void add(float (&sum)[8], const Unit& v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      sum[2 * w] += Half::to_float(static_cast<uint16_t>(words[w]));
      sum[2 * w + 1] += Half::to_float(static_cast<uint16_t>(words[w] >> 16));
    }
  }
  static __device__ __forceinline__ Unit pack(const float (&sum)[8]) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w)
      words[w] = static_cast<uint32_t>(Half::from_float(sum[2 * w])) |
                 static_cast<uint32_t>(Half::from_float(sum[2 * w + 1])) << 16;
    return {words[0], words[1], words[2], words[3]};
  }
};
template <class Half>
struct Halfx1 {
  static constexpr int kCount = 1;
  using Unit = ptx::Unit2;
  static __device__ __forceinline__ void add(float (&sum)[1], Unit v) {
    sum[0] += Half::to_float(v);
  }
  static __device__ __forceinline__ Unit pack(const float (&sum)[1]) {
    return Half::from_float(sum[0]);
  }
};

// dweight[key] = sum of the run of rows with that key. Block (j, y): the run that starts at entry
// j, if one does, and the y-th tile of columns. Rows are added one after another in their order in
// fp32, so the result has one value whatever the grid; 4 rows are in flight.
template <class Vec>
__global__ void __launch_bounds__(kThreads) reduce_runs(const EmbeddingReduceParams p) {
  constexpr int kInFlight = 4;
  using Unit = typename Vec::Unit;
  const int64_t j = blockIdx.x;
  const int64_t key = p.keys[j];
  if (key >= p.vocab_rows || (j > 0 && p.keys[j - 1] == key)) return;
  const int64_t units = p.hidden / Vec::kCount;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (column >= units) return;

  const Unit* grad = static_cast<const Unit*>(p.grad) + column;
  float sum[Vec::kCount] = {};
  int live = kInFlight;
  for (int64_t k = j; live == kInFlight; k += kInFlight) {
    Unit v[kInFlight];
    live = 0;
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const bool same = live == u && k + u < p.count && p.keys[k + u] == key;
      v[u] = ptx::load_once(grad + (same ? p.order[k + u] : 0) * units, same);
      live += same;
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (u < live) Vec::add(sum, v[u]);
  }
  ptx::store(static_cast<Unit*>(p.dweight) + key * units + column, Vec::pack(sum), true);
}

// The largest unit that every row start is aligned to: 16, 4 or 2 bytes.
int access_bytes(int64_t row_bytes, const void* a, const void* b, const void* c) {
  const uint64_t bits = static_cast<uint64_t>(row_bytes) | reinterpret_cast<uintptr_t>(a) |
                        reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(c);
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 2;
}

unsigned blocks(int64_t work, int64_t per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}

template <class Unit, template <class> class Source, class Params>
void launch_copy(const Params& p, void* out, int64_t rows, cudaStream_t stream) {
  if (rows == 0) return;
  const Source<Unit> source{p, p.row_bytes / static_cast<int64_t>(sizeof(Unit))};
  copy_rows<Unit><<<blocks(rows, kWarps * kRowsPerWarp), kThreads, 0, stream>>>(
      source, static_cast<Unit*>(out), rows);
}

template <template <class> class Source, class Params>
void launch_copy(const Params& p, int unit, void* out, int64_t rows, cudaStream_t stream) {
  if (unit == 16)
    launch_copy<ptx::Unit16, Source>(p, out, rows, stream);
  else if (unit == 4)
    launch_copy<ptx::Unit4, Source>(p, out, rows, stream);
  else
    launch_copy<ptx::Unit2, Source>(p, out, rows, stream);
}

template <class Vec>
void launch_reduce(const EmbeddingReduceParams& p, cudaStream_t stream) {
  const dim3 grid(blocks(p.count, 1), blocks(p.hidden / Vec::kCount, kThreads));
  reduce_runs<Vec><<<grid, kThreads, 0, stream>>>(p);
}

}  // namespace

int embedding_forward_cuda(const EmbeddingParams& p, void* stream) {
  if (p.rows == 0) return cudaSuccess;
  const int unit = access_bytes(p.row_bytes, p.table, p.visual, p.out);
  launch_copy<EmbeddingSource>(p, unit, p.out, p.rows, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int embedding_gather_cuda(const EmbeddingGatherParams& p, void* stream) {
  if (p.rows == 0 && p.visual_rows == 0) return cudaSuccess;
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.rows > 0) invert_index<<<blocks(p.rows, kThreads), kThreads, 0, s>>>(p);
  const int unit = access_bytes(p.row_bytes, p.grad, p.dvisual, nullptr);
  launch_copy<GatherSource>(p, unit, p.dvisual, p.visual_rows, s);
  return cudaGetLastError();
}

int embedding_reduce_cuda(const EmbeddingReduceParams& p, void* stream) {
  if (p.count == 0 || p.hidden == 0) return cudaSuccess;
  const auto s = static_cast<cudaStream_t>(stream);
  const int64_t element = p.dtype == DType::kFloat32 ? 4 : 2;
  const bool wide = access_bytes(p.hidden * element, p.grad, p.dweight, nullptr) == 16;
  if (p.dtype == DType::kFloat32)
    wide ? launch_reduce<Fp32x4>(p, s) : launch_reduce<Fp32x1>(p, s);
  else if (p.dtype == DType::kBFloat16)
    wide ? launch_reduce<Halfx8<Bf16>>(p, s) : launch_reduce<Halfx1<Bf16>>(p, s);
  else
    wide ? launch_reduce<Halfx8<Fp16>>(p, s) : launch_reduce<Halfx1<Fp16>>(p, s);
  return cudaGetLastError();
}

}  // namespace vlmk
