// The backward of a segment and key/value head, or of some of its keys. Included by
// kernel.cpp only, after what both directions share.
#pragma once
#include "cpu/attention/attention.h"
#include "cpu/attention/gather.inl"
#include "cpu/attention/rotary.inl"
#include "cpu/counter.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// delta [64] = sum over dim of out * dout, a row's share of the softmax's gradient.
template <class T>
VLMK_NOINLINE void row_dots(const Rows<T>& outs, const Rows<T>& douts, int64_t n, int64_t dim,
                            float* delta) {
  const int64_t whole = dim / kWidth * kWidth;
  for (int64_t i = 0; i < n; ++i) {
    T *out = outs[i], *dout = douts[i];
    Vec sum = set1(0.f);
    for (int64_t d = 0; d < whole; d += kWidth) sum = fma(load(out + d), load(dout + d), sum);
    if (whole < dim) {
      const int left = static_cast<int>(dim - whole);
      sum = fma(load_n(out + whole, left), load_n(dout + whole, left), sum);
    }
    delta[i] = reduce_add(sum);
  }
}

// What softmax_gradient leaves for the three products that follow it.
template <class Math>
struct Gradients {
  const float* kept;  // of kKept: probabilities_of the segment, there are no scores
  float* st;          // [keys, kLaneRow] scores -> P^T
  float* dpt;         // [keys, kLaneRow] dP^T -> dS^T / scale; of bf16: pairs along keys
  typename Math::Element* p_row;  // of bf16: [keys, 32] P^T, pairs along queries; Fp32: st
  typename Math::Element* ds_row;
  int row_ld;
};

// Of probabilities_of a segment of so many tokens, key i and vector j of the queries.
template <class Math>
VLMK_INLINE Vec kept_probability(const float* kept, int tokens, int i, int j) {
  const float* const row = kept + i / Math::kStep * kept_row(tokens);
  if constexpr (Math::kStep == 1) {
    return load(row + j * kWidth);
  } else {
    if (i % 2 > 0) return Math::odd(load(row + j * kWidth));
    return i + 1 < tokens ? Math::even(load(row + j * kWidth))
                          : load(reinterpret_cast<const BFloat16*>(row) + j * kWidth);
  }
}

// softmax_gradient of kVectors vectors of queries, from vector j on, and keys that all of them see.
// Two at a time where they are rounded: a vector of bf16 holds both (1.25x).
template <class Math, int kDegree, bool kAllKeys, bool kKept, int kVectors>
VLMK_INLINE void gradient_of_vectors(const Gradients<Math>& g, int all_keys, int j, int keys,
                                     float scale, const float* row_max, const float* inverse_sum,
                                     const float* delta) {
  constexpr bool kReads = kKept && Math::kStep > 1;  // probabilities again, not from st
  const int read = keys_read(all_keys, keys);
  const Vec c = set1(scale);
  Vec shift[kVectors], inverse[kVectors], d[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    shift[v] = set1(0.f) - load(row_max + (j + v) * kWidth) * c;
    inverse[v] = load(inverse_sum + (j + v) * kWidth);
    d[v] = load(delta + (j + v) * kWidth);
  }
  float *const st = g.st + j * kWidth, *const dpt = g.dpt + j * kWidth;
  const auto at = [](float* column, int i, int v) { return column + i * kLaneRow + v * kWidth; };
  const auto probability = [&](int i, int v) {
    if constexpr (kKept) return kept_probability<Math>(g.kept, all_keys, i, j + v) * inverse[v];
    return exp2<kDegree>(fma(load(at(st, i, v)), c, shift[v])) * inverse[v];
  };
  if constexpr (kAllKeys) {
    for (int v = 0; v < kVectors; ++v) {
      Vec sums[2] = {set1(0.f), set1(0.f)};
      const auto add = [&](int i, Vec& sum) {
        const Vec p = probability(i, v);
        if (!kReads) store(at(st, i, v), p);
        sum = fma(p, load(at(dpt, i, v)), sum);
      };
      int i = 0;
      for (; i + 2 <= keys; i += 2) {
        add(i, sums[0]);
        add(i + 1, sums[1]);
      }
      if (i < keys) add(i, sums[0]);
      d[v] = sums[0] + sums[1];
    }
  }
  const auto final_probability = [&](int i, int v) {
    return kAllKeys && !kReads ? load(at(st, i, v)) : probability(i, v);
  };
  const auto gradient = [&](int i, int v, Vec p) { return p * (load(at(dpt, i, v)) - d[v]); };
  if constexpr (Math::kStep == 1) {
    for (int i = 0; i < keys; ++i) {
      const Vec p = final_probability(i, 0);
      store(at(dpt, i, 0), gradient(i, 0, p));
      if (!kAllKeys) store(at(st, i, 0), p);
    }
    for (int i = keys; i < read; ++i) {
      store(at(st, i, 0), set1(0.f));
      store(at(dpt, i, 0), set1(0.f));
    }
  } else {
    // Rows i and i + 1: how many of them are keys, and how many are read.
    const auto put = [&](int i, int inside, int stored) __attribute__((always_inline)) {
      Vec p[2][kVectors], ds[2][kVectors];
#pragma GCC unroll 2
      for (int u = 0; u < 2; ++u) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          p[u][v] = u < inside ? final_probability(i + u, v) : set1(0.f);
          ds[u][v] = u < inside ? gradient(i + u, v, p[u][v]) : set1(0.f);
        }
        if (u >= stored) continue;
        const auto row = [&](typename Math::Element* rows) {
          return reinterpret_cast<BFloat16*>(rows + (i + u) * g.row_ld) + j * kWidth;
        };
        store_vectors(row(g.p_row), p[u]);
        store_vectors(row(g.ds_row), ds[u]);
      }
      // Row i / 2 was read before: it is row i or an earlier one.
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) store(at(dpt, i / 2, v), Math::pair(ds[0][v], ds[1][v]));
    };
    int i = 0;
    for (; i + 2 <= keys; i += 2) put(i, 2, 2);
    for (; i < read; i += 2) put(i, keys - i, read - i);
  }
}

// kAllKeys: a row's share of the softmax's gradient is the sum of P dP over its keys, which are all
// here; else it is given as delta. kKept: so are probabilities. `diagonal` as in softmax_step.
template <class Math, int kDegree, bool kAllKeys, bool kKept = false>
VLMK_NOINLINE void softmax_gradient(const Gradients<Math>& g, int all_keys, int vectors,
                                    float scale, bool diagonal, const float* row_max,
                                    const float* inverse_sum, const float* delta) {
  constexpr int kVectors = Math::kStep;
  int j = 0;
  for (; !diagonal && j + kVectors <= vectors; j += kVectors) {
    gradient_of_vectors<Math, kDegree, kAllKeys, kKept, kVectors>(g, all_keys, j, all_keys, scale,
                                                                  row_max, inverse_sum, delta);
  }
  for (; j < vectors; ++j) {
    gradient_of_vectors<Math, kDegree, kAllKeys, kKept, 1>(
        g, all_keys, j, keys_seen(all_keys, j, diagonal), scale, row_max, inverse_sum, delta);
  }
}

// Of the queries from `place` on: row_max, 1 / row_sum, 0 for those that are not there; delta
// becomes 0. [64] each.
VLMK_INLINE void load_stats(const AttentionParams& p, int64_t head, int64_t place, int64_t queries,
                            float* row_max, float* inverse_sum, float* delta) {
  const float* max_of = p.row_max + head * p.tokens + place;
  const float* sum_of = p.row_sum + head * p.tokens + place;
  const Vec zero = set1(0.f);
  for (int64_t i = 0; i < kBlock; i += kWidth) {
    const auto lanes = static_cast<int>(minimum(kWidth, queries - i));
    Vec maximum = zero, inverse = zero;
    if (lanes > 0) {
      maximum = load_first(max_of + i, lanes);
      inverse = keep_from(lanes, zero, set1(1.f) / load_first(sum_of + i, lanes));
    }
    store(row_max + i, maximum);
    store(inverse_sum + i, inverse);
    store(delta + i, zero);
  }
}

// n rows of q or k from `place` on, rotated where there is a table, as both operands of Fp32
// products: -> dst [n, padded(dim)], or where they lie.
template <class T>
VLMK_INLINE Panel<Fp32> pack_both(const AttentionParams& p, const Rows<const T>& x, int64_t place,
                                  int64_t n, float* dst, bool few) {
  if (!p.rotary) return depth_panel<Fp32>(x, n, p.head_dim, dst, few);
  const auto ld = static_cast<ptrdiff_t>(padded(p.head_dim));
  rotate_rows<false>(x, rotary_rows(p, place), n, p.head_dim, Rows<float>{dst, ld});
  return {dst, ld};
}

// A gradient of rotated rows src [n, padded(dim)], from `place` on, to where it belongs.
template <class T, class F = NoFetch>
void store_rotated_back(const AttentionParams& p, float* src, int64_t place, int64_t n,
                        const RowEpilogue<true, T>& to, F fetch = {}) {
  const auto ld = static_cast<ptrdiff_t>(padded(p.head_dim));
  if (p.rotary) {
    const Rows<float> rows{src, ld};
    rotate_rows<true>(rows, rotary_rows(p, place), n, p.head_dim, rows);
  }
  store_rows<true>(src, ld, n, p.head_dim, to.scale, to.rows, to.non_temporal, fetch);
}

[[maybe_unused]] int64_t backward_floats(const AttentionParams& p, const AttentionWork& work) {
  const int64_t ld = padded(p.head_dim);
  return 3 * gathered_floats(p, work)             // dq, dk, dv of windows
         + 5 * whole_blocks(work.max_rows) * ld   // keys in two layouts, values, dk, dv
         + kLaneRow * (5 * ld + 3 * kBlock + 3);  // Q^T, dO^T, Q, dO, dq, S^T, dP^T, pairs, 3 rows
}

// Orders the items that add their keys' shares to dq of one block of queries, where several do.
struct DqSemaphore {
  int32_t* done = nullptr;  // null: nobody else adds
  int32_t before = 0;       // items that add first
  bool last = true;
  float* dq = nullptr;  // [queries, padded(dim)]

  DqSemaphore(const AttentionItem& item, const AttentionParams& p, int64_t head, int64_t q0,
              int64_t queries) {
    if (!item.shared_dq) return;
    const SharedDq& shared = *item.shared_dq;
    const int64_t blocks = (item.length + kBlock - 1) / kBlock;
    const int64_t end = p.causal ? q0 + queries : item.length;  // of the keys that take part
    done = shared.done + head * blocks + q0 / kBlock;
    before = static_cast<int32_t>(item.rows_begin / shared.rows);
    last = before == (end - 1) / shared.rows;
    // mutant: shared-dq
    dq = shared.dq + (head * whole_blocks(item.length) + q0) * padded(p.head_dim);
  }
  void wait() const {
    if (done) wait_until(done, before);
  }
  void release() const {
    if (done) set_counter(done, before + 1);
  }
};

template <class T, class Math>
void backward_item(const AttentionGradParams& g, const AttentionItem& item, const NextItem& next,
                   const AttentionWork& work, Prefetcher& prefetcher, float* memory) {
  using Element = typename Math::Element;
  const AttentionParams& p = g.forward;
  const int64_t dim = p.head_dim, ld = padded(dim), length = item.length, kv_head = item.head;
  const int64_t keys_begin = item.rows_begin, keys = item.rows_end - keys_begin;
  const int64_t keys_place = item.begin + keys_begin;
  const int64_t group = p.heads / p.kv_heads, rows_ld = whole_blocks(keys) * ld;
  const int columns = vectors_of(dim), depth = steps_of<Math>(dim);
  T* const dq_gather = take_gathered<T>(p, work, &memory);
  T* const dk_gather = take_gathered<T>(p, work, &memory);
  T* const dv_gather = take_gathered<T>(p, work, &memory);
  float* dk = memory;  // [keys, ld]
  float* dv = dk + rows_ld;
  auto* key_depth = reinterpret_cast<Element*>(dv + rows_ld);  // [keys / kStep, ld]
  Element* key_buffer = key_depth + rows_ld;
  Element* value_buffer = key_buffer + rows_ld;
  Element* qt = value_buffer + rows_ld;  // [depth, 64]
  Element* gt = qt + ld * kLaneRow;
  Element* q_depth = gt + ld * kLaneRow;  // [64 / kStep, ld]
  Element* g_depth = q_depth + ld * kBlock;
  float* local_dq = reinterpret_cast<float*>(g_depth) + ld * kBlock;  // [64, ld]
  float* st = local_dq + ld * kBlock;                                 // [64 keys, 64 queries]
  float* dpt = st + kBlock * kLaneRow;
  Gradients<Math> gradients{nullptr, st, dpt, nullptr, nullptr, kLaneRow};
  if constexpr (Math::kStep == 1) {
    gradients.p_row = st;
    gradients.ds_row = dpt;
  } else {
    gradients.p_row = reinterpret_cast<Element*>(dpt + kBlock * kLaneRow);
    gradients.ds_row = gradients.p_row + kBlock * kBlock / 2;
    gradients.row_ld = kBlock / 2;
  }
  float* row_max = dpt + 2 * kBlock * kLaneRow;  // [64]
  float* inverse_sum = row_max + kBlock;
  float* delta = inverse_sum + kBlock;

  const Rows<const T> k_rows = rows_of<const T>(p.k, p.order, keys_place, kv_head);
  const Rows<const T> v_rows = rows_of<const T>(p.v, p.order, keys_place, kv_head);

  // What a block's products fetch, if not all was fetched before.
  const bool fetches = work.max_seqlen > kPrefetchLength;
  const auto fetch_results = [&](const Rows<T>& rows, int64_t n) {
    if (!work.non_temporal) fetch_rows(rows, n, dim, kBackwardLooks, prefetcher);
  };
  const auto fetch_queries = [&](const AttentionItem& of, int64_t q0, int64_t head) {
    const int64_t place = of.begin + q0, n = minimum(kBlock, of.length - q0);
    fetch_rows(query_rows<const T>(p, p.q, place, head), n, dim, kBackwardLooks, prefetcher);
    fetch_rows(rows_of<const T>(g.dout, p.order, place, head), n, dim, kBackwardLooks, prefetcher);
    if (needs_no_out(of.length)) return;
    fetch_rows(rows_of<const T>(p.out, p.order, place, head), n, dim, kBackwardLooks, prefetcher);
  };
  const auto fetch_keys = [&](const AttentionItem& of, int64_t k0) {
    const int64_t place = of.begin + of.rows_begin + k0;
    const int64_t n = minimum(kBlock, of.rows_end - of.rows_begin - k0);
    for (const HeadsView& x : {p.k, p.v}) {
      fetch_rows(rows_of<const T>(x, p.order, place, of.head), n, dim, kBackwardLooks, prefetcher);
    }
  };

  // Keys and values are packed a block at a time, when the first queries come to it.
  int64_t packed = 0;
  Panel<Math> key{}, value{};            // A of K Q^T and V dO^T
  Panel<Math> key_steps{key_depth, ld};  // B of dS K
  const bool keeps = probabilities_of<Math>(p, item, kv_head * group) != nullptr;
  const auto pack_block = [&](int64_t k0, int64_t n) {
    const bool once = keys <= kInPlaceRows;
    const Rows<const T> rows = k_rows.from(k0);
    Element* const depth_to = key_depth + k0 / Math::kStep * ld;
    if constexpr (Math::kStep == 1) {
      key = pack_both(p, rows, keys_place + k0, n, depth_to, once);
    } else {
      Element* const to = key_buffer + k0 * row_ld<Math>(dim);
      with_rotated<Math>(p, rows, keys_place + k0, n, to, [&](const auto& rotated) {
        pack_depth(rotated, n, dim, depth_to);
        if (!keeps) key = pack_rows(Math{}, rotated, n, dim, to, once);
      });
    }
    value = pack_rows(Math{}, v_rows.from(k0), n, dim, value_buffer + k0 * row_ld<Math>(dim), once);
    key.data -= k0 * key.ld;
    value.data -= k0 * value.ld;
    if constexpr (Math::kStep == 1) key_steps = key;
    packed += n;
  };
  if (!fetches) pack_block(0, keys);
  const bool one_block = length <= kBlock && group == 1;
  const float one = 1.f;
  const auto key_rows = [&](const HeadsView& x, T* gather) {
    return result_rows_of(p, item, work, x, gather).from(keys_begin);
  };
  const RowEpilogue<true, T> dk_rows{key_rows(g.dk, dk_gather), dim, &p.scale, work.non_temporal};
  const RowEpilogue<true, T> dv_rows{key_rows(g.dv, dv_gather), dim, &one, work.non_temporal};
  const auto store_block = [&](int64_t k0, int64_t n) {  // unless a product has
    if (!one_block || p.rotary) {
      const RowEpilogue<true, T> to{dk_rows.rows.from(k0), dim, &p.scale, work.non_temporal};
      store_rotated_back(p, dk + k0 * ld, keys_place + k0, n, to);
    }
    if (one_block) return;
    store_rows<true>(dv + k0 * ld, ld, n, dim, &one, dv_rows.rows.from(k0), work.non_temporal);
  };

  // The last queries first: all parts of a causal segment's keys have those, so that none waits
  // until another one comes to them.
  const auto last_block = [](const AttentionItem& of) { return (of.length - 1) / kBlock * kBlock; };
  const int64_t last_queries = last_block(item), first_queries = p.causal ? keys_begin : 0;
  const int64_t last_head = (kv_head + 1) * group - 1;
  for (int64_t q0 = last_queries; q0 >= first_queries; q0 -= kBlock) {
    for (int64_t head = kv_head * group; head <= last_head; ++head) {
      const int64_t queries = minimum(kBlock, length - q0), place = item.begin + q0;
      const int rows = static_cast<int>(queries);
      const int lanes = vectors_of(queries);
      const Rows<const T> q = query_rows<const T>(p, p.q, place, head);
      const Rows<const T> dout = rows_of<const T>(g.dout, p.order, place, head);
      Panel<Math> query{q_depth, ld}, grad{g_depth, ld};  // B of dS^T Q and P^T dO
      gradients.kept = probabilities_of<Math>(p, item, head);
      if constexpr (Math::kStep == 1) {
        const bool few = length <= kBlock;
        query = pack_both(p, q, place, queries, q_depth, few);
        grad = depth_panel<Fp32>(dout, queries, dim, g_depth, few);
        if (!gradients.kept) {
          pack_lanes(Rows<const float>{query.data, query.ld}, queries, dim, score_sign(p), qt);
        }
        pack_lanes(Rows<const float>{grad.data, grad.ld}, queries, dim, 1.f, gt);
      } else {
        with_rotated<Math>(p, q, place, queries, local_dq, [&](const auto& q_rows) {
          if (!gradients.kept) pack_lanes(q_rows, queries, dim, score_sign(p), qt);
          pack_depth(q_rows, queries, dim, q_depth);
        });
        pack_lanes(dout, queries, dim, 1.f, gt);
        pack_depth(dout, queries, dim, g_depth);
      }
      load_stats(p, head, place, queries, row_max, inverse_sum, delta);
      const bool all_keys = needs_no_out(length);
      if (!all_keys) {
        row_dots(rows_of<const T>(p.out, p.order, place, head), dout, queries, dim, delta);
      }

      const DqSemaphore semaphore(item, p, head - kv_head * group, q0, queries);
      float* dq = item.shared_dq ? semaphore.dq : local_dq;
      const int64_t key_end = p.causal ? minimum(q0 + queries - keys_begin, keys) : keys;
      const bool one_pass = key_end <= kBlock && !p.rotary && !item.shared_dq;
      const RowEpilogue<true, T> dq_rows{dq_gather ? result_rows_of(p, item, work, g.dq, dq_gather)
                                                   : query_rows<T>(p, g.dq, place, head),
                                         dim, &p.scale, work.non_temporal};
      for (int64_t k0 = 0; k0 < key_end; k0 += kBlock) {
        const int n = static_cast<int>(minimum(kBlock, key_end - k0));
        const int64_t k = keys_begin + k0;
        const bool diagonal = p.causal && k == q0;
        const auto left = [&](Causal part) { return diagonal ? part : Causal::kAll; };
        const bool complete = head == last_head && q0 == (p.causal ? k : 0);  // dk and dv
        if (k0 == packed) pack_block(k0, n);
        if (fetches) {
          prefetcher.clear();
          if (complete) {
            fetch_results(dk_rows.rows.from(k0), n);
            fetch_results(dv_rows.rows.from(k0), n);
          }
          if (k0 + kBlock < key_end) {
            if (k0 + kBlock == packed) fetch_keys(item, packed);
          } else {
            if (semaphore.last) fetch_results(dq_rows.rows, queries);
            if (head < last_head) {
              fetch_queries(item, q0, head + 1);
            } else if (q0 > first_queries) {
              fetch_queries(item, q0 - kBlock, kv_head * group);
            } else if (const AttentionItem* other = next.get()) {
              fetch_queries(*other, last_block(*other), other->head * group);
              fetch_keys(*other, 0);
            }
          }
          prefetcher.spread_over(5 * kBlock * kBlock * dim / kStepSize);
        }
        if (!gradients.kept) {
          gemm<Math, false>({key.data + k0 * key.ld, key.ld, qt, kLaneRow, st, kLaneRow, n, lanes,
                             depth, Add::kNothing, nullptr, left(Causal::kColumnsFromRow)},
                            prefetcher);
          if (diagonal) mask_causal(st, k, n, q0, lanes);
        }
        gemm<Math, false>({value.data + k0 * value.ld, value.ld, gt, kLaneRow, dpt, kLaneRow, n,
                           lanes, depth, Add::kNothing, nullptr, left(Causal::kColumnsFromRow)},
                          prefetcher);
        (gradients.kept ? softmax_gradient<Math, kDegree<T>, true, true>
         : all_keys ? softmax_gradient<Math, kDegree<T>, true>
                    : softmax_gradient<Math, kDegree<T>, false>)(gradients, n, lanes,
                                                                 score_scale(p), diagonal, row_max,
                                                                 inverse_sum, delta);
        const bool first = head == kv_head * group && q0 == last_queries;
        const Add add = first ? Add::kNothing : Add::kC;
        const int steps = steps_of<Math>(rows), row_ld = gradients.row_ld;
        // A sum that is complete leaves at once.
        const auto multiply = [&](auto by_columns, GemmArgs<Math> args, bool complete,
                                  const RowEpilogue<true, T>& results) {
          if (complete) return gemm<Math, by_columns>(args, prefetcher, results);
          gemm<Math, by_columns>(args, prefetcher);
        };
        multiply(std::false_type{},
                 {gradients.p_row, row_ld, grad.data, grad.ld, dv + k0 * ld, ld, n, columns, steps,
                  add, nullptr, left(Causal::kStepsFromRow)},
                 one_block, dv_rows);
        multiply(std::false_type{},
                 {gradients.ds_row, row_ld, query.data, query.ld, dk + k0 * ld, ld, n, columns,
                  steps, add, nullptr, left(Causal::kStepsFromRow)},
                 one_block && !p.rotary, dk_rows);
        if (k0 == 0) semaphore.wait();
        multiply(std::true_type{},
                 {reinterpret_cast<const Element*>(dpt), kLaneRow,
                  key_steps.data + k0 / Math::kStep * key_steps.ld, key_steps.ld, dq, ld, rows,
                  columns, steps_of<Math>(n), k == 0 ? Add::kNothing : Add::kC, nullptr,
                  left(Causal::kStepsUpToRow)},
                 one_pass, dq_rows);
        if (complete) store_block(k0, n);
      }
      if (!one_pass && semaphore.last) {
        store_rotated_back(p, dq, place, queries, dq_rows);
      }
      semaphore.release();
    }
  }
  write_gathered(p, item, work, g.dq, dq_gather);
  write_gathered(p, item, work, g.dk, dk_gather);
  write_gathered(p, item, work, g.dv, dv_gather);
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
