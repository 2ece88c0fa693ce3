// Attention inside segments of any length on Hopper's tensor cores: the backward, for compute
// capability 9.0. Results and division of the work as sm80/backward.cuh's,
// deterministic: `backward_preprocess`, then dk and dv by one kernel, dq by another.
//
// Method: FlashAttention-3 (Shah et al. 2024, https://arxiv.org/abs/2407.08608), whose backward is
// one kernel of 10 L^2 D FLOPs a head that adds dq to an fp32 buffer by atomics. Here it is 14,
// half of it if causal: scores are computed twice, no gradient is added to memory, and the same
// bits come out every time. One block an SM takes one tile of 128 rows and head after another. What
// a tile keeps (keys: K and V, queries: Q and dO) is resident in shared memory; what it meets
// streams past it by TMA, 64 rows of both tensors a step, in a ring. Two warpgroups of 64 rows
// multiply by wgmma: keys: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q over all queries
// of the group's heads; queries: S = Q K^T, dP = dO V^T, dQ += dS K. P and dS go from accumulators
// into left operands, never through shared memory.
//
// Overlap: a warpgroup makes dS while dV (keys) or the next step's scores (queries) are under way,
// and the next step's probabilities while dK or dQ is. The two warpgroups are independent: one's
// exponentials fall into the other's products. The next tile's rows arrive while this one is still
// worked on. No product is under way from one iteration of a loop to the next: ptxas would wait for
// each.
//
// Two warps of the producer's warpgroup follow the copies: they overwrite rows past the segment's
// end, which TMA fills with the next segment's, with zeros (0 x NaN), and for the keys bring each
// query's lse and delta, which are not aligned as bulk copies ask for. A negative scale is a
// negative exponent: backward_preprocess' maxima hold the sign already.
//
// Floor a step of 64 and 128 rows, at 2,048 multiply-adds a cycle and SM: keys 16 D cycles, queries
// 12 D (72 as 80), that is 1,280 and 960 at 80. Left operands in shared memory keep it as busy as
// the tensor cores: 4 KB for m64n64k16's 32 cycles. Exponentials, one a score and kernel at 16 a
// cycle: 512. From L2: 256 D bytes a step.
#include "cuda/attention/attention.h"
#include "cuda/attention/sm80/backward.cuh"
#include "cuda/attention/sm90/common.cuh"
#include "cuda/attention/sm90/parts.cuh"

namespace vlmk {
namespace {

template <int kDim>
struct Sm90GradShape : Sm90Block, Sm90Row<kDim> {
  static constexpr int kStep = 64;  // rows of the other side
  static constexpr int kResidentBytes = Sm90Tile<kDim, kTileRows>::kBytes;
  static constexpr int kStreamBytes = Sm90Tile<kDim, kStep>::kBytes;
  static constexpr int kStages = Sm90Row<kDim>::kWide <= 96 ? 4 : 3;
  static constexpr int kStreams = 2 * kResidentBytes;
  static constexpr int kStaging = kStreams + kStages * 2 * kStreamBytes;  // kPitch<kDim> a row
  static constexpr int kLseDelta = kStaging + kTileRows * kPitch<kDim>;
  static constexpr int kLseDeltaBytes = 2 * kStep * 4;  // of a step
  static constexpr int kScheduler = kLseDelta + kStages * kLseDeltaBytes;
  static constexpr int kBarriers = kScheduler + TileScheduler::kBytes;
  static constexpr int kShared = kBarriers + (2 + 3 * kStages) * 8;
};

// Addresses in shared memory. `which` of two tensors: K and V, or Q and dO.
template <int kDim>
struct GradSharedStorage {
  using S = Sm90GradShape<kDim>;
  uint32_t base;

  __device__ __forceinline__ uint32_t resident(int which) const {
    return base + which * S::kResidentBytes;
  }
  __device__ __forceinline__ uint32_t stream(int which, int stage) const {
    return base + S::kStreams + (2 * stage + which) * S::kStreamBytes;
  }
  __device__ __forceinline__ uint32_t staging() const { return base + S::kStaging; }
  // log2 of a query's sum of exponentials, S::kStep of them; sums of out * dout.
  __device__ __forceinline__ uint32_t lse_delta(int stage) const {
    return base + S::kLseDelta + stage * S::kLseDeltaBytes;
  }
  __device__ __forceinline__ TileScheduler scheduler() const { return {base + S::kScheduler}; }

  // Barriers. Full: the bytes have arrived. Ready: and the warps that follow have seen to them.
  // Empty: nobody reads them any more.
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

  __device__ __forceinline__ void init() const {
    scheduler().init(S::kConsumerWarps + 3);
    ptx::barrier_init(resident_full(), 1);
    ptx::barrier_init(resident_empty(), S::kConsumerWarps);  // mutant: sm90-bwd-init-resident-empty
    for (int i = 0; i < S::kStages; ++i) {
      ptx::barrier_init(full(i), 1);
      ptx::barrier_init(ready(i), 2);                  // mutant: sm90-bwd-init-ready
      ptx::barrier_init(empty(i), S::kConsumerWarps);  // mutant: sm90-bwd-init-empty
    }
    ptx::fence_barrier_init();  // mutant: sm90-bwd-init-fence
  }
};

// A tile and what streams past it: from row `first` of the segment on, once a head of `heads`.
struct GradWork {
  Tile tile;
  int head;         // of keys: group_parts of one after another
  int stream_head;  // the first
  int heads;
  int first;
  int steps;  // of a head; 0: no more work
};
template <int kDim, bool kKeys>
__device__ __forceinline__ GradWork grad_work(const AttentionGradParams& params, const Item& item) {
  const AttentionParams& p = params.forward;
  const int group = static_cast<int>(p.heads) / static_cast<int>(p.kv_heads);
  constexpr int kStep = Sm90GradShape<kDim>::kStep;
  GradWork work;
  int end;
  if constexpr (kKeys) {
    const int parts = static_cast<int>(params.group_parts), most = (group + parts - 1) / parts;
    const int before = item.head % parts * most;  // mutant: sm90-bwd-work-before
    // mutant: sm90-bwd-work-of-keys
    work = {item.tile,
            item.head,
            item.head / parts * group + before,
            min(most, group - before),
            p.causal ? item.tile.first : 0,
            0};
    end = item.tile.length;
  } else {
    // mutant: sm90-bwd-work-of-queries
    work = {item.tile, item.head, item.head / group, 1, 0, 0};
    // mutant: sm90-bwd-work-end
    end = p.causal ? min(item.tile.length, item.tile.first + kTileRows) : item.tile.length;
  }
  work.steps = (end - work.first + kStep - 1) / kStep;  // mutant: sm90-bwd-work-steps
  return work;
}

// ---- the producer's warpgroup

// The maps of a kernel: what is resident, in boxes of 128 rows, and what streams, of 64.
struct GradMaps {
  const TensorMaps *resident[2], *stream[2];
};

// One thread.
template <int kDim, bool kKeys>
__device__ __forceinline__ void produce(const AttentionGradParams& params, const GradMaps& maps,
                                        const GradSharedStorage<kDim>& storage) {
  using S = Sm90GradShape<kDim>;
  PipelineState<S::kStages> ring;
  uint32_t parity = 0, taken = 0;  // of the resident tiles' barriers and of the scheduler's
#pragma unroll 1
  for (;;) {
    const GradWork work = grad_work<kDim, kKeys>(params, storage.scheduler().take_alone(taken));
    if (work.steps == 0) return;
    const int begin = work.tile.begin;
    const int resident_head = kKeys ? work.head / static_cast<int>(params.group_parts) : work.head;
#pragma unroll 1
    for (int head = 0; head < work.heads; ++head) {
#pragma unroll 1
      for (int step = 0; step < work.steps; ++step) {
        // mutant: sm90-bwd-producer-wait-empty
        ptx::barrier_wait(storage.empty(ring.stage), ring.parity ^ 1);
        // mutant: sm90-bwd-producer-expect-full
        ptx::barrier_arrive_expect(storage.full(ring.stage), 2 * S::kStreamBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // mutant: sm90-bwd-producer-stream
          load_boxes<kDim, S::kStep>(storage.stream(i, ring.stage), maps.stream[i],
                                     storage.full(ring.stage), work.stream_head + head,
                                     begin + work.first + step * S::kStep);
        }
        ring.advance();
        if (head == 0 && step == 0) {
          // mutant: sm90-bwd-producer-wait-resident-empty
          ptx::barrier_wait(storage.resident_empty(), parity ^ 1);
          // mutant: sm90-bwd-producer-expect-resident-full
          ptx::barrier_arrive_expect(storage.resident_full(), 2 * S::kResidentBytes);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            // mutant: sm90-bwd-producer-resident
            load_boxes<kDim, kTileRows>(storage.resident(i), maps.resident[i],
                                        storage.resident_full(), resident_head,
                                        begin + work.tile.first);
          }
          parity ^= 1;
        }
      }
    }
  }
}

// Two warps, `which` 0 and 1: each after the producer, and before the consumers, sees to one of the
// tensors that stream and, for the keys, to the queries' lse or delta.
template <int kDim, bool kKeys>
__device__ __forceinline__ void follow(const AttentionGradParams& params,
                                       const GradSharedStorage<kDim>& storage, int which) {
  using S = Sm90GradShape<kDim>;
  const AttentionParams& p = params.forward;
  const int lane = threadIdx.x % kWarpSize;
  PipelineState<S::kStages> ring;
  uint32_t taken = 0;
#pragma unroll 1
  for (;;) {
    const GradWork work = grad_work<kDim, kKeys>(params, storage.scheduler().take(taken));
    if (work.steps == 0) return;
    if (lane == 0 && !is_listed(p.cu_seqlens, work.tile)) ptx::trap();
    // Rows of the segment from a step's first on: at the first step, and after the last.
    const int all = work.tile.length - work.first,
              rest = /* mutant: sm90-bwd-follower-all */ all - work.steps * S::kStep;
    // mutant: sm90-bwd-follower-first-row
    const int first_row = which * static_cast<int>(p.heads) + work.stream_head;
    const float* rows = params.lse_delta +
                        static_cast<int64_t>(first_row) * static_cast<int>(p.tokens) +
                        (work.tile.begin + work.first + lane);  // mutant: sm90-bwd-follower-rows
#pragma unroll 1
    for (int head = work.heads; head > 0;
         --head, /* mutant: sm90-bwd-follower-loop-head */ rows += p.tokens) {
#pragma unroll 1
      for (int left = all; left > rest; left -= S::kStep) {
        if constexpr (kKeys) {
          // Loaded before there is room for them; zeros past the end.
          const float* from = rows + (all - left);        // mutant: sm90-bwd-follower-from
          const float low = lane < left ? from[0] : 0.f;  // mutant: sm90-bwd-follower-low
          // mutant: sm90-bwd-follower-high
          const float high = lane + kWarpSize < left ? from[kWarpSize] : 0.f;
          // mutant: sm90-bwd-follower-to
          const uint32_t to = storage.lse_delta(ring.stage) + (which * S::kStep + lane) * 4;
          // mutant: sm90-bwd-follower-wait-empty
          ptx::barrier_wait(storage.empty(ring.stage), ring.parity ^ 1);
          ptx::store_shared(to, __float_as_uint(low));
          ptx::store_shared(to + kWarpSize * 4, __float_as_uint(high));
        }
        // mutant: sm90-bwd-follower-wait-full
        ptx::barrier_wait(storage.full(ring.stage), ring.parity);
        if (left < S::kStep) {  // mutant: sm90-bwd-follower-if-left
          // mutant: sm90-bwd-follower-zero
          zero_rows<kDim, S::kStep>(storage.stream(which, ring.stage), left);
        }
        release(storage.ready(ring.stage));
        ring.advance();
      }
    }
  }
}

// ---- the consumers: `consumer` is the warpgroup's number among them

// A step of which the warpgroup sees nothing.
template <int kDim>
__device__ __forceinline__ void pass(const GradSharedStorage<kDim>& storage,
                                     PipelineState<Sm90GradShape<kDim>::kStages>& ring) {
  ptx::barrier_wait(storage.ready(ring.stage), ring.parity);
  release(storage.empty(ring.stage));  // mutant: sm90-bwd-pass
  ring.advance();
}

// ---- dk and dv

template <class Math, int kDim>
__device__ __forceinline__ void consume_keys(const AttentionGradParams& params,
                                             const GradSharedStorage<kDim>& storage, int consumer) {
  using S = Sm90GradShape<kDim>;
  const AttentionParams& p = params.forward;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroupSize / kWarpSize;
  const int warp_row = consumer * 64 + warp * 16;  // of the tile
  const uint32_t keys = storage.resident(0), values = storage.resident(1);
  const int row = consumer * 64;
  // mutant: sm90-bwd-dkdv-staging
  const uint32_t staging = storage.staging() + warp_row * kPitch<kDim>;
  const float exponent = p.scale < 0.f ? -exponent_of(p.scale) : exponent_of(p.scale);

  PipelineState<S::kStages> ring;
  uint32_t parity = 0, taken = 0;
#pragma unroll 1
  for (;;) {
    const GradWork work = grad_work<kDim, true>(params, storage.scheduler().take(taken));
    if (work.steps == 0) return;
    ptx::barrier_wait(storage.resident_full(), parity);  // mutant: sm90-bwd-dkdv-wait-resident-full
    parity ^= 1;
    if (work.tile.first + consumer * 64 >= work.tile.length) {  // mutant: sm90-bwd-dkdv-if-length
      // All of its keys are past the segment's end: the tensor cores are the other's.
      release(storage.resident_empty());  // mutant: sm90-bwd-dkdv-release-resident-empty
#pragma unroll 1
      for (int i = 0; i < work.heads * work.steps; ++i) {  // mutant: sm90-bwd-dkdv-idle-loop
        pass<kDim>(storage, ring);
      }
      continue;
    }
    // If causal, the second warpgroup's keys are later than all queries of a head's first step.
    const int skipped = p.causal ? consumer : 0;   // mutant: sm90-bwd-dkdv-skipped
    const int first = work.tile.first + warp_row;  // of the warp's keys
    float s[S::kStep / 2], ds[S::kStep / 2], dk[S::kWide / 2], dv[S::kWide / 2];
    uint32_t probabilities[S::kStep / 16][4], differences[S::kStep / 16][4];
#pragma unroll
    for (int i = 0; i < S::kWide / 2; ++i) dk[i] = dv[i] = 0.f;

    // S^T with the queries from `query` on becomes probabilities: exp2(s * exponent - lse), 0
    // where the query is earlier than the key.
    const auto exponentiate = [&](int query) {
#pragma unroll
      for (int n = 0; n < S::kStep / 8; ++n) {
        const uint32_t at = storage.lse_delta(ring.stage) + (n * 8 + lane % 4 * 2) * 4;
        const float2 lse = ptx::load_shared_pair(at);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[n * 4 + e];
          // mutant: sm90-bwd-dkdv-x
          x = ptx::exp2_approx(fmaf(x, exponent, -(e % 2 ? lse.y : lse.x)));
        }
      }
      // mutant: sm90-bwd-dkdv-if-causal
      if (p.causal && query < work.tile.first + consumer * 64 + 64) {
        const int seen = first + lane / 4 - query - lane % 4 * 2;  // columns before it are earlier
#pragma unroll
        for (int i = 0; i < S::kStep / 2; ++i) {
          // mutant: sm90-bwd-dkdv-if-seen
          if (i / 4 * 8 + i % 2 < seen + i % 4 / 2 * 8) s[i] = 0.f;
        }
      }
    };
    // Starts dP and dV of the ring's stage, and makes dS while dV is under way.
    const auto differ = [&] {
      pack<Math, S::kStep>(probabilities, s);
      start_rows<Math, kDim, kTileRows, S::kStep>(ds, values, row, storage.stream(1, ring.stage));
      // mutant: sm90-bwd-dkdv-dv
      start_columns<Math, kDim, S::kStep>(dv, probabilities, storage.stream(1, ring.stage));
      ptx::wgmma_wait<1>();  // mutant: sm90-bwd-dkdv-wait-dp
      ptx::wgmma_results(ds);
#pragma unroll
      for (int n = 0; n < S::kStep / 8; ++n) {
        // mutant: sm90-bwd-dkdv-at
        const uint32_t at = storage.lse_delta(ring.stage) + (S::kStep + n * 8 + lane % 4 * 2) * 4;
        const float2 delta = ptx::load_shared_pair(at);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // mutant: sm90-bwd-dkdv-ds
          ds[n * 4 + e] = s[n * 4 + e] * (ds[n * 4 + e] - (e % 2 ? delta.y : delta.x));
        }
      }
      pack<Math, S::kStep>(differences, ds);  // mutant: sm90-bwd-dkdv-pack
    };
    const auto start_scores = [&] {
      // mutant: sm90-bwd-dkdv-wait-ready
      ptx::barrier_wait(storage.ready(ring.stage), ring.parity);
      start_rows<Math, kDim, kTileRows, S::kStep>(s, keys, row, storage.stream(0, ring.stage));
    };

    if (skipped) pass<kDim>(storage, ring);
    start_scores();
    ptx::wgmma_wait<0>();  // mutant: sm90-bwd-dkdv-wait-first
    ptx::wgmma_results(s);
    int step = skipped;
    exponentiate(work.first + step * S::kStep);
#pragma unroll 1
    for (int i = /* mutant: sm90-bwd-dkdv-loop */ work.heads * (work.steps - skipped); i > 1; --i) {
      const int now = ring.stage;
      differ();
      ring.advance();
      if (++step == work.steps) {
        step = skipped;
        if (skipped) pass<kDim>(storage, ring);  // mutant: sm90-bwd-dkdv-if-skipped
      }
      start_scores();
      // mutant: sm90-bwd-dkdv-dk
      start_columns<Math, kDim, S::kStep>(dk, differences, storage.stream(0, now));
      // mutant: sm90-bwd-dkdv-wait-scores
      ptx::wgmma_wait<1>();  // for all but dK
      ptx::wgmma_results(s);
      exponentiate(work.first + step * S::kStep);
      ptx::wgmma_wait<0>();  // mutant: sm90-bwd-dkdv-wait-dk
      ptx::wgmma_results(dv);
      ptx::wgmma_results(dk);
      release(storage.empty(now));  // mutant: sm90-bwd-dkdv-release
    }
    differ();
    start_columns<Math, kDim, S::kStep>(dk, differences, storage.stream(0, ring.stage));
    release(storage.resident_empty());
    ptx::wgmma_wait<0>();  // mutant: sm90-bwd-dkdv-wait-last
    ptx::wgmma_results(dv);
    ptx::wgmma_results(dk);
    release(storage.empty(ring.stage));
    ring.advance();

    const int64_t token = work.tile.begin + first;
    const int length = work.tile.length - first;
    if (params.dkv_parts != nullptr) {
#pragma unroll 1
      for (int which = 0; which < 2; ++which) {  // one code for both, or registers spill
        store_part<kDim>(dk, params, which, token, length, work.head);
#pragma unroll
        for (int i = 0; i < S::kWide / 2; ++i) dk[i] = dv[i];  // mutant: sm90-bwd-part-dv
      }
      continue;
    }
    // mutant: sm90-bwd-dkdv-store-dv
    store_gradient<Math, kDim>(dv, 1.f, staging, length, params.dv, token, work.head, nullptr);
    // mutant: sm90-bwd-dkdv-store-dk
    store_gradient<Math, kDim>(dk, p.scale, staging, length, params.dk, token, work.head, p.rotary);
  }
}

// ---- dq

template <class Math, int kDim>
__device__ __forceinline__ void consume_queries(const AttentionGradParams& params,
                                                const GradSharedStorage<kDim>& storage,
                                                int consumer) {
  using S = Sm90GradShape<kDim>;
  const AttentionParams& p = params.forward;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroupSize / kWarpSize;
  const int warp_row = consumer * 64 + warp * 16;  // of the tile
  const uint32_t queries = storage.resident(0), douts = storage.resident(1);
  const int row = consumer * 64;
  const uint32_t staging = storage.staging() + warp_row * kPitch<kDim>;
  // mutant: sm90-bwd-dq-exponent
  const float exponent = p.scale < 0.f ? -exponent_of(p.scale) : exponent_of(p.scale);

  PipelineState<S::kStages> ring;
  uint32_t parity = 0, taken = 0;
#pragma unroll 1
  for (;;) {
    const GradWork work = grad_work<kDim, false>(params, storage.scheduler().take(taken));
    if (work.steps == 0) return;
    const int first_row = work.tile.first + consumer * 64, first = work.tile.first + warp_row;
    // Steps in which a query of the warpgroup sees a key; the other ones it lets pass.
    int steps = work.steps;
    if (p.causal) steps = min(steps, first_row / S::kStep + 1);  // mutant: sm90-bwd-dq-if-causal
    if (first_row >= work.tile.length) steps = 0;

    float lse[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first + r * 8 + lane / 4;
      const bool inside = query < work.tile.length;
      const float* from =
          params.lse_delta + work.head * p.tokens + work.tile.begin + (inside ? query : 0);
      lse[r] = inside ? from[0] : 0.f;
      delta[r] = inside ? from[p.heads * p.tokens] : 0.f;
    }
    float s[S::kStep / 2], ds[S::kStep / 2], probabilities[S::kStep / 2], dq[S::kWide / 2];
    uint32_t differences[S::kStep / 16][4];
#pragma unroll
    for (int i = 0; i < S::kWide / 2; ++i) dq[i] = 0.f;
    const auto start_scores = [&] {
      start_rows<Math, kDim, kTileRows, S::kStep>(s, queries, row, storage.stream(0, ring.stage));
    };
    const auto wait_for_step = [&](int step, PipelineState<S::kStages> state) {
      if (step >= steps) return;
      if (step > 0) state.advance();
      ptx::barrier_wait(storage.ready(state.stage),
                        state.parity);  // mutant: sm90-bwd-dq-wait-ready
    };
    const auto exponentiate = [&] {
      ptx::wgmma_results(s);
#pragma unroll
      for (int e = 0; e < S::kStep / 2; ++e) {
        probabilities[e] = ptx::exp2_approx(fmaf(s[e], exponent, -lse[e % 4 / 2]));
      }
    };
    const auto differ = [&] {
      ptx::wgmma_results(ds);
#pragma unroll
      for (int e = 0; e < S::kStep / 2; ++e) {
        ds[e] = probabilities[e] * (ds[e] - delta[e % 4 / 2]);  // mutant: sm90-bwd-dq-ds
      }
    };

    ptx::barrier_wait(storage.resident_full(), parity);  // mutant: sm90-bwd-dq-wait-resident-full
    parity ^= 1;
    if (steps > 0) {
      wait_for_step(0, ring);
      start_scores();
      ptx::wgmma_wait<0>();
      exponentiate();
      wait_for_step(1, ring);
#pragma unroll 1
      for (int i = 1; i < steps; ++i) {
        const int now = ring.stage;
        // mutant: sm90-bwd-dq-start-rows
        start_rows<Math, kDim, kTileRows, S::kStep>(ds, douts, row, storage.stream(1, now));
        ring.advance();
        start_scores();
        // mutant: sm90-bwd-dq-wait-dp
        ptx::wgmma_wait<1>();  // for dP
        differ();
        pack<Math, S::kStep>(differences, ds);  // mutant: sm90-bwd-dq-pack
        // mutant: sm90-bwd-dq-start-columns
        start_columns<Math, kDim, S::kStep>(dq, differences, storage.stream(0, now));
        // mutant: sm90-bwd-dq-wait-scores
        ptx::wgmma_wait<1>();  // for the scores
        exponentiate();
        // Here, because it branches: else ptxas waits for dQ before the exponentials.
        wait_for_step(i + 1, ring);
        ptx::wgmma_wait<0>();  // mutant: sm90-bwd-dq-wait-dq
        ptx::wgmma_results(dq);
        release(storage.empty(now));
      }
      start_rows<Math, kDim, kTileRows, S::kStep>(ds, douts, row, storage.stream(1, ring.stage));
      ptx::wgmma_wait<0>();
      release(storage.resident_empty());
      differ();
      // Keys that a query doesn't see: past the segment, or later.
      // mutant: sm90-bwd-dq-mask
      mask_keys(blocks_of<S::kStep>(ds), (steps - 1) * S::kStep, first, p.causal, work.tile.length,
                0.f);
      pack<Math, S::kStep>(differences, ds);
      start_columns<Math, kDim, S::kStep>(dq, differences, storage.stream(0, ring.stage));
      ptx::wgmma_wait<0>();  // mutant: sm90-bwd-dq-wait-last
      ptx::wgmma_results(dq);
      release(storage.empty(ring.stage));
      ring.advance();
    } else {
      release(storage.resident_empty());  // mutant: sm90-bwd-dq-release-resident-empty
    }
#pragma unroll 1
    for (int i = steps; i < work.steps; ++i) {  // mutant: sm90-bwd-dq-loop
      pass<kDim>(storage, ring);
    }
    if (steps > 0) {
      // mutant: sm90-bwd-dq-store
      store_gradient<Math, kDim>(dq, p.scale, staging, work.tile.length - first, params.dq,
                                 work.tile.begin + first, work.head, p.rotary);
    }
  }
}

// ---- kernels

template <class Math, int kDim, bool kKeys>
__device__ __forceinline__ void work_on_tiles(const AttentionGradParams& params,
                                              const GradMaps& maps) {
  extern __shared__ __align__(1024) char storage_bytes[];
  const GradSharedStorage<kDim> storage{ptx::shared_address(storage_bytes)};
  specialise(
      storage,
      [&](int) {
        if (threadIdx.x == 0) produce<kDim, kKeys>(params, maps, storage);
        const int which = static_cast<int>(threadIdx.x / kWarpSize) - 1;
        // mutant: sm90-bwd-kernel-if-which
        if (which == 0 || which == 1) follow<kDim, kKeys>(params, storage, which);
        if (threadIdx.x == 3 * kWarpSize) {
          const AttentionParams& p = params.forward;
          const int64_t heads = kKeys ? p.kv_heads * params.group_parts : p.heads;
          storage.scheduler().run(p, kKeys, static_cast<unsigned>(heads));
        }
      },
      [&](int consumer) {
        if constexpr (kKeys) {
          consume_keys<Math, kDim>(params, storage, consumer);
        } else {
          consume_queries<Math, kDim>(params, storage, consumer);
        }
      },
      maps.resident[0], maps.stream[0], maps.resident[1], maps.stream[1]);
}

template <class Math, int kDim>
__global__ void __launch_bounds__(Sm90Block::kThreads, 1)
    sm90_backward_dkdv(const AttentionGradParams params, const __grid_constant__ TensorMaps k,
                       const __grid_constant__ TensorMaps v, const __grid_constant__ TensorMaps q,
                       const __grid_constant__ TensorMaps dout) {
  work_on_tiles<Math, kDim, true>(params, {{&k, &v}, {&q, &dout}});
}

template <class Math, int kDim>
__global__ void __launch_bounds__(Sm90Block::kThreads, 1)
    sm90_backward_dq(const AttentionGradParams params, const __grid_constant__ TensorMaps q,
                     const __grid_constant__ TensorMaps dout, const __grid_constant__ TensorMaps k,
                     const __grid_constant__ TensorMaps v) {
  work_on_tiles<Math, kDim, false>(params, {{&q, &dout}, {&k, &v}});
}

// ---- the launch

template <class Math, int kDim>
int launch_backward(const AttentionGradParams& params, void* stream) {
  using S = Sm90GradShape<kDim>;
  const AttentionParams& p = params.forward;
  if (p.tokens == 0) return cudaSuccess;  // which no tensor map describes
  if (const int error = launch_preprocess<Math, kDim>(params, stream)) return error;
  // mutant: sm90-bwd-launch-backward-views
  const HeadsView views[] = {p.q, params.dout, p.k, p.v};
  TensorMaps resident[4] = {}, streams[4] = {};
  for (int i = 0; i < 4; ++i) {
    const int64_t heads = i < 2 ? p.heads : p.kv_heads;  // mutant: sm90-bwd-launch-backward-heads
    int error = make_maps<kDim, kTileRows>(&resident[i], p.dtype, views[i], p.tokens, heads);
    // mutant: sm90-bwd-launch-map
    if (!error) error = make_maps<kDim, S::kStep>(&streams[i], p.dtype, views[i], p.tokens, heads);
    if (error) return error;
  }
  const int64_t tiles = list_length(p), parts = params.group_parts;
  const bool in_parts = params.dkv_parts != nullptr;
  const int64_t group = p.heads / p.kv_heads;
  // No part may be empty: nobody would write it.
  if (parts < 1 || (parts - 1) * ((group + parts - 1) / parts) >= group || (parts > 1) != in_parts)
    return cudaErrorInvalidValue;
  if (const int error =
          launch_items(sm90_backward_dkdv<Math, kDim>, tiles * p.kv_heads * parts, S::kShared,
                       stream, params, resident[2], resident[3], streams[0], streams[1])) {
    return error;
  }
  if (in_parts) {
    const int64_t units = 2 * p.tokens * p.kv_heads * (kDim / 8);
    const int error =
        launch(sm90_backward_join<Math, kDim>, (units + 255) / 256, 256, 0, stream, params);
    if (error) return error;
  }
  return launch_items(sm90_backward_dq<Math, kDim>, tiles * p.heads, S::kShared, stream, params,
                      resident[0], resident[1], streams[2], streams[3]);
}

}  // namespace

int sm90_backward_cuda(const AttentionGradParams& p, void* stream) {
  const AttentionParams& f = p.forward;
  if (f.dtype == DType::kFloat32 || f.tokens > 0x7fffffff) return cudaErrorInvalidValue;
  if (f.segments == 0) return cudaSuccess;
  VLMK_INSTANCES(launch_backward, f.dtype, f.head_dim)
}

}  // namespace vlmk
