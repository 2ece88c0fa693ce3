// Attention, compiled once per instruction set (dispatch.h).
//
// Scores are computed transposed, S^T = K Q^T, with up to 64 queries in vector lanes: row maxima
// and sums are then vertical operations, and a ragged number of keys needs no masks, because keys
// are loop counts. Up to 64 keys, the softmax is one pass; beyond, it is online over blocks of 64.
// Every product is gemm() of gemm.h on panels in cache:
//   forward   S^T = K Q^T   O += P V
//   backward  S^T = K Q^T   dP^T = V dO^T   dV += P^T dO   dK += dS^T Q   dQ += dS K
// Math = Fp32: storage types are converted while packing, all arithmetic is fp32. Math = Bf16Pairs
// (AVX-512 BF16): products of bf16 summed in fp32; P and dS are rounded to bf16 before their
// products, as plain torch does. AMX does the same another way, with fp16 too, and fp32 by products
// of bf16: tiles.inl.
//
// Speed of light: 4 D (forward) or 10 D (backward) FLOPs per query-key pair, against one exp2
// (about 12 operations) per pair: GEMM-bound for every D >= 64, if the rows arrive in time; see
// prefetcher.h. docs/attention-figures.md has the figures.
#include <omp.h>

#include <type_traits>

#include "cpu/attention/attention.h"
#include "cpu/attention/gather.inl"
#include "cpu/attention/pack.inl"
#include "cpu/attention/prefetch.inl"
#include "cpu/attention/rotary.inl"
#include "cpu/gemm.h"
#include "cpu/ranges.h"
#include "cpu/scratch.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

constexpr float kLowest = -3e38f;
// How far, in powers of two, scores may be above what their row's exponentials are relative to
// (method: FlashAttention-4). On tiles, to scale a row's sums for each larger score takes as long
// as its exponentials (the forward of 1,024 tokens: 1.1x).
constexpr float kSlack = 8;

// Scores are kept as sign(scale) * q.k, whose order is that of the probabilities; |scale| and the
// change to base 2 come in one FMA before exp2. So a score has no rounding that plain torch's has
// not, and -inf * scale is no NaN, scale = 0 included.
VLMK_INLINE float score_sign(const AttentionParams& p) { return p.scale < 0 ? -1.f : 1.f; }
VLMK_INLINE float score_scale(const AttentionParams& p) {
  const float scale = __builtin_fabsf(p.scale) * 1.44269504f;
  return scale > 1e-30f ? scale : 1e-30f;
}

// Of exp2's polynomial: fp32 probabilities are within 1.5e-7, those of fp16 within a hundredth of a
// rounding, those of bf16 within a twentieth, as FlashAttention-4's polynomial is.
template <class T>
constexpr int kDegree = std::is_same_v<T, float>     ? 5
                        : std::is_same_v<T, Float16> ? 4
                                                     : 3;

// Scores of keys after their query become -inf. s [keys, kLaneRow]: key i is at position k0 + i,
// the query of lane j at q0 + j.
VLMK_INLINE void mask_causal(float* s, int64_t k0, int64_t keys, int64_t q0, int vectors) {
  for (int64_t i = 0; i < keys; ++i) {
    for (int j = 0; j < vectors; ++j) {
      float* at = s + i * kLaneRow + j * kWidth;
      const int first = static_cast<int>(k0 + i - q0) - j * kWidth;
      if (first > 0) store(at, keep_from(first, load(at), set1(-__builtin_inff())));
    }
  }
}

// The epilogue of a product of scores: stores them, and the largest of each query while they are in
// registers.
struct ScoreEpilogue {
  static constexpr bool kByRows = true;
  float* scores;  // [keys, kLaneRow]
  float* maxima;  // [64], of those computed so far

  template <int kRows, int kVectors, class Finish>
  VLMK_MEMBER void put(const Finish& finish, int row, int column) const {
    float* to = scores + row * kLaneRow + column;
    Vec largest[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i, to = next_row(to, kLaneRow)) {
      const Vec(&sums)[kVectors] = finish(i);
#pragma GCC unroll 5
      for (int j = 0; j < kVectors; ++j) {
        store(to + j * kWidth, sums[j]);
        largest[j] = i > 0 ? max(largest[j], sums[j]) : sums[j];
      }
    }
#pragma GCC unroll 5
    for (int j = 0; j < kVectors; ++j) {
      float* const at = maxima + column + j * kWidth;
      store(at, row > 0 ? max(largest[j], load(at)) : largest[j]);
    }
  }
};

// Keys of a block that a vector of queries sees, of a diagonal block those up to its last query.
VLMK_INLINE int keys_seen(int keys, int vector, bool diagonal) {
  return diagonal ? minimum(keys, (vector + 1) * kWidth) : keys;
}
// A tile reads all its rows of A in each step that one of them needs: so many more keys must be 0.
VLMK_INLINE int keys_read(int keys, int seen) { return minimum(keys, seen + kMaxTileRows - 1); }

// Of the first `keys` scores of each query of a vector.
VLMK_INLINE Vec largest_of(const float* column, int keys) {
  Vec m0 = set1(kLowest), m1 = m0, m2 = m0, m3 = m0;
  int i = 0;
  for (; i + 4 <= keys; i += 4) {
    m0 = max(m0, load(column + i * kLaneRow));
    m1 = max(m1, load(column + (i + 1) * kLaneRow));
    m2 = max(m2, load(column + (i + 2) * kLaneRow));
    m3 = max(m3, load(column + (i + 3) * kLaneRow));
  }
  for (; i < keys; ++i) m0 = max(m0, load(column + i * kLaneRow));
  return max(max(m0, m1), max(m2, m3));
}

// One step of the online softmax on the scores s [keys, kLaneRow]: s becomes 2^(scale * (s - max)),
// pairs [keys / 2, 64] where Math wants them; row_max, row_sum and correction [64] are updated.
// maxima [64]: the scores' largest, not read if `diagonal`, whose scores are masked. `first`: there
// is nothing earlier. `diagonal`: of a causal segment, key i at the position of lane i. beside() is
// called once for 8 keys of a vector.
//
// Returns whether earlier sums must be multiplied by correction: not while no score is 2^kSlack
// above row_max, which exponentials are relative to.
template <class Math, int kDegree, class Beside>
VLMK_NOINLINE bool softmax_step(float* s, int all_keys, int vectors, float scale, bool first,
                                bool diagonal, const float* maxima, float* row_max, float* row_sum,
                                float* correction, Beside& beside) {
  const Vec c = set1(scale);
  bool moves = false;
  for (int j = 0; j < vectors; ++j) {
    const int keys = keys_seen(all_keys, j, diagonal);
    float* column = s + j * kWidth;
    const Vec old_max = first ? set1(kLowest) : load(row_max + j * kWidth);
    const Vec largest = diagonal ? largest_of(column, keys) : load(maxima + j * kWidth);
    const Vec rise = (largest - old_max) * c;
    const Vec new_max =
        first ? max(old_max, largest) : where_above(rise, set1(kSlack), largest, old_max);
    // The rounding of this product is the same for all keys and cancels, in the backward too; hence
    // no FMA in `moved`, which takes sums from the old product to the new.
    const Vec shift = set1(0.f) - new_max * c;

    Vec sum0 = set1(0.f), sum1 = set1(0.f);
    int i = 0;
    for (; i + 2 <= keys; i += 2) {
      if (i % 8 == 0) beside();
      const Vec e0 = exp2<kDegree>(fma(load(column + i * kLaneRow), c, shift));
      const Vec e1 = exp2<kDegree>(fma(load(column + (i + 1) * kLaneRow), c, shift));
      sum0 = sum0 + e0;
      sum1 = sum1 + e1;
      if constexpr (Math::kStep == 1) {
        store(column + i * kLaneRow, e0);
        store(column + (i + 1) * kLaneRow, e1);
      } else {
        store(column + i / 2 * kLaneRow, Math::pair(e0, e1));
      }
    }
    if (i < keys) {
      const Vec e = exp2<kDegree>(fma(load(column + i * kLaneRow), c, shift));
      sum0 = sum0 + e;
      if constexpr (Math::kStep == 1) {
        store(column + i * kLaneRow, e);
      } else {
        store(column + i / 2 * kLaneRow, Math::pair(e, set1(0.f)));
      }
    }
    for (i = keys; i < keys_read(all_keys, keys); ++i) {
      store(column + i / Math::kStep * kLaneRow, set1(0.f));
    }
    Vec sum = sum0 + sum1;
    if (!first) {
      const Vec moved = exp2(old_max * c + shift);
      store(correction + j * kWidth, moved);
      sum = fma(load(row_sum + j * kWidth), moved, sum);
      moves |= any_above(rise, set1(kSlack));
    }
    store(row_max + j * kWidth, new_max);
    store(row_sum + j * kWidth, sum);
  }
  return moves;
}

// s [keys / kStep, kLaneRow] -> to [keys / kStep, kept_row]. Of pairs, the last of an odd number of
// keys has a row of bf16.
template <class Math>
VLMK_NOINLINE void keep_probabilities(const float* s, int keys, int64_t queries, bool non_temporal,
                                      float* to) {
  const bool streams = non_temporal && reinterpret_cast<uintptr_t>(to) % 64 == 0;
  const int vectors = vectors_of(queries);
  for (int i = 0; i < keys / Math::kStep; ++i, s += kLaneRow, to += kept_row(queries)) {
    for (int j = 0; j < vectors; ++j) {
      const Vec x = load(s + j * kWidth);
      streams ? stream(to + j * kWidth, x) : store(to + j * kWidth, x);
    }
  }
  if constexpr (Math::kStep == 2) {
    for (int j = 0; keys % 2 > 0 && j < vectors; ++j) {
      store(reinterpret_cast<BFloat16*>(to) + j * kWidth, Math::even(load(s + j * kWidth)));
    }
  }
}

// The blocks of queries of an item, which several threads may take.
class QueryBlocks {
 public:
  QueryBlocks(const AttentionWork& work, const AttentionItem& item)
      : begin_(item.rows_begin),
        end_(item.rows_end),
        taken_(work.blocks_taken ? work.blocks_taken + (&item - work.items) : nullptr) {}
  // Whether there are some that are worth packing keys and values for.
  bool left() const {
    return begin_ + (__atomic_load_n(taken_, __ATOMIC_RELAXED) + 1) * kBlock < end_;
  }
  // The first row of the next one, or a row behind the last.
  int64_t take() {
    return begin_ + kBlock * (taken_ ? __atomic_fetch_add(taken_, 1, __ATOMIC_RELAXED) : own_++);
  }

 private:
  int64_t begin_, end_;
  int32_t* taken_;
  int32_t own_ = 0;
};

[[maybe_unused]] int64_t forward_floats(const AttentionParams& p, const AttentionWork& work) {
  return gathered_floats(p, work)                                  // output of a window
         + 2 * whole_blocks(work.max_seqlen) * padded(p.head_dim)  // keys, values
         + kLaneRow * (padded(p.head_dim) * 2 + kBlock)            // Q^T, output, S^T
         + 4 * kBlock;  // row_max, row_sum, correction, maxima
}

template <class T, class Math>
void forward_item(const AttentionParams& p, const AttentionItem& item, const NextItem& next,
                  const AttentionWork& work, Prefetcher& prefetcher, float* memory) {
  using Element = typename Math::Element;
  const int64_t dim = p.head_dim, ld = padded(dim), group = p.heads / p.kv_heads;
  const int64_t kv_head = item.head / group;
  const int64_t keys = p.causal ? item.rows_end : item.length;
  const int depth = steps_of<Math>(dim);
  T* const gather = take_gathered<T>(p, work, &memory);
  auto* key_buffer = reinterpret_cast<Element*>(memory);
  Element* values = key_buffer + whole_blocks(keys) * ld;    // [keys / kStep, ld]
  Element* qt = values + whole_blocks(keys) * ld;            // [depth, 64]
  auto* out = reinterpret_cast<float*>(qt) + ld * kLaneRow;  // [64, ld]
  float* s = out + ld * kLaneRow;                            // [64 keys, 64 queries]
  float* row_max = s + kBlock * kLaneRow;                    // [64]
  float* row_sum = row_max + kBlock;
  float* correction = row_sum + kBlock;
  float* maxima = correction + kBlock;

  const Rows<const T> k_rows = rows_of<const T>(p.k, p.order, item.begin, kv_head);
  const Rows<const T> v_rows = rows_of<const T>(p.v, p.order, item.begin, kv_head);
  // Of a window the queries have been used when the values are wanted: in their place, values are
  // written to lines that a first-level cache still holds.
  const bool window = keys <= kBlock && item.length <= kBlock;
  if (window) values = qt;

  // What a block's products fetch, if not all was fetched before.
  const bool fetches = work.max_seqlen > kPrefetchLength;
  const auto fetch_queries = [&](const AttentionItem& of, int64_t q0) {
    fetch_rows(query_rows<const T>(p, p.q, of.begin + q0, of.head),
               minimum(kBlock, of.rows_end - q0), dim, kForwardLooks, prefetcher);
  };
  const auto fetch_keys = [&](const AttentionItem& of, int64_t k0) {
    const int64_t n = minimum(kBlock, (p.causal ? of.rows_end : of.length) - k0);
    for (const HeadsView& x : {p.k, p.v}) {
      fetch_rows(rows_of<const T>(x, p.order, of.begin + k0, of.head / group), n, dim,
                 kForwardLooks, prefetcher);
    }
  };

  // Keys and values are packed a block at a time, when the first queries come to it.
  int64_t packed = 0;
  Panel<Math> key{};
  const auto pack_keys = [&](int64_t k0, int64_t n) {
    Element* const to = key_buffer + k0 * row_ld<Math>(dim);
    with_rotated<Math>(p, k_rows.from(k0), item.begin + k0, n, to, [&](const auto& rows) {
      key = pack_rows(Math{}, rows, n, dim, to, keys <= kInPlaceRows);
    });
    key.data -= k0 * key.ld;
  };
  Panel<Math> value{};
  const auto pack_values = [&](int64_t k0, int64_t n) {
    const int64_t row = k0 / Math::kStep;
    value = depth_panel<Math>(v_rows.from(k0), n, dim, values + row * ld, window);
    value.data -= row * value.ld;
  };

  QueryBlocks blocks(work, item);
  for (int64_t q0; (q0 = blocks.take()) < item.rows_end;) {
    const int64_t queries = minimum(kBlock, item.rows_end - q0);
    const int lanes = vectors_of(queries);
    const int64_t place = item.begin + q0;
    with_rotated<Math>(
        p, query_rows<const T>(p, p.q, place, item.head), place, queries, out,
        [&](const auto& rows) { pack_lanes(rows, queries, dim, score_sign(p), qt); });
    const RowEpilogue<false, T> results{result_rows_of(p, item, work, p.out, gather).from(q0), dim,
                                        correction, work.non_temporal};
    const auto invert_sums = [&] {
      for (int j = 0; j < lanes; ++j) {
        store(correction + j * kWidth, set1(1.f) / load(row_sum + j * kWidth));
      }
    };
    const int64_t key_end = p.causal ? q0 + queries : keys;
    const bool one_pass = key_end <= kBlock;  // results leave from the product
    for (int64_t k0 = 0; k0 < key_end; k0 += kBlock) {
      const int n = static_cast<int>(minimum(kBlock, key_end - k0));
      const bool first = k0 == 0;
      const bool diagonal = p.causal && k0 == q0;
      if (k0 == packed) {
        pack_keys(k0, n);
        if (!window) pack_values(k0, n);
        packed += n;
      }
      if (fetches) {
        prefetcher.clear();
        if (k0 + kBlock < key_end) {
          if (k0 + kBlock == packed) fetch_keys(item, packed);
        } else {
          if (!work.non_temporal) fetch_rows(results.rows, queries, dim, kForwardLooks, prefetcher);
          if (q0 + kBlock < item.rows_end) {
            fetch_queries(item, q0 + kBlock);
          } else if (const AttentionItem* other = next.get()) {
            fetch_queries(*other, other->rows_begin);
            fetch_keys(*other, 0);
          }
        }
        prefetcher.spread_over(2 * kBlock * kBlock * dim / kStepSize);
      }
      const GemmArgs<Math> scores{key.data + k0 * key.ld,
                                  key.ld,
                                  qt,
                                  kLaneRow,
                                  s,
                                  kLaneRow,
                                  n,
                                  lanes,
                                  depth,
                                  Add::kNothing,
                                  nullptr,
                                  diagonal ? Causal::kColumnsFromRow : Causal::kAll};
      if (diagonal) {
        gemm<Math, false>(scores, prefetcher);
        mask_causal(s, k0, n, q0, lanes);
      } else {
        gemm<Math, false>(scores, prefetcher, ScoreEpilogue{s, maxima});
      }
      bool moves = false;
      const auto softmax = [&](auto& beside) {
        moves = softmax_step<Math, kDegree<T>>(s, n, lanes, score_scale(p), first, diagonal, maxima,
                                               row_max, row_sum, correction, beside);
      };
      if constexpr (Math::kStep == 1) {
        const auto nothing = [] {};
        softmax(nothing);
        if (window) pack_values(0, n);
      } else {
        // A window's values are packed beside the exponentials, which leave loads, stores and
        // shuffles idle (bf16 on Zen 4, forward: 1.01 to 1.02x).
        DepthPacker<T> packer(v_rows, window ? n : 0, dim, values);
        softmax(packer);
        packer.finish();
        if (window) value = {values, ld};
      }
      if (float* kept = probabilities_of<Math>(p, item, item.head)) {
        keep_probabilities<Math>(s, n, queries, work.non_temporal, kept);
      }
      if (one_pass) invert_sums();
      const GemmArgs<Math> product{reinterpret_cast<const Element*>(s),
                                   kLaneRow,
                                   value.data + k0 / Math::kStep * value.ld,
                                   value.ld,
                                   out,
                                   ld,
                                   static_cast<int>(queries),
                                   vectors_of(dim),
                                   steps_of<Math>(n),
                                   first ? Add::kNothing : (moves ? Add::kScaledC : Add::kC),
                                   correction,
                                   diagonal ? Causal::kStepsUpToRow : Causal::kAll};
      if (one_pass) {
        gemm<Math, true>(product, prefetcher, results);
      } else {
        gemm<Math, true>(product, prefetcher);
      }
    }
    const int64_t first_row = item.head * p.tokens + place;
    copy(row_max, queries, p.row_max + first_row);
    copy(row_sum, queries, p.row_sum + first_row);
    if (one_pass) continue;
    invert_sums();
    store_rows<false>(out, ld, queries, dim, correction, results.rows, work.non_temporal);
  }
  write_gathered(p, item, work, p.out, gather);
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk

#include "cpu/attention/backward.inl"
#if defined(VLMK_TILES)
#include "cpu/attention/tiles_backward.inl"
#include "cpu/attention/tiles_forward.inl"
#endif

namespace vlmk {
namespace VLMK_ISA {
namespace {

// Runs run(params, item, next, work, prefetcher, memory) over all items on torch's threads. A
// thread goes through chunks of items. Of short segments it has a range, and takes the next chunk
// while it works on one, so that it can have prefetch(params, first item, last item, non_temporal,
// prefetcher) name what to fetch; of longer ones, which are chunks of their own, run does, for the
// item that is `next`.
template <class Params>
using RunItem = void (*)(const Params&, const AttentionItem&, const NextItem&, const AttentionWork&,
                         Prefetcher&, float*);
template <class Params>
using PrefetchItems = void (*)(const Params&, const AttentionItem&, const AttentionItem&, bool,
                               Prefetcher&);

template <class Params>
void run_items(const Params& params, AttentionWork work, int64_t floats, bool non_temporal,
               RunItem<Params> run, PrefetchItems<Params> prefetch) {
  work.non_temporal = non_temporal;
  const int64_t chunks = (work.count + work.chunk - 1) / work.chunk;
  const auto end_of = [&](int64_t chunk) { return minimum((chunk + 1) * work.chunk, work.count); };
  // Items that share a dq must not wait behind another one of the same thread.
  const bool prefetches = work.max_seqlen <= kPrefetchLength;
  Ranges ranges(prefetches ? (chunks + work.chunks - 1) / work.chunks : 0, omp_get_max_threads());
  bool out_of_memory = false;
  int64_t taken = 0;
#pragma omp parallel if (chunks > 1)
  {
    if (!scratch(static_cast<size_t>(floats))) {
#pragma omp atomic write
      out_of_memory = true;
    }
#pragma omp barrier  // nobody starts unless all can: others wait for their shares of dq

    // The last chunk that this thread has taken, and how many more of them it has.
    int64_t last = 0, left = 0;
    const auto take = [&] {
      if (left-- > 0) return ++last;
      if (prefetches) {
        last = ranges.take(omp_get_thread_num());
      } else {
#pragma omp atomic capture
        last = taken++;
      }
      left = work.chunks - 1;
      return last = last < 0 ? chunks : last * work.chunks;
    };
    Prefetcher prefetcher;
#if defined(VLMK_TILES)
    const TileScope tiles;
#endif
    int64_t next = 0;
    for (int64_t chunk = out_of_memory ? chunks : take(); chunk < chunks;
         chunk = prefetches ? next : take()) {
      if (prefetches) next = take();
      if (prefetches && next < chunks) {
        prefetch(params, work.items[next * work.chunk], work.items[end_of(next) - 1], non_temporal,
                 prefetcher);
      }
      float* memory = scratch(static_cast<size_t>(floats));
      for (int64_t i = chunk * work.chunk; i < end_of(chunk); ++i) {
        run(params, work.items[i], {work, taken}, work, prefetcher, memory);
      }
      prefetcher.finish();
    }
    // Cores are not equally fast, all the less after a pause: then blocks of others' last items.
    for (int64_t i = work.count - 1; i >= 0 && work.blocks_taken && !out_of_memory; --i) {
      if (!QueryBlocks(work, work.items[i]).left()) continue;
      run(params, work.items[i], {work, taken}, work, prefetcher,
          scratch(static_cast<size_t>(floats)));
    }
    if (non_temporal) fence_streams();
  }
  if (out_of_memory) throw_out_of_memory(floats);
}

#if defined(VLMK_TILES)
// Calls use(T{}), T the type that p has.
template <class Use>
void with_type(const AttentionParams& p, const Use& use) {
  if (p.dtype == DType::kFloat32) return use(float{});
  p.dtype == DType::kFloat16 ? use(Float16{}) : use(BFloat16{});
}
#endif

}  // namespace

void attention_forward_items(const AttentionParams& p, const AttentionWork& work) {
  const bool non_temporal = past_caches(p, work, p.out);
#if defined(VLMK_TILES)
  with_type(p, [&](auto zero) {
    using T = decltype(zero);
    run_items(p, work, forward_tiles_floats<T>(p, work), non_temporal, forward_tiles<T>,
              prefetch_forward<T>);
  });
#else
  const auto run = [&](auto item, auto prefetch) {
    run_items<AttentionParams>(p, work, forward_floats(p, work), non_temporal, item, prefetch);
  };
#if defined(VLMK_BF16_PANELS)
  run(work.bf16_dots ? forward_item<BFloat16, Bf16Pairs> : forward_item<BFloat16, Fp32>,
      prefetch_forward<BFloat16>);
#else
  switch (p.dtype) {
    case DType::kFloat32:
      return run(forward_item<float, Fp32>, prefetch_forward<float>);
    case DType::kBFloat16:
      return run(forward_item<BFloat16, Fp32>, prefetch_forward<BFloat16>);
    case DType::kFloat16:
      return run(forward_item<Float16, Fp32>, prefetch_forward<Float16>);
  }
#endif
#endif
}

void attention_backward_items(const AttentionGradParams& g, const AttentionWork& work) {
  const AttentionParams& p = g.forward;
  const bool non_temporal =
      past_caches(p, work, g.dq) && past_caches(p, work, g.dk) && past_caches(p, work, g.dv);
#if defined(VLMK_TILES)
  with_type(p, [&](auto zero) {
    using T = decltype(zero);
    run_items(g, work, backward_tiles_floats<T>(p, work), non_temporal, backward_tiles<T>,
              prefetch_backward<T>);
  });
#else
  const auto run = [&](auto item, auto prefetch) {
    run_items<AttentionGradParams>(g, work, backward_floats(p, work), non_temporal, item, prefetch);
  };
#if defined(VLMK_BF16_PANELS)
  work.bf16_dots ? run(backward_item<BFloat16, Bf16Pairs>, prefetch_backward<BFloat16, Bf16Pairs>)
                 : run(backward_item<BFloat16, Fp32>, prefetch_backward<BFloat16>);
#else
  switch (p.dtype) {
    case DType::kFloat32:
      return run(backward_item<float, Fp32>, prefetch_backward<float>);
    case DType::kBFloat16:
      return run(backward_item<BFloat16, Fp32>, prefetch_backward<BFloat16>);
    case DType::kFloat16:
      return run(backward_item<Float16, Fp32>, prefetch_backward<Float16>);
  }
#endif
#endif
}

}  // namespace VLMK_ISA
}  // namespace vlmk
