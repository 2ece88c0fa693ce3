// What the kernels of tiled attention for compute capability 9.0 share: tiles as TMA brings them
// and wgmma reads them, the order of the work, tensor maps and launches.
//
// In shared memory a tile is chunks of kChunk columns, one TMA box each, swizzled as wgmma reads
// it. head_dim 72 and 80 are a chunk of 64 and a tail of 16, with a swizzle of its own and a
// product of its own: 96 columns in chunks of 32 would cost more products and shared memory, 80 in
// chunks of 16 would be one product, but TMA would bring 32 bytes at a time.
#pragma once

#include <atomic>

#include "cuda/attention/launch.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/attention/tile.cuh"
#include "cuda/ptx/sm90.cuh"

namespace vlmk {
namespace {

using ptx::kWarpgroupSize;

template <int kDim>
struct Sm90Row {
  static constexpr int kChunk = kDim == 96 ? 32 : 64;
  static constexpr int kChunks = kDim / kChunk;
  static constexpr int kBody = kChunks * kChunk;  // columns
  static constexpr int kTail = kBody < kDim ? 16 : 0;
  static constexpr int kWide = kBody + kTail;  // 72: what is missing arrives as zeros
  static constexpr int kRowBytes = kChunk * 2, kTailRowBytes = kTail * 2;
  static_assert(kDim <= kWide);
};
template <int kDim, int kRows>
struct Sm90Tile {
  static constexpr int kChunkBytes = kRows * Sm90Row<kDim>::kRowBytes;
  static constexpr int kTail = Sm90Row<kDim>::kChunks * kChunkBytes;  // where it begins
  static constexpr int kBytes = kRows * Sm90Row<kDim>::kWide * 2;
};

// Of a tensor [T, heads, D]: of a tile's chunks, and of its tail if it has one.
struct TensorMaps {
  CUtensorMap chunk, tail;
};

// A producer's warpgroup and two of 64 rows each.
struct Sm90Block {
  static constexpr int kConsumers = 2;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroupSize / kWarpSize;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupSize;
  // Of 168 a thread at the start, that is 65,536 an SM over 384 threads.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 3 * 168);
};

// The next stage of a ring, and the parity of its barriers' phase.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;  // mutant: sm90-advance-if-stage
  }
};

// A warp is done with a tile: its lanes meet, or those that still waited for a phase could be
// passed by two. Its products are over with its wait.
__device__ __forceinline__ void release(uint32_t empty) {
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) ptx::barrier_arrive(empty);  // mutant: sm90-release-if-lane
}

// A tile for one head. Length 0: no more work.
struct Item {
  Tile tile;
  int head;
};

// A dynamic tile scheduler: blocks take (tiles, heads) in the order of the list, by a counter that
// they share. Nothing is dealt out beforehand, so a block that starts late, because others' kernels
// hold its SM, takes less. One thread of a block takes an item for all; the others get it through
// shared memory. Launches on one list follow one another (launch.py keeps a list for one stream).
struct TileScheduler {
  static constexpr int kItemBytes = 32, kBytes = kItemBytes + 2 * 8;
  uint32_t base;

  __device__ __forceinline__ uint32_t full() const { return base + kItemBytes; }
  __device__ __forceinline__ uint32_t empty() const { return base + kItemBytes + 8; }
  // `takers`: warps that take().
  __device__ __forceinline__ void init(int takers) const {
    ptx::barrier_init(full(), 1);
    ptx::barrier_init(empty(), takers);  // mutant: sm90-scheduler-init
  }

  // The thread that takes items: tiles of queries, or of keys, each for `heads` heads.
  __device__ __forceinline__ Item next(const AttentionParams& p, bool of_keys, unsigned heads,
                                       uint32_t& parity) const {
    int32_t* const counts = tile_counts(p);
    // mutant: sm90-scheduler-items
    const unsigned items = static_cast<unsigned>(counts[1 + of_keys]) * heads;
    const unsigned index = static_cast<unsigned>(ptx::next_number(counts));
    if (index == items + gridDim.x - 1) {  // mutant: sm90-scheduler-if-last
      // Every block has taken one past the end: the next launch counts from 0.
      ptx::compare_and_swap(counts, static_cast<int>(index) + 1, 0);
    }
    Item item = {};
    if (index < items) {
      // mutant: sm90-scheduler-tiles
      const int32_t* tiles = p.tiles + (of_keys ? 4 * list_length(p) : 0);
      // mutant: sm90-scheduler-item
      item = {tile_at(tiles, index / heads), static_cast<int>(index % heads)};
    }
    ptx::barrier_wait(empty(), parity ^ 1);  // mutant: sm90-scheduler-wait-empty
    const Tile& tile = item.tile;
    ptx::store_shared(
        base, uint4{static_cast<uint32_t>(tile.begin), static_cast<uint32_t>(tile.length),
                    static_cast<uint32_t>(tile.first), static_cast<uint32_t>(tile.segment)});
    ptx::store_shared(base + 16, uint2{static_cast<uint32_t>(item.head), 0});
    ptx::barrier_arrive(full());
    parity ^= 1;
    return item;
  }
  // A thread that does nothing else.
  __device__ __forceinline__ void run(const AttentionParams& p, bool of_keys,
                                      unsigned heads) const {
    uint32_t parity = 0;
#pragma unroll 1
    while (next(p, of_keys, heads, parity).tile.length != 0) {
    }
  }
  // The others: what it took, for a warp ...
  __device__ __forceinline__ Item take(uint32_t& parity) const {
    const Item item = read(parity);
    release(empty());  // mutant: sm90-scheduler-release
    return item;
  }
  // ... and for a thread that is alone in its warp.
  __device__ __forceinline__ Item take_alone(uint32_t& parity) const {
    const Item item = read(parity);
    ptx::barrier_arrive(empty());
    return item;
  }

 private:
  __device__ __forceinline__ Item read(uint32_t& parity) const {
    ptx::barrier_wait(full(), parity);  // mutant: sm90-scheduler-wait-full
    parity ^= 1;
    const uint4 tile = ptx::load_shared(base);
    uint2 head;
    ptx::load_shared(base + 16, head);
    return {{static_cast<int>(tile.x), static_cast<int>(tile.y), static_cast<int>(tile.z),
             static_cast<int>(tile.w)},
            static_cast<int>(head.x)};
  }
};

// ---- rows that come and go

// Starts the copies of a tile, of which `full` already expects the bytes.
template <int kDim, int kRows>
__device__ __forceinline__ void load_boxes(uint32_t to, const TensorMaps* maps, uint32_t full,
                                           int head, int token) {
  using R = Sm90Row<kDim>;
  using T = Sm90Tile<kDim, kRows>;
#pragma unroll
  for (int c = 0; c < R::kChunks; ++c) {
    ptx::load_box(to + c * T::kChunkBytes, &maps->chunk, full, c * R::kChunk, head, token);
  }
  if constexpr (R::kTail > 0) {
    // mutant: sm90-load-box
    ptx::load_box(to + T::kTail, &maps->tail, full, R::kBody, head, token);
  }
}

// A warp overwrites the rows of a tile from `first` on with zeros. The swizzle stays inside a row.
template <int kDim, int kRows>
__device__ __forceinline__ void zero_rows(uint32_t tile, int first) {
  using R = Sm90Row<kDim>;
  using T = Sm90Tile<kDim, kRows>;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int at = first * R::kRowBytes + lane * 16; at < T::kChunkBytes; at += kWarpSize * 16) {
#pragma unroll
    for (int c = 0; c < R::kChunks; ++c) {
      ptx::store_shared(tile + c * T::kChunkBytes + at, uint4{0, 0, 0, 0});
    }
  }
#pragma unroll 1
  for (int at = T::kTail + first * R::kTailRowBytes + lane * 16; at < T::kBytes;
       at += kWarpSize * 16) {
    ptx::store_shared(tile + at, uint4{0, 0, 0, 0});  // mutant: sm90-zero-rows-store
  }
  ptx::fence_async_proxy();  // mutant: sm90-zero-rows-fence
}

// What the warps of a block do: each of the producer's warpgroup produce(warp), those of the other
// two consume(number of the warpgroup).
template <class Storage, class Produce, class Consume, class... Maps>
__device__ __forceinline__ void specialise(const Storage& storage, const Produce& produce,
                                           const Consume& consume, const Maps*... maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (threadIdx.x == 0) {
    (ptx::prefetch_map(&maps->chunk), ...);
    if constexpr (Storage::S::kTail > 0) (ptx::prefetch_map(&maps->tail), ...);
    storage.init();
  }
  __syncthreads();  // mutant: sm90-specialise-sync
  // The same in all lanes, and known to be.
  const int warp = ptx::broadcast(static_cast<int>(threadIdx.x / kWarpSize), 0);
  constexpr int kWarps = kWarpgroupSize / kWarpSize;
  if (warp < kWarps) {
    ptx::give_registers<Storage::S::kProducerRegisters>();  // mutant: sm90-specialise-registers
    produce(warp);
  } else {
    ptx::take_registers<Storage::S::kConsumerRegisters>();
    consume(warp / kWarps - 1);
  }
#else
  ptx::trap();  // the launcher asks for compute capability 9.0
#endif
}

// ---- products

// A result of wgmma in the form of mma.sync's: one block of 16 rows, of all or the first columns.
template <int kColumns, int kCount>
__device__ __forceinline__ auto& blocks_of(float (&c)[kCount]) {
  static_assert(kColumns / 2 <= kCount);
  return reinterpret_cast<float (&)[1][kColumns / 8][4]>(c);
}

// The tail of a tile whose rows are the depth.
template <int kDim, int kRows>
__device__ __forceinline__ uint64_t tail_columns(uint32_t tile) {
  constexpr int kRowBytes = Sm90Row<kDim>::kTailRowBytes;
  return ptx::matrix_descriptor<kRowBytes, 16, 8 * kRowBytes>(tile + Sm90Tile<kDim, kRows>::kTail);
}

// Starts c = a b^T, and ends the group: 64 rows of a tile of kRowsA, from row a_row on, and all of
// one of kRowsB.
template <class Math, int kDim, int kRowsA, int kRowsB>
__device__ __forceinline__ void start_rows(float (&c)[kRowsB / 2], uint32_t a_tile, int a_row,
                                           uint32_t b_tile) {
  using R = Sm90Row<kDim>;
  using A = Sm90Tile<kDim, kRowsA>;
  using B = Sm90Tile<kDim, kRowsB>;
  const uint32_t a_rows = a_tile + a_row * R::kRowBytes;  // mutant: sm90-start-rows-row
  // mutant: sm90-start-rows-a
  const uint64_t a = ptx::matrix_descriptor<R::kRowBytes, 16, 8 * R::kRowBytes>(a_rows);
  // mutant: sm90-start-rows-b
  const uint64_t b = ptx::matrix_descriptor<R::kRowBytes, 16, 8 * R::kRowBytes>(b_tile);
  ptx::wgmma_fence();  // mutant: sm90-start-rows-fence
#pragma unroll
  for (int d = 0; d < R::kBody / 16; ++d) {  // mutant: sm90-start-rows-loop-d
    const int chunk = d * 16 / R::kChunk, column = d * 16 % R::kChunk * 2;
    // mutant: sm90-start-rows-wgmma
    ptx::Wgmma<Math, kRowsB>::rows(c, a + (chunk * A::kChunkBytes + column) / 16,
                                   b + (chunk * B::kChunkBytes + column) / 16, d > 0);
  }
  if constexpr (R::kTail > 0) {
    constexpr int kRowBytes = R::kTailRowBytes;
    // mutant: sm90-start-rows-a-tail
    const uint32_t a_tail = a_tile + A::kTail + a_row * kRowBytes;
    const uint32_t b_tail = b_tile + B::kTail;  // mutant: sm90-start-rows-b-tail
    ptx::Wgmma<Math, kRowsB>::rows(c, ptx::matrix_descriptor<kRowBytes, 16, 8 * kRowBytes>(a_tail),
                                   ptx::matrix_descriptor<kRowBytes, 16, 8 * kRowBytes>(b_tail),
                                   true);  // mutant: sm90-start-rows-wgmma-tail
  }
  ptx::wgmma_commit();  // mutant: sm90-start-rows-commit
}

// Starts c += a b, and ends the group: b is a tile of kRows.
template <class Math, int kDim, int kRows>
__device__ __forceinline__ void start_columns(float (&c)[Sm90Row<kDim>::kWide / 2],
                                              const uint32_t (&a)[kRows / 16][4], uint32_t tile) {
  using R = Sm90Row<kDim>;
  using T = Sm90Tile<kDim, kRows>;
  const uint64_t b = ptx::matrix_descriptor<R::kRowBytes, T::kChunkBytes, 8 * R::kRowBytes>(tile);
  // mutant: sm90-start-columns-tail
  const uint64_t tail = tail_columns<kDim, kRows>(tile);
  ptx::wgmma_results(c);
  ptx::wgmma_fence();  // mutant: sm90-start-columns-fence
#pragma unroll
  for (int n = 0; n < kRows / 16; ++n) {
    // mutant: sm90-start-columns-wgmma
    ptx::Wgmma<Math, R::kBody>::columns(reinterpret_cast<float (&)[R::kBody / 2]>(c), a[n],
                                        b + n * R::kRowBytes);
    if constexpr (R::kTail > 0) {
      // mutant: sm90-start-columns-wgmma-tail
      ptx::Wgmma<Math, R::kTail>::columns(
          reinterpret_cast<float (&)[R::kTail / 2]>(c[R::kBody / 2]), a[n],
          tail + n * R::kTailRowBytes);
    }
  }
  ptx::wgmma_commit();
}

// A result as the left operands of start_columns.
template <class Math, int kColumns>
__device__ __forceinline__ void pack(uint32_t (&a)[kColumns / 16][4], float (&c)[kColumns / 2]) {
#pragma unroll
  for (int n = 0; n < kColumns / 16; ++n) {
    // mutant: sm90-pack
    as_operand<Math>(reinterpret_cast<uint32_t (&)[1][4]>(a[n]), blocks_of<kColumns>(c), n * 2);
  }
}

// A warp's rows of a gradient, times `factor`, from `token` on; rotated back if there is a table.
template <class Math, int kDim>
__device__ __forceinline__ void store_gradient(float (&c)[Sm90Row<kDim>::kWide / 2], float factor,
                                               uint32_t staging, int length, const HeadsView& to,
                                               int64_t token, int head, const float* table) {
  const float factors[1][2] = {{factor, factor}};
  if (table != nullptr) {
    store_rows_back<Math, kDim>(blocks_of<kDim>(c), factors, staging, length, to, token, head,
                                table);
  } else {
    store_rows<Math, kDim>(blocks_of<kDim>(c), factors, staging, length, to, token, head);
  }
}

// ---- launches

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// The driver's cuTensorMapEncodeTiled, found by the runtime, so that nothing links to libcuda.
inline cudaError_t find_encode(Encode* encode) {
  static std::atomic<Encode> known{nullptr};
  *encode = known.load();
  if (*encode != nullptr) return cudaSuccess;
  void* function;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
  *encode = reinterpret_cast<Encode>(function);
  known.store(*encode);
  return cudaSuccess;
}

// Multiprocessors of the current device.
inline cudaError_t find_processors(int* processors) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices]{};  // 0: not asked yet
  int device;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  const bool kept = device < kDevices;
  *processors = kept ? known[device].load() : 0;
  if (*processors != 0) return cudaSuccess;
  const cudaError_t error =
      cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess && kept) known[device].store(*processors);
  return error;
}

// Maps of x, [T, heads, kDim], in boxes of kRows tokens, a head and the columns of a chunk or tail.
template <int kDim, int kRows>
cudaError_t make_maps(TensorMaps* maps, DType dtype, const HeadsView& x, int64_t tokens,
                      int64_t heads) {
  using R = Sm90Row<kDim>;
  Encode encode;
  if (const cudaError_t error = find_encode(&encode)) return error;
  const CUtensorMapDataType type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  // A dimension of one element has any stride.
  const int64_t head_stride = heads == 1 ? kDim : x.head_stride;
  const int64_t token_stride = tokens == 1 ? kDim : x.token_stride;
  // mutant: sm90-make-map-sizes
  const cuuint64_t sizes[] = {kDim, cuuint64_t(heads), cuuint64_t(tokens)};
  // mutant: sm90-make-map-strides
  const cuuint64_t strides[] = {cuuint64_t(head_stride * 2), cuuint64_t(token_stride * 2)};
  const auto make = [&](CUtensorMap* map, int columns, CUtensorMapSwizzle swizzle) {
    const cuuint32_t box[] = {cuuint32_t(columns), 1, /* mutant: sm90-make-map-box */ kRows},
                     steps[] = {1, 1, 1};
    // The driver's error numbers are the runtime's.
    return static_cast<cudaError_t>(
        encode(map, type, 3, x.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  };
  // mutant: sm90-make-map
  const CUtensorMapSwizzle chunk =
      R::kChunk == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const cudaError_t error = make(&maps->chunk, R::kChunk, chunk);
  if (error != cudaSuccess || R::kTail == 0) return error;
  return make(&maps->tail, R::kTail, CU_TENSOR_MAP_SWIZZLE_32B);  // mutant: sm90-make-map-tail
}

// As many blocks as the device has multiprocessors, or fewer: of `items` each has at least one.
template <class... Params>
int launch_items(void (*kernel)(Params...), int64_t items, int shared, void* stream,
                 const Params&... params) {
  if (items > 0x7fffffff) return cudaErrorInvalidValue;
  int processors;
  if (const cudaError_t error = find_processors(&processors)) return error;
  return launch(kernel, items < processors ? items : processors, Sm90Block::kThreads, shared,
                stream, params...);  // mutant: sm90-launch-items
}

}  // namespace
}  // namespace vlmk
