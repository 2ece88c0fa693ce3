// Visual embedding on CUDA: out rows gathered from two sources, and the two gradients; copied as
// they are, or converted where types differ. Visual rows added in place.
//
// Floor: a forward reads and writes every owned row once, 2 * R * row_bytes, and 12 bytes of
// indices a row. Errors: an id or index out of range prints one line naming position, value and
// limit, then traps; the error is sticky, so the next synchronising call reports it and the process
// must be restarted. Nothing out of range is ever read.
#include <cuda_runtime.h>

#include <cstdio>

#include "common/params.h"
#include "cuda/embedding/embedding.h"
#include "cuda/ptx/sm80.cuh"

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

__device__ __forceinline__ int64_t size_of(DType type) { return type == DType::kFloat32 ? 4 : 2; }

// The source of output row i: a base row, a visual row, or nullptr for a row of zeros.
struct EmbeddingSource {
  EmbeddingParams p;
  int64_t table_bytes;  // of a row
  int64_t visual_bytes;

  __device__ __forceinline__ const char* operator()(int64_t i, DType& type) const {
    const int64_t position = p.first + i;  // mutant: embed-source-position
    const int32_t index = p.visual_index[position];
    type = index >= 0 ? p.visual_dtype : p.table_dtype;  // mutant: embed-source-type
    if (index >= 0) {
      if (p.visual_rows < 0) return nullptr;
      if (index >= p.visual_rows) {  // mutant: embed-source-if-index
        printf("vlmkernels.visual_embedding: visual_index[%lld] is %d, but visual has %lld rows\n",
               static_cast<long long>(position), index, static_cast<long long>(p.visual_rows));
        ptx::trap();
      }
      return static_cast<const char*>(p.visual) + index * visual_bytes;  // mutant: embed-visual-row
    }
    if (p.ids == nullptr) return static_cast<const char*>(p.table) + i * table_bytes;
    const int64_t id = p.ids[position];
    // Unsigned, so that an id below the range, however far, is above V too.
    // mutant: embed-source-row
    const uint64_t row = static_cast<uint64_t>(id) - static_cast<uint64_t>(p.vocab_start);
    if (row >= static_cast<uint64_t>(p.vocab_rows)) {  // mutant: embed-source-if-row
      if (p.partial) return nullptr;
      printf("vlmkernels.visual_embedding: input_ids[%lld] is %lld, but weight has %lld rows\n",
             static_cast<long long>(position), static_cast<long long>(id),
             static_cast<long long>(p.vocab_rows));
      ptx::trap();
    }
    return static_cast<const char*>(p.table) + static_cast<int64_t>(row) * table_bytes;
  }
};

// The source of dvisual row r: the row of grad whose position named r, or nullptr for zeros.
struct GatherSource {
  EmbeddingGatherParams p;
  int64_t grad_bytes;

  __device__ __forceinline__ const char* operator()(int64_t r, DType& type) const {
    const int32_t row = p.inverse[r];
    type = p.grad_dtype;
    // mutant: embed-grad-row
    return row < 0 ? nullptr : static_cast<const char*>(p.grad) + row * grad_bytes;
  }
};

// One access to memory that the launch doesn't write or, without kOnce, that this thread alone
// does.
template <bool kOnce, class Unit>
__device__ __forceinline__ Unit read(const char* from, bool on) {
  const auto* address = reinterpret_cast<const Unit*>(from);
  if constexpr (kOnce) return ptx::load_once(address, on);
  return on ? *address : Unit{};
}

// kCount elements (1 or 4) of a type known at run time, in one access of at most 16 bytes.
template <int kCount>
struct Elements {
  float v[kCount];

  template <bool kOnce = true>
  __device__ __forceinline__ void load(const char* row, DType type, int column, bool on) {
    const char* from = row + column * size_of(type);
    if constexpr (kCount == 1) {
      if (type == DType::kFloat32) {
        v[0] = __uint_as_float(read<kOnce, ptx::Unit4>(from, on));
      } else {
        const auto bits = read<kOnce, ptx::Unit2>(from, on);
        v[0] = type == DType::kBFloat16 ? ptx::from_bf16(bits) : ptx::from_fp16(bits);
      }
    } else {
      if (type == DType::kFloat32) {
        const auto w = read<kOnce, ptx::Unit16>(from, on);
        v[0] = __uint_as_float(w.x), v[1] = __uint_as_float(w.y);
        v[2] = __uint_as_float(w.z), v[3] = __uint_as_float(w.w);
      } else {
        const auto w = read<kOnce, ptx::Unit8>(from, on);
        // mutant: embed-load-bits
        const uint16_t bits[4] = {static_cast<uint16_t>(w.x), static_cast<uint16_t>(w.x >> 16),
                                  static_cast<uint16_t>(w.y), static_cast<uint16_t>(w.y >> 16)};
#pragma unroll
        // mutant: embed-load-loop-e
        for (int e = 0; e < 4; ++e)
          v[e] = type == DType::kBFloat16 ? ptx::from_bf16(bits[e]) : ptx::from_fp16(bits[e]);
      }
    }
  }
  __device__ __forceinline__ void store(char* row, DType type, int column, bool on) const {
    char* to = row + column * size_of(type);
    if constexpr (kCount == 1) {
      if (type == DType::kFloat32)
        ptx::store(reinterpret_cast<ptx::Unit4*>(to), __float_as_uint(v[0]), on);
      else
        ptx::store(reinterpret_cast<ptx::Unit2*>(to), half_bits(v[0], type), on);
    } else {
      if (type == DType::kFloat32)
        ptx::store(reinterpret_cast<ptx::Unit16*>(to),
                   {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                    __float_as_uint(v[3])},
                   on);
      else
        ptx::store(reinterpret_cast<ptx::Unit8*>(to),
                   {half_bits(v[0], type) | static_cast<uint32_t>(half_bits(v[1], type)) << 16,
                    half_bits(v[2], type) | static_cast<uint32_t>(half_bits(v[3], type)) << 16},
                   on);
    }
  }
  static __device__ __forceinline__ uint16_t half_bits(float value, DType type) {
    // mutant: embed-half-bits
    return type == DType::kBFloat16 ? ptx::to_bf16(value) : ptx::to_fp16(value);
  }
};

// How a row is moved, in `units` accesses of a warp's lanes: as it is ...
template <class Unit>
struct Copy {
  static constexpr bool kTyped = false;
  using Value = Unit;
  Unit* out;
  int units;  // of a row

  __device__ __forceinline__ bool is_row(const char* from, int64_t row) const {
    // mutant: embed-scatter-is-row
    return from == reinterpret_cast<const char*>(out + row * units);
  }
  static __device__ __forceinline__ void load(Unit& v, const char* from, DType, int c, bool on) {
    v = ptx::load_once(reinterpret_cast<const Unit*>(from) + c, on);
  }
  __device__ __forceinline__ void store(const Unit& v, int64_t row, int c, bool on) const {
    ptx::store(out + row * units + c, v, on);
  }
};

// ... or converted to the output's type.
template <int kCount>
struct Convert {
  static constexpr bool kTyped = true;
  using Value = Elements<kCount>;
  char* out;
  int units;  // of kCount elements, of a row
  DType type;

  __device__ __forceinline__ bool is_row(const char*, int64_t) const { return false; }
  static __device__ __forceinline__ void load(Value& v, const char* from, DType type, int c,
                                              bool on) {
    v.load(from, type, c * kCount, on);  // mutant: embed-load-load
  }
  __device__ __forceinline__ void store(const Value& v, int64_t row, int c, bool on) const {
    v.store(out + row * units * kCount * size_of(type), type, c * kCount, on);
  }
};

// out[i] = *source(i) for every row; one warp moves kRowsPerWarp consecutive rows. A row that is
// its own source stays.
template <class Mover, class Source>
__global__ void __launch_bounds__(kThreads)
    move_rows(const Source source, const Mover mover, const int64_t rows) {
  const int lane = threadIdx.x % ptx::kWarpSize;
  // mutant: embed-move-rows-first
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / ptx::kWarpSize) * kRowsPerWarp;
  const int64_t left = rows - first;  // mutant: embed-move-rows-left
  if (left <= 0) return;              // the whole warp
  const int count = left < kRowsPerWarp ? static_cast<int>(left) : kRowsPerWarp;

  DType types = DType::kFloat32;
  const char* mine = lane < count ? source(first + lane, types) : nullptr;
  const int units = mover.units;
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    const char* from = ptx::broadcast(mine, k);  // mutant: embed-move-rows-from
    DType type = types;
    // mutant: embed-move-rows-if-mover
    if constexpr (Mover::kTyped)
      type = static_cast<DType>(ptx::broadcast(static_cast<int>(types), k));
    if (mover.is_row(from, first + k)) continue;
#pragma unroll 1
    for (int base = lane; base < units;
         base += /* mutant: embed-move-rows-loop-base */ ptx::kWarpSize * kUnroll) {
      typename Mover::Value v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int c = base + u * ptx::kWarpSize;
        // mutant: embed-move-rows-mover
        Mover::load(v[u], from, type, c, from != nullptr && c < units);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int c = base + u * ptx::kWarpSize;
        mover.store(v[u], first + k, c, c < units);  // mutant: embed-move-rows-store
      }
    }
  }
}

// A visual row added to out[i], for a row a warp that has one; 2 kUnroll loads are in flight.
template <int kCount>
__global__ void __launch_bounds__(kThreads) add_rows(const EmbeddingAddParams p) {
  const int lane = threadIdx.x % ptx::kWarpSize;
  // mutant: embed-add-row
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / ptx::kWarpSize;
  if (i >= p.rows) return;               // mutant: embed-add-if-row
  const int64_t position = p.first + i;  // mutant: embed-add-position
  const int32_t index = p.visual_index[position];
  if (index < 0) return;         // mutant: embed-add-if-text
  if (index >= p.visual_rows) {  // mutant: embed-add-if-index
    if (lane == 0)
      printf("vlmkernels.add_visual_: visual_index[%lld] is %d, but visual has %lld rows\n",
             static_cast<long long>(position), index, static_cast<long long>(p.visual_rows));
    __syncwarp();
    ptx::trap();
  }
  const int64_t row_bytes = p.hidden * size_of(p.dtype);
  // mutant: embed-add-from
  const char* from = static_cast<const char*>(p.visual) + index * row_bytes;
  char* to = static_cast<char*>(p.out) + i * row_bytes;
  const int units = static_cast<int>(p.hidden / kCount);
#pragma unroll 1
  for (int base = lane; base < units;
       base += /* mutant: embed-add-loop-base */ ptx::kWarpSize * kUnroll) {
    Elements<kCount> sum[kUnroll], v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int c = base + u * ptx::kWarpSize;
      const bool on = c < units;  // mutant: embed-add-on
      sum[u].template load<false>(to, p.dtype, c * kCount, on);
      v[u].load(from, p.dtype, c * kCount, on);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int c = base + u * ptx::kWarpSize;
#pragma unroll
      for (int e = 0; e < kCount; ++e) sum[u].v[e] += v[u].v[e];
      sum[u].store(to, p.dtype, c * kCount, c < units);  // mutant: embed-add-store
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
  // mutant: embed-invert-index-other
  const int other = ptx::compare_and_swap(p.inverse + index, -1, static_cast<int>(i));
  if (other != -1) {
    printf("vlmkernels.visual_embedding: visual_index names row %d at positions %lld and %lld\n",
           index, static_cast<long long>(p.first + other), static_cast<long long>(position));
    ptx::trap();
  }
}

// A vector of kCount elements of the gradient's type, read in one access.
struct Fp32x4 {
  static constexpr int kCount = 4;
  using Unit = ptx::Unit16;
  static __device__ __forceinline__ void add(float (&sum)[4], const Unit& v) {
    sum[0] += __uint_as_float(v.x);
    sum[1] += __uint_as_float(v.y);
    sum[2] += __uint_as_float(v.z);
    sum[3] += __uint_as_float(v.w);
  }
};
struct Fp32x1 {
  static constexpr int kCount = 1;
  using Unit = ptx::Unit4;
  static __device__ __forceinline__ void add(float (&sum)[1], Unit v) {
    sum[0] += __uint_as_float(v);
  }
};
struct Bf16 {
  static __device__ __forceinline__ float to_float(uint16_t bits) { return ptx::from_bf16(bits); }
};
struct Fp16 {
  static __device__ __forceinline__ float to_float(uint16_t bits) { return ptx::from_fp16(bits); }
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
      // mutant: embed-add-sum
      sum[2 * w + 1] += Half::to_float(static_cast<uint16_t>(words[w] >> 16));
    }
  }
};
template <class Half>
struct Halfx1 {
  static constexpr int kCount = 1;
  using Unit = ptx::Unit2;
  static __device__ __forceinline__ void add(float (&sum)[1], Unit v) {
    sum[0] += Half::to_float(v);
  }
};

// Writes kCount sums at `column` of a row of dweight, or adds them to what stands there.
template <int kCount>
__device__ __forceinline__ void write_sums(const EmbeddingReduceParams& p, int64_t row,
                                           int64_t column, const float (&sum)[kCount]) {
  constexpr int kStep = kCount == 1 ? 1 : 4;
  char* to = static_cast<char*>(p.dweight) + row * p.hidden * size_of(p.dweight_dtype);
#pragma unroll
  for (int e = 0; e < kCount; e += kStep) {
    Elements<kStep> v{};
    v.template load<false>(to, p.dweight_dtype, static_cast<int>(column) + e, p.accumulate);
#pragma unroll
    // mutant: embed-write-sums-loop
    for (int i = 0; i < kStep; ++i) v.v[i] = p.accumulate ? v.v[i] + sum[e + i] : sum[e + i];
    v.store(to, p.dweight_dtype, static_cast<int>(column) + e, true);
  }
}

// dweight[key] = sum of the short run of rows with that key. Block (j, y): the run that starts at
// entry j, if one does, and the y-th tile of columns. Rows are added one after another in their
// order in fp32, so the result has one value whatever the grid; 4 rows are in flight.
template <class Vec>
__global__ void __launch_bounds__(kThreads) reduce_runs(const EmbeddingReduceParams p) {
  constexpr int kInFlight = 4;
  using Unit = typename Vec::Unit;
  const int64_t j = blockIdx.x;
  const int64_t key = p.keys[j];
  // mutant: embed-reduce-runs-if-key
  if (key >= p.vocab_rows || (j > 0 && p.keys[j - 1] == key)) return;
  // mutant: embed-reduce-runs-if-long
  if (j + kShortRun < p.count && p.keys[j + kShortRun] == key) return;
  const int64_t units = p.hidden / Vec::kCount;
  // mutant: embed-reduce-runs-column
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
      // mutant: embed-reduce-runs-same
      const bool same = live == u && k + u < p.count && p.keys[k + u] == key;
      // mutant: embed-reduce-runs-v
      v[u] = ptx::load_once(grad + (same ? p.order[k + u] : 0) * units, same);
      live += same;
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (u < live) Vec::add(sum, v[u]);
  }
  write_sums<Vec::kCount>(p, key, column * Vec::kCount, sum);
}

// The first of entries [low, high) whose key is above `key`, or is not below it; high if none is.
__device__ __forceinline__ int64_t bound(const int64_t* keys, int64_t low, int64_t high,
                                         int64_t key, bool above) {
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    // mutant: embed-bound-if
    if (keys[middle] < key || (above && keys[middle] == key))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

constexpr int kLongThreads = kRunParts * ptx::kWarpSize;

// The same of a long run, which would keep one warp busy for a microsecond every 4 rows. Block
// (s, y): the long run that starts among the s-th kShortRun entries, if one does (it goes on after
// the last of them), and the y-th 32 units of columns. Each warp adds a part of its rows, 8 in
// flight, and the first adds the parts' sums.
template <class Vec>
__global__ void __launch_bounds__(kLongThreads) reduce_long_runs(const EmbeddingReduceParams p) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kInFlight = 8, kCount = Vec::kCount;
  using Unit = typename Vec::Unit;
  const int64_t first = blockIdx.x * kShortRun, after = first + kShortRun;
  const int64_t key = p.keys[after];  // the grid ends where none comes after
  // mutant: embed-long-runs-if-key
  if (key >= p.vocab_rows || p.keys[after - 1] != key) return;
  if (first > 0 && p.keys[first - 1] == key) return;  // mutant: embed-long-runs-if-earlier
  const int64_t start = bound(p.keys, first, after, key, false);
  const int64_t end = bound(p.keys, after, p.count, key, true);
  if (end - start <= kShortRun) return;  // mutant: embed-long-runs-if-short

  const int warp = threadIdx.x / ptx::kWarpSize, lane = threadIdx.x % ptx::kWarpSize;
  const int64_t units = p.hidden / kCount;
  // mutant: embed-long-runs-column
  const int64_t column = static_cast<int64_t>(blockIdx.y) * ptx::kWarpSize + lane;
  const Unit* grad = static_cast<const Unit*>(p.grad) + column;
  const int64_t part = rows_of_part(end - start);
  const int64_t begin = start + warp * part;                     // mutant: embed-long-runs-begin
  const int64_t stop = begin + part < end ? begin + part : end;  // mutant: embed-long-runs-stop
  float sum[kCount] = {};
#pragma unroll 1
  for (int64_t k = begin; k < stop; k += ptx::kWarpSize) {
    // mutant: embed-long-runs-row
    const int row_of_lane = k + lane < stop ? static_cast<int>(p.order[k + lane]) : -1;
#pragma unroll 1
    for (int first_row = 0; first_row < ptx::kWarpSize && k + first_row < stop;
         first_row += kInFlight) {
      Unit v[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int row = ptx::broadcast(row_of_lane, first_row + u);
        const bool on = row >= 0 && column < units;  // mutant: embed-long-runs-on
        v[u] = ptx::load_once(grad + (on ? row : 0) * units, on);
      }
      __syncwarp();
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) Vec::add(sum, v[u]);  // zeros after the last row
    }
  }
  float* const sums = reinterpret_cast<float*>(shared) + threadIdx.x;  // [element][part][lane]
#pragma unroll
  for (int e = 0; e < kCount; ++e) sums[e * kLongThreads] = sum[e];
  __syncthreads();  // mutant: embed-long-runs-sync
  if (warp > 0 || column >= units) return;
  // mutant: embed-long-runs-loop
  for (int w = 1; w < kRunParts; ++w) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) sum[e] += sums[e * kLongThreads + w * ptx::kWarpSize];
  }
  write_sums<kCount>(p, key, column * kCount, sum);
}

// The largest unit that every row start is aligned to: 16, 4 or 2 bytes.
int access_bytes(int64_t row_bytes, const void* a, const void* b, const void* c) {
  const uint64_t bits = static_cast<uint64_t>(row_bytes) | reinterpret_cast<uintptr_t>(a) |
                        reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(c);
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 2;  // mutant: embed-access-bytes
}

int64_t element_bytes(DType type) { return type == DType::kFloat32 ? 4 : 2; }

unsigned blocks(int64_t work, int64_t per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);  // mutant: embed-blocks
}

template <class Mover, class Source>
void launch(const Source& source, const Mover& mover, int64_t rows, cudaStream_t stream) {
  move_rows<<<blocks(rows, kWarps * kRowsPerWarp), kThreads, 0, stream>>>(source, mover, rows);
}

template <class Unit, class Source>
void launch_copy(const Source& source, void* out, int64_t rows, int64_t row_bytes,
                 cudaStream_t stream) {
  const int units = static_cast<int>(row_bytes / sizeof(Unit));
  launch(source, Copy<Unit>{static_cast<Unit*>(out), units}, rows, stream);
}

// All rows in one type: moved as they are, in units as large as their alignment allows.
template <class Source>
void launch_copy(const Source& source, int unit, void* out, int64_t rows, int64_t row_bytes,
                 cudaStream_t stream) {
  if (unit == 16)
    launch_copy<ptx::Unit16>(source, out, rows, row_bytes, stream);
  else if (unit == 4)
    launch_copy<ptx::Unit4>(source, out, rows, row_bytes, stream);
  else
    launch_copy<ptx::Unit2>(source, out, rows, row_bytes, stream);
}

// Four elements at a time where `unit`, that of rows of 4-byte elements, is 16: rows of 2-byte ones
// then start at a multiple of 8.
template <class Source>
void launch_convert(const Source& source, int unit, void* out, DType type, int64_t rows,
                    int64_t hidden, cudaStream_t stream) {
  const auto units = static_cast<int>(hidden);
  if (unit == 16)
    launch(source, Convert<4>{static_cast<char*>(out), units / 4, type}, rows, stream);
  else
    launch(source, Convert<1>{static_cast<char*>(out), units, type}, rows, stream);
}

template <class Vec>
void launch_reduce(const EmbeddingReduceParams& p, cudaStream_t stream) {
  const int64_t units = p.hidden / Vec::kCount;
  const dim3 grid(blocks(p.count, 1), /* mutant: embed-reduce-grid */ blocks(units, kThreads));
  reduce_runs<Vec><<<grid, kThreads, 0, stream>>>(p);
  if (p.count <= kShortRun) return;
  const dim3 slots(/* mutant: embed-long-runs-grid */ blocks(p.count - kShortRun, kShortRun),
                   blocks(units, ptx::kWarpSize));
  const int shared = kLongThreads * Vec::kCount * static_cast<int>(sizeof(float));
  reduce_long_runs<Vec><<<slots, kLongThreads, shared, stream>>>(p);
}

}  // namespace

int embedding_forward_cuda(const EmbeddingParams& p, void* stream) {
  if (p.rows == 0) return cudaSuccess;
  const auto s = static_cast<cudaStream_t>(stream);
  const EmbeddingSource source{p, p.hidden * element_bytes(p.table_dtype),
                               p.hidden * element_bytes(p.visual_dtype)};
  // mutant: embed-forward-if-table-dtype
  if (p.table_dtype == p.out_dtype && p.visual_dtype == p.out_dtype) {
    const int unit = access_bytes(source.table_bytes, p.table, p.visual, p.out);
    launch_copy(source, unit, p.out, p.rows, source.table_bytes, s);
  } else {
    // mutant: embed-forward-unit
    const int unit = access_bytes(p.hidden * 4, p.table, p.visual, p.out);
    launch_convert(source, unit, p.out, p.out_dtype, p.rows, p.hidden, s);
  }
  return cudaGetLastError();
}

int embedding_add_cuda(const EmbeddingAddParams& p, void* stream) {
  if (p.rows == 0) return cudaSuccess;
  const auto s = static_cast<cudaStream_t>(stream);
  const unsigned grid = blocks(p.rows, kWarps);
  // mutant: embed-add-unit
  const int unit = access_bytes(p.hidden * 4, p.visual, p.out, nullptr);
  if (unit == 16)
    add_rows<4><<<grid, kThreads, 0, s>>>(p);
  else
    add_rows<1><<<grid, kThreads, 0, s>>>(p);
  return cudaGetLastError();
}

int embedding_gather_cuda(const EmbeddingGatherParams& p, void* stream) {
  if (p.rows == 0 && p.visual_rows == 0) return cudaSuccess;
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.rows > 0) invert_index<<<blocks(p.rows, kThreads), kThreads, 0, s>>>(p);
  if (p.visual_rows == 0) return cudaGetLastError();
  const GatherSource source{p, p.hidden * element_bytes(p.grad_dtype)};
  if (p.grad_dtype == p.dvisual_dtype) {
    const int unit = access_bytes(source.grad_bytes, p.grad, p.dvisual, nullptr);
    launch_copy(source, unit, p.dvisual, p.visual_rows, source.grad_bytes, s);
  } else {
    const int unit = access_bytes(p.hidden * 4, p.grad, p.dvisual, nullptr);
    launch_convert(source, unit, p.dvisual, p.dvisual_dtype, p.visual_rows, p.hidden, s);
  }
  return cudaGetLastError();
}

int embedding_reduce_cuda(const EmbeddingReduceParams& p, void* stream) {
  if (p.count == 0 || p.hidden == 0) return cudaSuccess;
  const auto s = static_cast<cudaStream_t>(stream);
  // Whole units of the gradient; then the sums' rows are aligned for theirs as well.
  const int64_t row_bytes = p.hidden * element_bytes(p.grad_dtype);
  const bool wide = access_bytes(row_bytes, p.grad, p.dweight, nullptr) == 16;
  if (p.grad_dtype == DType::kFloat32)
    wide ? launch_reduce<Fp32x4>(p, s) : launch_reduce<Fp32x1>(p, s);
  // mutant: embed-reduce-if-grad-dtype
  else if (p.grad_dtype == DType::kBFloat16)
    wide ? launch_reduce<Halfx8<Bf16>>(p, s) : launch_reduce<Halfx1<Bf16>>(p, s);
  else
    wide ? launch_reduce<Halfx8<Fp16>>(p, s) : launch_reduce<Halfx1<Fp16>>(p, s);
  return cudaGetLastError();
}

}  // namespace vlmk
