// Attention inside segments of any length on Hopper's tensor cores: the forward, for compute
// capability 9.0. Results as sm80/forward.cuh's.
//
// Method: FlashAttention-3 (Shah et al. 2024, https://arxiv.org/abs/2407.08608). One block an SM
// takes one tile of 128 queries and head after another. A thread brings queries, keys and values by
// TMA, keys and values into rings of tiles of 128; two warpgroups of 64 queries multiply by wgmma.
// The product with a block's values is under way while the scores with the next block's keys become
// probabilities; the warpgroups alternate in starting products, so that one's softmax falls into
// the other's products. The next tile's rows arrive while this one is still worked on.
//
// TMA copies 128 rows whatever the segment's length: what lies past its end is the next segment's.
// Such keys are masked; such values would make 0 x NaN, so a warp of the producer's warpgroup
// overwrites them with zeros, in the last block of keys of a tile. The same warp changes the sign
// of the queries where the scale is negative.
//
// Floor: 4 L^2 D FLOPs a head on the tensor cores, half of it if causal, at 2,048 multiply-adds a
// cycle and SM; one exponential per score, at 16 a cycle: at 64 they take as long as the products.
// A block of 128 queries and keys: 16 D cycles, of 72 1,280. From L2, once per tile of
// queries: 512 D bytes a block of keys.
#include "cuda/attention/attention.h"
#include "cuda/attention/sm90/common.cuh"

namespace vlmk {
namespace {

template <int kDim>
struct Sm90Shape : Sm90Block, Sm90Row<kDim> {
  static constexpr int kKeys = kTileRows;  // of a block: only the last one is masked
  static constexpr int kTileBytes = Sm90Tile<kDim, kTileRows>::kBytes;
  static constexpr int kStages = kDim <= 80 ? 4 : kDim <= 96 ? 3 : 2;
  static constexpr int kStaging = (1 + 2 * kStages) * kTileBytes;  // results, kPitch<kDim> a row
  static constexpr int kScheduler = kStaging + kTileRows * kPitch<kDim>;
  static constexpr int kBarriers = kScheduler + TileScheduler::kBytes;
  static constexpr int kShared = kBarriers + (3 + 5 * kStages) * 8;
};

// Addresses in shared memory.
template <int kDim>
struct SharedStorage {
  using S = Sm90Shape<kDim>;
  uint32_t base;

  __device__ __forceinline__ uint32_t queries() const { return base; }
  __device__ __forceinline__ uint32_t keys(int stage) const {
    return base + (1 + stage) * S::kTileBytes;
  }
  __device__ __forceinline__ uint32_t values(int stage) const {
    return base + (1 + S::kStages + stage) * S::kTileBytes;
  }
  __device__ __forceinline__ uint32_t staging() const { return base + S::kStaging; }
  __device__ __forceinline__ TileScheduler scheduler() const { return {base + S::kScheduler}; }

  // Barriers. Full: the bytes have arrived. Clean: and the warp that follows the producer has seen
  // to them. Empty: nobody reads them any more.
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + S::kBarriers + i * 8; }
  __device__ __forceinline__ uint32_t queries_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t queries_clean() const { return barrier(1); }
  __device__ __forceinline__ uint32_t queries_empty() const { return barrier(2); }
  __device__ __forceinline__ uint32_t keys_full(int stage) const { return barrier(3 + stage); }
  __device__ __forceinline__ uint32_t keys_empty(int stage) const {
    return barrier(3 + S::kStages + stage);
  }
  __device__ __forceinline__ uint32_t values_full(int stage) const {
    return barrier(3 + 2 * S::kStages + stage);
  }
  __device__ __forceinline__ uint32_t values_clean(int stage) const {
    return barrier(3 + 3 * S::kStages + stage);
  }
  __device__ __forceinline__ uint32_t values_empty(int stage) const {
    return barrier(3 + 4 * S::kStages + stage);
  }

  __device__ __forceinline__ void init() const {
    constexpr int kWarps = S::kConsumerWarps;
    scheduler().init(kWarps + 2);
    ptx::barrier_init(queries_full(), 1);
    ptx::barrier_init(queries_clean(), 1);
    ptx::barrier_init(queries_empty(), kWarps + 1);
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(keys_full(i), 1);
      ptx::barrier_init(keys_empty(i), kWarps);  // mutant: sm90-fwd-init-keys-empty
      ptx::barrier_init(values_full(i), 1);
      ptx::barrier_init(values_clean(i), 1);
      ptx::barrier_init(values_empty(i), kWarps + 1);  // mutant: sm90-fwd-init-values-empty
    }
    ptx::fence_barrier_init();  // mutant: sm90-fwd-init-fence
  }
};

struct Work {
  Tile tile;
  int head;
  int blocks;   // of keys
  bool ragged;  // the last of them passes the segment's end
};
template <int kDim>
__device__ __forceinline__ Work work_of(const AttentionParams& p, const Item& item) {
  using S = Sm90Shape<kDim>;
  const Tile& tile = item.tile;
  // mutant: sm90-fwd-work-end
  const int end = p.causal ? min(tile.length, tile.first + kTileRows) : tile.length;
  const int blocks = (end + S::kKeys - 1) / S::kKeys;
  return {tile, item.head, blocks, blocks * S::kKeys > tile.length};  // mutant: sm90-fwd-work
}

// ---- the producer's warpgroup

template <int kDim>
__device__ __forceinline__ void load_tile(uint32_t to, const TensorMaps* map, uint32_t full,
                                          int head, int token) {
  using S = Sm90Shape<kDim>;
  ptx::barrier_arrive_expect(full, S::kTileBytes);  // mutant: sm90-fwd-load-tile-expect-full
  load_boxes<kDim, kTileRows>(to, map, full, head, token);
}

// One thread. Values come one block behind keys: that is the order in which they are wanted.
template <int kDim>
__device__ __forceinline__ void produce(const AttentionParams& p, const TensorMaps* q,
                                        const TensorMaps* k, const TensorMaps* v,
                                        const SharedStorage<kDim>& storage) {
  using S = Sm90Shape<kDim>;
  const int group = static_cast<int>(p.heads) / static_cast<int>(p.kv_heads);
  PipelineState<S::kStages> key, value;
  uint32_t parity = 0, taken = 0;  // of the queries' barriers and of the scheduler's
#pragma unroll 1
  for (;;) {
    const Work work = work_of<kDim>(p, storage.scheduler().take_alone(taken));
    if (work.blocks == 0) return;
    const int begin = work.tile.begin,
              kv_head = /* mutant: sm90-fwd-producer-begin */ work.head / group;
#pragma unroll 1
    for (int block = 0; block <= work.blocks; ++block) {
      if (block < work.blocks) {
        // mutant: sm90-fwd-producer-wait-keys-empty
        ptx::barrier_wait(storage.keys_empty(key.stage), key.parity ^ 1);
        load_tile<kDim>(storage.keys(key.stage), k, storage.keys_full(key.stage), kv_head,
                        begin + block * S::kKeys);  // mutant: sm90-fwd-producer-keys
        key.advance();
      }
      if (block == 0) {
        // mutant: sm90-fwd-producer-wait-queries-empty
        ptx::barrier_wait(storage.queries_empty(), parity ^ 1);
        load_tile<kDim>(storage.queries(), q, storage.queries_full(), work.head,
                        begin + work.tile.first);  // mutant: sm90-fwd-producer-queries
        parity ^= 1;
      } else {
        // mutant: sm90-fwd-producer-wait-values-empty
        ptx::barrier_wait(storage.values_empty(value.stage), value.parity ^ 1);
        load_tile<kDim>(storage.values(value.stage), v, storage.values_full(value.stage), kv_head,
                        begin + (block - 1) * S::kKeys);  // mutant: sm90-fwd-producer-values
        value.advance();
      }
    }
  }
}

// One warp: follows the producer, and every other warp of its barriers, so that none of their
// phases passes it by.
template <int kDim>
__device__ __forceinline__ void clean(const AttentionParams& p,
                                      const SharedStorage<kDim>& storage) {
  using S = Sm90Shape<kDim>;
  const int lane = threadIdx.x % kWarpSize;
  PipelineState<S::kStages> value;
  uint32_t parity = 0, taken = 0;
#pragma unroll 1
  for (;;) {
    const Work work = work_of<kDim>(p, storage.scheduler().take(taken));
    if (work.blocks == 0) return;
    if (lane == 0 && !is_listed(p.cu_seqlens, work.tile)) ptx::trap();
    // mutant: sm90-fwd-cleaner-wait-queries-full
    ptx::barrier_wait(storage.queries_full(), parity);
    if (p.scale < 0.f) {  // mutant: sm90-fwd-cleaner-if-scale
#pragma unroll 1
      for (int at = lane * 16; at < S::kTileBytes; at += kWarpSize * 16) {
        ptx::store_shared(storage.queries() + at,
                          negated(ptx::load_shared(storage.queries() + at)));
      }
      ptx::fence_async_proxy();  // mutant: sm90-fwd-cleaner-fence-sign
    }
    // mutant: sm90-fwd-cleaner-syncwarp-sign
    __syncwarp();  // all lanes have waited and written
    if (lane == 0) {
      ptx::barrier_arrive(storage.queries_clean());
      ptx::barrier_arrive(storage.queries_empty());
    }
    parity ^= 1;
#pragma unroll 1
    for (int block = 1; block <= work.blocks; ++block) {
      // mutant: sm90-fwd-cleaner-wait-values-full
      ptx::barrier_wait(storage.values_full(value.stage), value.parity);
      if (block == work.blocks && work.ragged) {  // mutant: sm90-fwd-cleaner-if-blocks
        // mutant: sm90-fwd-cleaner-from
        const int from = work.tile.length - (block - 1) * S::kKeys;
        zero_rows<kDim, S::kKeys>(storage.values(value.stage), from);
      }
      __syncwarp();  // mutant: sm90-fwd-cleaner-syncwarp-zeros
      if (lane == 0) {
        ptx::barrier_arrive(storage.values_clean(value.stage));
        ptx::barrier_arrive(storage.values_empty(value.stage));
      }
      value.advance();
    }
  }
}

// ---- the consumers

// Scores become probabilities over the highest score so far, whose old value's probability is
// `correction`; a thread's part of their sum is added.
template <int kCount>
__device__ __forceinline__ void exponentiate(float (&s)[kCount], float (&top)[2], float (&sum)[2],
                                             float (&correction)[2], float exponent) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float highest = top[r];  // mutant: sm90-fwd-softmax-max-init
#pragma unroll
    for (int i = r * 2; i < kCount; i += 4) highest = fmaxf(highest, fmaxf(s[i], s[i + 1]));
    highest = fmaxf(highest, ptx::exchange(highest, 1));
    highest = fmaxf(highest, ptx::exchange(highest, 2));  // mutant: sm90-fwd-softmax-max
    // As multiply-adds they would differ where the highest stays: long rows' sums would drift.
    const float offset = __fmul_rn(highest, exponent);
    correction[r] = ptx::exp2_approx(__fmul_rn(top[r], exponent) - offset);
    top[r] = highest;
    float part = 0.f;
#pragma unroll
    for (int i = r * 2; i < kCount; i += 4) {
#pragma unroll
      for (int e = i; e < i + 2; ++e) {
        s[e] = ptx::exp2_approx(fmaf(s[e], exponent, -offset));
        part += s[e];
      }
    }
    sum[r] = sum[r] * correction[r] + part;  // mutant: sm90-fwd-softmax-sum
  }
}

// `consumer` is the warpgroup's number among them.
template <class Math, int kDim>
__device__ __forceinline__ void consume(const AttentionParams& p,
                                        const SharedStorage<kDim>& storage, int consumer) {
  using S = Sm90Shape<kDim>;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroupSize / kWarpSize;
  const int warp_row = consumer * 64 + warp * 16;  // of the tile
  const uint32_t queries = storage.queries();
  // mutant: sm90-fwd-consumer-staging
  const uint32_t staging = storage.staging() + warp_row * kPitch<kDim>;
  const float exponent = exponent_of(p.scale);
  // mutant: sm90-fwd-consumer-queries-ready
  const uint32_t queries_ready = p.scale < 0.f ? storage.queries_clean() : storage.queries_full();
  // Named barriers order the warpgroups: each starts its products after the other, the first one
  // first.
  constexpr int kOrderBarrier = 1;
  constexpr int kOrderThreads = S::kConsumers * kWarpgroupSize;
  // mutant: sm90-fwd-consumer-first-arrive
  if (consumer == 1) ptx::named_barrier_arrive(kOrderBarrier, kOrderThreads);

  PipelineState<S::kStages> key, value;
  uint32_t parity = 0, taken = 0;
#pragma unroll 1
  for (;;) {
    const Work work = work_of<kDim>(p, storage.scheduler().take(taken));
    if (work.blocks == 0) break;
    // mutant: sm90-fwd-consumer-if-length
    if (work.tile.first + consumer * 64 >= work.tile.length) {
      // All of its queries are past the segment's end: the tensor cores are the other's.
      ptx::barrier_wait(queries_ready, parity);
      release(storage.queries_empty());  // mutant: sm90-fwd-consumer-release-queries-idle
      parity ^= 1;
#pragma unroll 1
      for (int block = 0; block < work.blocks; ++block) {
        ptx::barrier_wait(storage.keys_full(key.stage), key.parity);
        release(storage.keys_empty(key.stage));
        key.advance();
        if (block > 0) {
          ptx::named_barrier_sync(kOrderBarrier + consumer, kOrderThreads);
          // mutant: sm90-fwd-consumer-arrive-idle
          ptx::named_barrier_arrive(kOrderBarrier + 1 - consumer, kOrderThreads);
        }
        ptx::barrier_wait(storage.values_full(value.stage), value.parity);
        // mutant: sm90-fwd-consumer-release-values-empty
        release(storage.values_empty(value.stage));
        value.advance();
      }
      continue;  // mutant: sm90-fwd-consumer-continue
    }
    const int first = work.tile.first + warp_row;
    float s[S::kKeys / 2], out[S::kWide / 2];
    float top[2] = {-3e38f, -3e38f}, sum[2] = {}, correction[2];
    uint32_t probabilities[S::kKeys / 16][4];
#pragma unroll
    for (int i = 0; i < S::kWide / 2; ++i) out[i] = 0.f;
    const auto softmax = [&](int block) {
      // mutant: sm90-fwd-consumer-if-blocks
      if (block + 1 == work.blocks && (work.ragged || p.causal)) {
        mask_keys(blocks_of<S::kKeys>(s), block * S::kKeys, first, p.causal, work.tile.length);
      }
      exponentiate(s, top, sum, correction, exponent);
    };
    const auto wait_for_keys = [&](int block) {
      if (block < work.blocks) ptx::barrier_wait(storage.keys_full(key.stage), key.parity);
    };

    ptx::barrier_wait(queries_ready, parity);  // mutant: sm90-fwd-consumer-wait-queries-ready
    wait_for_keys(0);                          // mutant: sm90-fwd-consumer-wait-first-keys
    start_rows<Math, kDim, kTileRows, S::kKeys>(s, queries, consumer * 64, storage.keys(key.stage));
    ptx::wgmma_wait<0>();  // mutant: sm90-fwd-consumer-wait-first
    ptx::wgmma_results(s);
    release(storage.keys_empty(key.stage));
    key.advance();
    softmax(0);
    pack<Math, S::kKeys>(probabilities, s);
    wait_for_keys(1);  // mutant: sm90-fwd-consumer-wait-keys-full

#pragma unroll 1
    for (int block = 1; block < work.blocks; ++block) {
      ptx::named_barrier_sync(kOrderBarrier + consumer, kOrderThreads);
      // mutant: sm90-fwd-consumer-start-rows
      start_rows<Math, kDim, kTileRows, S::kKeys>(s, queries, consumer * 64,
                                                  storage.keys(key.stage));
      // mutant: sm90-fwd-consumer-wait-values-full
      ptx::barrier_wait(storage.values_full(value.stage), value.parity);
      // mutant: sm90-fwd-consumer-start-columns
      start_columns<Math, kDim, S::kKeys>(out, probabilities, storage.values(value.stage));
      // mutant: sm90-fwd-consumer-arrive
      ptx::named_barrier_arrive(kOrderBarrier + 1 - consumer, kOrderThreads);
      ptx::wgmma_wait<1>();  // mutant: sm90-fwd-consumer-wait-scores
      ptx::wgmma_results(s);
      release(storage.keys_empty(key.stage));  // mutant: sm90-fwd-consumer-release-keys-empty
      key.advance();
      softmax(block);  // mutant: sm90-fwd-consumer-softmax
      // Here, because it branches: else ptxas waits for the product before the exponentials.
      wait_for_keys(block + 1);  // mutant: sm90-fwd-consumer-wait-next-keys
      ptx::wgmma_wait<0>();      // mutant: sm90-fwd-consumer-wait-out
      ptx::wgmma_results(out);
      release(storage.values_empty(value.stage));
      value.advance();
#pragma unroll
      // mutant: sm90-fwd-consumer-loop
      for (int i = 0; i < S::kWide / 2; ++i) out[i] *= correction[i % 4 / 2];
      pack<Math, S::kKeys>(probabilities, s);
    }

    release(storage.queries_empty());  // mutant: sm90-fwd-consumer-release-queries-empty
    parity ^= 1;
    // Full first: then the clean phase before this one is over. A wait that came earlier would take
    // the one before that, of the same parity, for its own.
    ptx::barrier_wait(storage.values_full(value.stage), value.parity);
    // mutant: sm90-fwd-consumer-if-ragged
    if (work.ragged) ptx::barrier_wait(storage.values_clean(value.stage), value.parity);
    start_columns<Math, kDim, S::kKeys>(out, probabilities, storage.values(value.stage));
    ptx::wgmma_wait<0>();  // mutant: sm90-fwd-consumer-wait-last
    ptx::wgmma_results(out);
    release(storage.values_empty(value.stage));
    value.advance();

    float factor[1][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += ptx::exchange(sum[r], 1);
      sum[r] += ptx::exchange(sum[r], 2);
      factor[0][r] = 1.f / sum[r];
      const int query = first + r * 8 + lane / 4;
      if (lane % 4 == 0 && query < work.tile.length) {
        // mutant: sm90-fwd-consumer-at
        const int64_t at = work.head * p.tokens + work.tile.begin + query;
        p.row_max[at] = top[r];
        p.row_sum[at] = sum[r];
      }
    }
    store_rows<Math, kDim>(blocks_of<kDim>(out), factor, staging, work.tile.length - first, p.out,
                           work.tile.begin + first, work.head);
  }
  if (consumer == 0) ptx::named_barrier_sync(kOrderBarrier, kOrderThreads);  // the last arrival
}

template <class Math, int kDim>
__global__ void __launch_bounds__(Sm90Shape<kDim>::kThreads, 1)
    sm90_forward(const AttentionParams p, const __grid_constant__ TensorMaps q,
                 const __grid_constant__ TensorMaps k, const __grid_constant__ TensorMaps v) {
  using S = Sm90Shape<kDim>;
  static_assert(S::kKeys == kTileRows);
  extern __shared__ __align__(1024) char storage_bytes[];
  const SharedStorage<kDim> storage{ptx::shared_address(storage_bytes)};
  specialise(
      storage,
      [&](int warp) {
        if (threadIdx.x == 0) produce<kDim>(p, &q, &k, &v, storage);
        if (warp == 1) clean<kDim>(p, storage);
        if (threadIdx.x == 2 * kWarpSize)
          storage.scheduler().run(p, false, static_cast<unsigned>(p.heads));
      },
      [&](int consumer) { consume<Math, kDim>(p, storage, consumer); }, &q, &k, &v);
}

// ---- the launch

template <class Math, int kDim>
int launch_forward(const AttentionParams& p, void* stream) {
  using S = Sm90Shape<kDim>;
  if (p.tokens == 0) return cudaSuccess;  // which no tensor map describes
  TensorMaps q{}, k{}, v{};
  int error = make_maps<kDim, kTileRows>(&q, p.dtype, p.q, p.tokens, p.heads);
  if (!error) error = make_maps<kDim, kTileRows>(&k, p.dtype, p.k, p.tokens, p.kv_heads);
  // mutant: sm90-fwd-launch-map
  if (!error) error = make_maps<kDim, kTileRows>(&v, p.dtype, p.v, p.tokens, p.kv_heads);
  if (error) return error;
  return launch_items(sm90_forward<Math, kDim>, list_length(p) * p.heads, S::kShared, stream, p, q,
                      k, v);
}

}  // namespace

int sm90_forward_cuda(const AttentionParams& p, void* stream) {
  if (p.dtype == DType::kFloat32 || p.tokens > 0x7fffffff) return cudaErrorInvalidValue;
  if (p.segments == 0) return cudaSuccess;
  VLMK_INSTANCES(launch_forward, p.dtype, p.head_dim)
}

}  // namespace vlmk
