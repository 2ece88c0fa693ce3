// Attention inside segments of any length on Hopper's tensor cores: the backward by one kernel, for
// compute capability 9.0. Results as backward.cu's, deterministic.
//
// `backward_preprocess`, then `sm90_backward_fused` for dk, dv and dq, then `sm90_backward_sum`,
// which writes dq. A block keeps K and V of 128 keys and one key/value head in shared memory, and
// 64 queries and their dO stream past it a step, as in sm90_backward_dkdv, which this is with one
// product more: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, and dQ = dS K of the step,
// for which both warpgroups' dS^T goes through shared memory. 10 L^2 D FLOPs a head in place of 14.
//
// dq of a step is the sum of what all tiles of keys find. Each adds its part to fp32 numbers in
// global memory in the order of the keys: it waits until as many parts are there as tiles come
// before it. So the same bits come out every time, and the first one stores.
//
// Why nobody waits for ever: a tile waits for earlier ones of its segment and head only, tiles are
// listed in that order (schedule.cu), and blocks take them in the order of the list by a counter.
// The first tile that is not done waits for nothing, and its block works on it, whichever blocks
// the device has room for.
//
// The work of a step's warpgroups: dS into shared memory between two named barriers; the first
// warpgroup computes 64 columns of dQ, the second the rest; accumulators go to shared memory as the
// threads hold them, and from there by one bulk copy of a fourth warp of the producer's.
// A warpgroup whose keys are past the segment's end, or later than the step's queries, computes all
// the same: its dS are zeros.
//
// Floor a step, in cycles at 2,048 multiply-adds a cycle and SM: 20 D, 1,600 at 80 in
// place of 2,240; exponentials 512. To L2 256 D bytes a step, added.
#include "cuda/attention/attention.h"
#include "cuda/attention/sm80/backward.cuh"
#include "cuda/attention/sm90/common.cuh"

namespace vlmk {
namespace {

template <int kDim>
struct FusedShape : Sm90Block, Sm90Row<kDim> {
  // dQ runs beside the next step's scores, and dS is of P as fp32, where there are registers for
  // it.
  static constexpr bool kOverlap = Sm90Row<kDim>::kWide <= 96;
  static constexpr int kProducerRegisters = 32, kConsumerRegisters = 232;
  static constexpr int kStep = kDqRows;  // queries
  static constexpr int kResidentBytes = Sm90Tile<kDim, kTileRows>::kBytes;
  static constexpr int kStreamBytes = Sm90Tile<kDim, kStep>::kBytes;
  static constexpr int kStages = Sm90Row<kDim>::kWide <= 96 ? 4 : 3;
  // Parts of dq of a step: columns of the first warpgroup and of the second, and 16 bytes a thread
  // for each 8 columns.
  static constexpr int kFirst = 64, kSecond = Sm90Row<kDim>::kWide - kFirst;
  static constexpr int kUnitBytes = kWarpgroupSize * 16;
  static constexpr int kPartBytes = kDim / 8 * kUnitBytes;
  static constexpr int kParts = Sm90Row<kDim>::kWide <= 96 ? 2 : 1;  // in shared memory

  static constexpr int kStreams = 2 * kResidentBytes;
  static constexpr int kDs = kStreams + kStages * 2 * kStreamBytes;
  static constexpr int kSums = kDs + kTileRows * kStep * 2;
  // dk and dv on their way out lie where parts of dq do.
  static constexpr int kStagingBytes = kTileRows * kPitch<kDim>;
  static constexpr int kLseDelta =
      kSums + (kParts * kPartBytes > kStagingBytes ? kParts * kPartBytes : kStagingBytes);
  static constexpr int kLseDeltaBytes = 2 * kStep * 4;
  static constexpr int kScheduler = kLseDelta + kStages * kLseDeltaBytes;
  static constexpr int kBarriers = kScheduler + TileScheduler::kBytes;
  static constexpr int kShared = kBarriers + (2 + 3 * kStages + 2 * kParts) * 8;
};

// Addresses in shared memory. `which` of two tensors: K and V, or Q and dO.
template <int kDim>
struct FusedStorage {
  using S = FusedShape<kDim>;
  uint32_t base;

  __device__ __forceinline__ uint32_t resident(int which) const {
    return base + which * S::kResidentBytes;
  }
  __device__ __forceinline__ uint32_t stream(int which, int stage) const {
    return base + S::kStreams + (2 * stage + which) * S::kStreamBytes;
  }
  __device__ __forceinline__ uint32_t ds() const { return base + S::kDs; }
  __device__ __forceinline__ uint32_t part(int stage) const {
    return base + S::kSums + stage * S::kPartBytes;
  }
  __device__ __forceinline__ uint32_t staging() const { return base + S::kSums; }
  __device__ __forceinline__ uint32_t lse_delta(int stage) const {
    return base + S::kLseDelta + stage * S::kLseDeltaBytes;
  }
  __device__ __forceinline__ TileScheduler scheduler() const { return {base + S::kScheduler}; }

  // Full: the bytes are there. Ready: and a warp that follows has seen to them. Empty: nobody reads
  // them any more.
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + S::kBarriers + i * 8; }
  __device__ __forceinline__ uint32_t resident_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t resident_empty() const { return barrier(1); }
  __device__ __forceinline__ uint32_t full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ uint32_t ready(int stage) const {
    return barrier(2 + S::kStages + stage);
  }
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return barrier(2 + 2 * S::kStages + stage);
  }
  __device__ __forceinline__ uint32_t part_full(int stage) const {
    return barrier(2 + 3 * S::kStages + stage);
  }
  __device__ __forceinline__ uint32_t part_empty(int stage) const {
    return barrier(2 + 3 * S::kStages + S::kParts + stage);
  }

  __device__ __forceinline__ void init() const {
    scheduler().init(S::kConsumerWarps + 3);
    ptx::barrier_init(resident_full(), 1);
    ptx::barrier_init(resident_empty(), S::kConsumerWarps);  // mutant: sm90-fused-init-resident
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(full(i), 1);
      ptx::barrier_init(ready(i), 2);                  // mutant: sm90-fused-init-ready
      ptx::barrier_init(empty(i), S::kConsumerWarps);  // mutant: sm90-fused-init-empty
    }
    for (int i = 0; i < S::kParts; ++i) {
      ptx::barrier_init(part_full(i), S::kConsumerWarps);  // mutant: sm90-fused-init-part
      ptx::barrier_init(part_empty(i), 1);
    }
    ptx::fence_barrier_init();
  }
};

// A tile of keys and the queries that stream past it: from row `first` of the segment on, once a
// head of the group.
struct FusedWork {
  Tile tile;
  int head;  // of keys
  int group;
  int first;
  int steps;  // of a head; 0: no more work
};
template <int kDim>
__device__ __forceinline__ FusedWork fused_work(const AttentionParams& p, const Item& item) {
  constexpr int kStep = FusedShape<kDim>::kStep;
  const Tile& tile = item.tile;
  const int group = static_cast<int>(p.heads) / static_cast<int>(p.kv_heads);
  const int first = p.causal ? tile.first : 0;  // mutant: sm90-fused-work-first
  return {tile, item.head, group, first, (tile.length - first + kStep - 1) / kStep};
}

// Where a step's part of dq is: among the parts of a head, of which each segment has room for its
// own.
__host__ __device__ inline int64_t parts_of_head(const AttentionParams& p) {
  return p.tokens / kDqRows + p.segments;
}
__device__ __forceinline__ int64_t part_at(const AttentionParams& p, const Tile& tile, int head,
                                           int row) {
  return head * parts_of_head(p) + (tile.begin / kDqRows + tile.segment + row / kDqRows);
}

// ---- the producer's warpgroup

// One thread.
template <int kDim>
__device__ __forceinline__ void produce(const AttentionParams& p,
                                        const TensorMaps* const (&resident)[2],
                                        const TensorMaps* const (&stream)[2],
                                        const FusedStorage<kDim>& storage) {
  using S = FusedShape<kDim>;
  PipelineState<S::kStages> ring;
  uint32_t taken = 0;  // parity: the other one is of the barriers of the tile that was taken
#pragma unroll 1
  for (;;) {
    const FusedWork work = fused_work<kDim>(
        p, storage.scheduler().next(p, true, static_cast<unsigned>(p.kv_heads), taken));
    if (work.steps == 0) return;
    const int begin = work.tile.begin;
#pragma unroll 1
    for (int head = 0; head < work.group; ++head) {
#pragma unroll 1
      for (int step = 0; step < work.steps; ++step) {
        // mutant: sm90-fused-producer-wait-empty
        ptx::barrier_wait(storage.empty(ring.stage), ring.parity ^ 1);
        ptx::barrier_arrive_expect(storage.full(ring.stage), 2 * S::kStreamBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // mutant: sm90-fused-producer-stream
          load_boxes<kDim, S::kStep>(storage.stream(i, ring.stage), stream[i],
                                     storage.full(ring.stage), work.head * work.group + head,
                                     begin + work.first + step * S::kStep);
        }
        ring.advance();
        if (head == 0 && step == 0) {
          // mutant: sm90-fused-producer-wait-resident
          ptx::barrier_wait(storage.resident_empty(), taken);
          ptx::barrier_arrive_expect(storage.resident_full(), 2 * S::kResidentBytes);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            load_boxes<kDim, kTileRows>(storage.resident(i), resident[i], storage.resident_full(),
                                        work.head, begin + work.tile.first);
          }
        }
      }
    }
  }
}

// Two warps, `which` 0 and 1: each sees to one of the tensors that stream, to the queries' lse or
// delta, and the first, before them, to the keys past the segment's end, which are the next
// segment's.
template <int kDim>
__device__ __forceinline__ void follow(const AttentionGradParams& params,
                                       const FusedStorage<kDim>& storage, int which) {
  using S = FusedShape<kDim>;
  const AttentionParams& p = params.forward;
  const int lane = threadIdx.x % kWarpSize;
  PipelineState<S::kStages> ring;
  uint32_t taken = 0;  // parity: the other one is of the barriers of the tile that was taken
#pragma unroll 1
  for (;;) {
    const FusedWork work = fused_work<kDim>(p, storage.scheduler().take(taken));
    if (work.steps == 0) return;
    if (which == 0) {
      if (lane == 0 && !is_listed(p.cu_seqlens, work.tile)) ptx::trap();
      const int keys = work.tile.length - work.tile.first;
      // mutant: sm90-fused-follower-wait-resident
      ptx::barrier_wait(storage.resident_full(), taken ^ 1);
      // mutant: sm90-fused-follower-zero-keys
      if (keys < kTileRows) zero_rows<kDim, kTileRows>(storage.resident(0), keys);
    }
    const int all = work.tile.length - work.first;
    const int64_t first_row = which * p.heads + work.head * work.group;
#pragma unroll 1
    for (int head = 0; head < work.group; ++head) {
      // Of the row past the segment's end.
      const float* const end = params.lse_delta + (first_row + head) * p.tokens +
                               (work.tile.begin + work.tile.length + lane);
#pragma unroll 1
      for (int left = all; left > 0; left -= S::kStep) {
        // Loaded before there is room for them; zeros past the end.
        const float* from = end - left;  // mutant: sm90-fused-follower-from
        const float low = lane < left ? from[0] : 0.f;
        // mutant: sm90-fused-follower-high
        const float high = lane + kWarpSize < left ? from[kWarpSize] : 0.f;
        const uint32_t to = storage.lse_delta(ring.stage) + (which * S::kStep + lane) * 4;
        // mutant: sm90-fused-follower-wait-empty
        ptx::barrier_wait(storage.empty(ring.stage), ring.parity ^ 1);
        ptx::store_shared(to, __float_as_uint(low));
        ptx::store_shared(to + kWarpSize * 4, __float_as_uint(high));
        ptx::barrier_wait(storage.full(ring.stage), ring.parity);
        // mutant: sm90-fused-follower-zero
        if (left < S::kStep) zero_rows<kDim, S::kStep>(storage.stream(which, ring.stage), left);
        release(storage.ready(ring.stage));
        ring.advance();
      }
    }
  }
}

// One warp: adds each step's part of dq to the others', in the order of the tiles of keys.
template <int kDim>
__device__ __forceinline__ void add_parts(const AttentionGradParams& params,
                                          const FusedStorage<kDim>& storage) {
  using S = FusedShape<kDim>;
  const AttentionParams& p = params.forward;
  PipelineState<S::kParts> parts;
  uint32_t taken = 0;  // parity: the other one is of the barriers of the tile that was taken
#pragma unroll 1
  for (;;) {
    const FusedWork work = fused_work<kDim>(p, storage.scheduler().take(taken));
    if (work.steps == 0) return;
    const int earlier_tiles = work.tile.first / kTileRows;
#pragma unroll 1
    for (int head = 0; head < work.group; ++head) {
      // mutant: sm90-fused-add-place
      int64_t place = part_at(p, work.tile, work.head * work.group + head, work.first);
#pragma unroll 1
      for (int step = 0; step < work.steps; ++step, ++place) {
        if (threadIdx.x % kWarpSize == 0) {
          // mutant: sm90-fused-add-wait-full
          ptx::barrier_wait(storage.part_full(parts.stage), parts.parity);
          int* const done = params.done + place;
          ptx::wait_count(done, earlier_tiles);  // mutant: sm90-fused-add-wait-turn
          ptx::fence_async_proxy_global();       // mutant: sm90-fused-add-fence
          float* const to = params.dq_sum + place * (S::kPartBytes / 4);
          if (earlier_tiles == 0) {  // mutant: sm90-fused-add-if-first
            ptx::store_bulk(to, storage.part(parts.stage), S::kPartBytes);
          } else {
            ptx::add_bulk(to, storage.part(parts.stage), S::kPartBytes);
          }
          ptx::commit_bulk();
          ptx::wait_bulk_read();  // mutant: sm90-fused-add-wait-read
          ptx::barrier_arrive(storage.part_empty(parts.stage));
          ptx::wait_bulk();     // mutant: sm90-fused-add-wait-written
          ptx::count_up(done);  // mutant: sm90-fused-add-count
        }
        __syncwarp();
        parts.advance();
      }
    }
  }
}

// ---- the consumers: kConsumer is the warpgroup's number among them

template <class Math, int kDim, int kConsumer>
__device__ __forceinline__ void consume(const AttentionGradParams& params,
                                        const FusedStorage<kDim>& storage) {
  using S = FusedShape<kDim>;
  const AttentionParams& p = params.forward;
  const int thread = threadIdx.x % kWarpgroupSize;
  const int lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int warp_row = kConsumer * 64 + warp * 16;  // of the tile
  const uint32_t keys = storage.resident(0), values = storage.resident(1);
  const float exponent = p.scale < 0.f ? -exponent_of(p.scale) : exponent_of(p.scale);
  // Named barriers of both warpgroups: nobody reads dS any more, and it is written.
  constexpr int kDsEmpty = 1, kDsFull = 2, kBoth = S::kConsumers * kWarpgroupSize;
  // Of dq: columns from kColumn on. 16 bytes of a row of 64 queries' dS are exchanged by its
  // number.
  constexpr int kColumn = kConsumer * S::kFirst, kColumns = kConsumer == 0 ? S::kFirst : S::kSecond;

  PipelineState<S::kStages> ring;
  PipelineState<S::kParts> parts;
  uint32_t taken = 0;  // parity: the other one is of the barriers of the tile that was taken
#pragma unroll 1
  for (;;) {
    const FusedWork work = fused_work<kDim>(p, storage.scheduler().take(taken));
    if (work.steps == 0) return;
    const int first = work.tile.first + warp_row;  // of the warp's keys
    const int length = work.tile.length - first;   // of them
    float s[S::kStep / 2], ds[S::kStep / 2], dk[S::kWide / 2], dv[S::kWide / 2];
    uint32_t probabilities[S::kStep / 16][4], differences[S::kStep / 16][4];
#pragma unroll
    for (int i = 0; i < S::kWide / 2; ++i) dk[i] = dv[i] = 0.f;
#pragma unroll
    for (float& x : S::kOverlap ? ds : s) x = 0.f;
    // Registers of dQ alone for 72, 80 and 96 columns: else ptxas waits for every product.
    float of_dq[S::kStep / 2];
#pragma unroll
    for (float& x : of_dq) x = 0.f;

    // S^T with the queries from `query` on becomes probabilities: exp2(s * exponent - lse), 0 where
    // the query is earlier than the key.
    const auto exponentiate = [&](int query) {
#pragma unroll
      for (int n = 0; n < S::kStep / 8; ++n) {
        const uint32_t at = storage.lse_delta(ring.stage) + (n * 8 + lane % 4 * 2) * 4;
        const float2 lse = ptx::load_shared_pair(at);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[n * 4 + e];
          // mutant: sm90-fused-x
          x = ptx::exp2_approx(fmaf(x, exponent, -(e % 2 ? lse.y : lse.x)));
        }
      }
      // mutant: sm90-fused-if-causal
      if (p.causal && query < work.tile.first + kConsumer * 64 + 64) {
        const int seen = first + lane / 4 - query - lane % 4 * 2;  // columns before it are earlier
#pragma unroll
        for (int i = 0; i < S::kStep / 2; ++i) {
          // mutant: sm90-fused-if-seen
          if (i / 4 * 8 + i % 2 < seen + i % 4 / 2 * 8) s[i] = 0.f;
        }
      }
    };
    // Starts dP and dV of the ring's stage, and makes dS while dV is under way.
    const auto differ = [&] {
      pack<Math, S::kStep>(probabilities, s);
      if constexpr (S::kOverlap) ptx::wgmma_results(ds);
      start_rows<Math, kDim, kTileRows, S::kStep>(ds, values, kConsumer * 64,
                                                  storage.stream(1, ring.stage));
      if constexpr (S::kOverlap) {
        // mutant: sm90-fused-dv
        start_columns<Math, kDim, S::kStep>(dv, probabilities, storage.stream(1, ring.stage));
        ptx::wgmma_wait<1>();  // mutant: sm90-fused-wait-dp
      } else {
        ptx::wgmma_wait<0>();
      }
      ptx::wgmma_results(ds);
#pragma unroll
      for (int n = 0; n < S::kStep / 8; ++n) {
        const uint32_t at = storage.lse_delta(ring.stage) + (S::kStep + n * 8 + lane % 4 * 2) * 4;
        const float2 delta = ptx::load_shared_pair(at);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint32_t pair = probabilities[n / 2][n % 2 * 2 + e / 2];
          const float probability = S::kOverlap ? s[n * 4 + e]
                                    : e % 2     ? Math::high(pair)
                                                : Math::low(pair);
          // mutant: sm90-fused-ds
          ds[n * 4 + e] = probability * (ds[n * 4 + e] - (e % 2 ? delta.y : delta.x));
        }
      }
      if (length < 16) {  // mutant: sm90-fused-if-length
#pragma unroll
        for (int i = 0; i < S::kStep / 2; ++i) {
          if (lane / 4 + i % 4 / 2 * 8 >= length) ds[i] = 0.f;  // not a product: dP may be NaN
        }
      }
      pack<Math, S::kStep>(differences, ds);
      if constexpr (!S::kOverlap) {
        start_columns<Math, kDim, S::kStep>(dv, probabilities, storage.stream(1, ring.stage));
      }
    };
    float (&dq)[S::kStep / 2] = S::kOverlap && kDim > 64 ? of_dq : S::kOverlap ? ds : s;
    // Gives dS to both warpgroups, and starts dQ.
    const auto start_dq = [&] {
      ptx::named_barrier_sync(kDsEmpty, kBoth);  // mutant: sm90-fused-ds-empty
      // Anew, else its addresses stay in registers.
      const int row = ptx::anew(lane) / 4;
      const uint32_t ds_row = storage.ds() + (warp_row + row) * 128 + lane % 4 * 4;
#pragma unroll
      for (int n = 0; n < S::kStep / 8; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          // mutant: sm90-fused-ds-store
          ptx::store_shared(ds_row + r * 8 * 128 + (n * 16 ^ row * 16),
                            differences[n / 2][n % 2 * 2 + r]);
        }
      }
      ptx::fence_async_proxy();                 // mutant: sm90-fused-ds-fence
      ptx::named_barrier_sync(kDsFull, kBoth);  // mutant: sm90-fused-ds-full
      if constexpr (kColumns > 0) {
        constexpr int kChunkBytes = Sm90Tile<kDim, kTileRows>::kChunkBytes;
        constexpr bool kOfTail = kColumn == S::kBody;
        constexpr int kRowBytes = kOfTail ? S::kTailRowBytes : S::kRowBytes;
        const uint64_t a = ptx::matrix_descriptor<128, 16, 8 * 128>(storage.ds());
        // mutant: sm90-fused-dq-b
        const uint64_t b =
            kOfTail ? tail_columns<kDim, kTileRows>(keys)
                    : ptx::matrix_descriptor<S::kRowBytes, kChunkBytes, 8 * S::kRowBytes>(
                          keys + kColumn / S::kChunk * kChunkBytes);
        ptx::wgmma_results(dq);
        ptx::wgmma_fence();
#pragma unroll
        for (int n = 0; n < kTileRows / 16; ++n) {
          // mutant: sm90-fused-dq
          ptx::Wgmma<Math, kColumns>::deep(reinterpret_cast<float (&)[kColumns / 2]>(dq),
                                           a + n * 128, b + n * kRowBytes, n > 0);
        }
        ptx::wgmma_commit();
      }
    };
    // dQ goes to the warp that adds it.
    const auto hand_over = [&] {
      // mutant: sm90-fused-wait-part
      ptx::barrier_wait(storage.part_empty(parts.stage), parts.parity ^ 1);
      ptx::wgmma_results(dq);
      constexpr int kUnits =
          ((kDim < kColumn + kColumns ? kDim : kColumn + kColumns) - kColumn) / 8;
      const uint32_t to = storage.part(parts.stage) + kColumn / 8 * S::kUnitBytes + thread * 16;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        // mutant: sm90-fused-part
        ptx::store_shared(to + u * S::kUnitBytes,
                          uint4{__float_as_uint(dq[u * 4]), __float_as_uint(dq[u * 4 + 1]),
                                __float_as_uint(dq[u * 4 + 2]), __float_as_uint(dq[u * 4 + 3])});
      }
      ptx::fence_async_proxy();  // mutant: sm90-fused-part-fence
      release(storage.part_full(parts.stage));
      parts.advance();
    };
    const auto start_scores = [&] {
      // mutant: sm90-fused-wait-ready
      ptx::barrier_wait(storage.ready(ring.stage), ring.parity);
      if constexpr (!S::kOverlap) ptx::wgmma_results(s);
      start_rows<Math, kDim, kTileRows, S::kStep>(s, keys, kConsumer * 64,
                                                  storage.stream(0, ring.stage));
    };

    // Over before the first step is ready; without this branch ptxas waits for each product.
    ptx::barrier_wait(storage.resident_full(), taken ^ 1);
    start_scores();
    ptx::wgmma_wait<0>();  // mutant: sm90-fused-wait-first
    ptx::wgmma_results(s);
    int query = work.first;  // of the step
    exponentiate(query);
#pragma unroll 1
    for (int i = work.group * work.steps; i > 1; --i) {
      const int now = ring.stage;
      differ();
      start_dq();
      if constexpr (!S::kOverlap) {
        ptx::wgmma_wait<0>();
        hand_over();
      }
      ring.advance();
      // Back to the first one for the next head: from few numbers, as registers are.
      query = query + S::kStep < first + length ? query + S::kStep
              : p.causal                        ? first - warp_row
                                                : 0;
      start_scores();
      // mutant: sm90-fused-dk
      start_columns<Math, kDim, S::kStep>(dk, differences, storage.stream(0, now));
      if constexpr (S::kOverlap) {
        ptx::wgmma_wait<2>();  // mutant: sm90-fused-wait-dq
        hand_over();
      }
      ptx::wgmma_wait<1>();  // mutant: sm90-fused-wait-scores
      ptx::wgmma_results(s);
      exponentiate(query);
      ptx::wgmma_wait<0>();  // mutant: sm90-fused-wait-dk
      ptx::wgmma_results(dv);
      ptx::wgmma_results(dk);
      release(storage.empty(now));
    }
    differ();
    start_dq();
    start_columns<Math, kDim, S::kStep>(dk, differences, storage.stream(0, ring.stage));
    ptx::wgmma_wait<0>();  // mutant: sm90-fused-wait-last
    hand_over();
    ptx::wgmma_results(dv);
    ptx::wgmma_results(dk);
    release(storage.empty(ring.stage));
    release(storage.resident_empty());
    ring.advance();

    // The parts of dq are no longer read where dk and dv are staged.
    PipelineState<S::kParts> all = parts;
#pragma unroll
    for (int i = 0; i < S::kParts; ++i) {
      // mutant: sm90-fused-wait-parts
      ptx::barrier_wait(storage.part_empty(all.stage), all.parity ^ 1);
      all.advance();
    }
    const uint32_t staging =
        storage.staging() + (kConsumer * 64 + ptx::anew(thread) / kWarpSize * 16) * kPitch<kDim>;
    const int64_t token = work.tile.begin + first;
    store_gradient<Math, kDim>(dv, 1.f, staging, length, params.dv, token, work.head, nullptr);
    // mutant: sm90-fused-store-dk
    store_gradient<Math, kDim>(dk, p.scale, staging, length, params.dk, token, work.head, p.rotary);
  }
}

// ---- kernels

template <class Math, int kDim>
__global__ void __launch_bounds__(Sm90Block::kThreads, 1)
    sm90_backward_fused(const AttentionGradParams params, const __grid_constant__ TensorMaps k,
                        const __grid_constant__ TensorMaps v, const __grid_constant__ TensorMaps q,
                        const __grid_constant__ TensorMaps dout) {
  extern __shared__ __align__(1024) char storage_bytes[];
  const FusedStorage<kDim> storage{ptx::shared_address(storage_bytes)};
  specialise(
      storage,
      [&](int warp) {
        if (threadIdx.x == 0) produce<kDim>(params.forward, {&k, &v}, {&q, &dout}, storage);
        if (warp == 1 || warp == 2) follow<kDim>(params, storage, warp - 1);
        if (warp == 3) add_parts<kDim>(params, storage);
      },
      [&](int consumer) {
        if (consumer == 0) {
          consume<Math, kDim, 0>(params, storage);
        } else {
          consume<Math, kDim, 1>(params, storage);
        }
      },
      &k, &v, &q, &dout);
}

// dq of the sums: one block per 128 queries and head.
template <class Math, int kDim>
__global__ void __launch_bounds__(2 * kWarpgroupSize)
    sm90_backward_sum(const AttentionGradParams params) {
  using S = FusedShape<kDim>;
  extern __shared__ __align__(128) char shared[];
  const AttentionParams& p = params.forward;
  const unsigned heads = static_cast<unsigned>(p.heads);
  const Tile tile = tile_at(p.tiles, blockIdx.x / heads);
  const int head = static_cast<int>(blockIdx.x % heads);
  const int thread = threadIdx.x % kWarpgroupSize;
  const int row = tile.first + static_cast<int>(threadIdx.x / kWarpgroupSize) * 64;
  if (row >= tile.length) return;
  const uint4* from = reinterpret_cast<const uint4*>(params.dq_sum) +
                      part_at(p, tile, head, row) * (S::kPartBytes / 16) + thread;
  float dq[S::kWide / 2];
#pragma unroll
  for (int u = 0; u < kDim / 8; ++u) {
    const uint4 v = ptx::load_once(from + u * kWarpgroupSize, true);
    dq[u * 4] = __uint_as_float(v.x);
    dq[u * 4 + 1] = __uint_as_float(v.y);
    dq[u * 4 + 2] = __uint_as_float(v.z);
    dq[u * 4 + 3] = __uint_as_float(v.w);
  }
  const int first = row + thread / kWarpSize * 16;  // of the warp's queries
  const uint32_t staging =
      ptx::shared_address(shared) + static_cast<int>(threadIdx.x / kWarpSize) * 16 * kPitch<kDim>;
  // mutant: sm90-fused-store-dq
  store_gradient<Math, kDim>(dq, p.scale, staging, tile.length - first, params.dq,
                             tile.begin + first, head, p.rotary);
}

// ---- the launch

template <class Math, int kDim>
int launch_backward(const AttentionGradParams& params, void* stream) {
  using S = FusedShape<kDim>;
  const AttentionParams& p = params.forward;
  if (p.tokens == 0) return cudaSuccess;  // which no tensor map describes
  if (const int error = launch_preprocess<Math, kDim>(params, stream)) return error;
  TensorMaps k{}, v{}, q{}, dout{};
  int error = make_maps<kDim, kTileRows>(&k, p.dtype, p.k, p.tokens, p.kv_heads);
  if (!error) error = make_maps<kDim, kTileRows>(&v, p.dtype, p.v, p.tokens, p.kv_heads);
  if (!error) error = make_maps<kDim, S::kStep>(&q, p.dtype, p.q, p.tokens, p.heads);
  if (!error) error = make_maps<kDim, S::kStep>(&dout, p.dtype, params.dout, p.tokens, p.heads);
  if (error) return error;
  error = launch_items(sm90_backward_fused<Math, kDim>, list_length(p) * p.kv_heads, S::kShared,
                       stream, params, k, v, q, dout);
  if (error) return error;
  return launch(sm90_backward_sum<Math, kDim>, list_length(p) * p.heads, 2 * kWarpgroupSize,
                kTileRows * kPitch<kDim>, stream, params);
}

}  // namespace

int sm90_fused_backward_cuda(const AttentionGradParams& p, void* stream) {
  const AttentionParams& f = p.forward;
  // In float16 ptxas 13.0 spills at 128.
  if (f.dtype != DType::kBFloat16 || f.tokens > 0x7fffffff || !p.dq_sum || !p.done) {
    return cudaErrorInvalidValue;
  }
  if (f.segments == 0) return cudaSuccess;
  VLMK_HEAD_DIMS(launch_backward, ptx::Bf16Math, f.head_dim)
}

}  // namespace vlmk
