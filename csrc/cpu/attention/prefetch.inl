// Which rows attention fetches ahead of their use: Prefetcher (cpu/prefetcher.h) brings them while
// products run. Segments of at most kPrefetchLength take about as long as their rows take to
// arrive, so a thread fetches all rows of the items that it takes next. In longer ones it fetches,
// block by block, the rows that it packs or stores after the products at hand. Included by
// kernel.cpp only.
#pragma once

#include <initializer_list>

#include "cpu/attention/attention.h"
#include "cpu/attention/pack.inl"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// As many elements of n rows, those that follow each other in memory together.
template <class T>
VLMK_NOINLINE void fetch_rows(const Rows<T>& rows, int64_t n, int64_t elements, bool look,
                              Prefetcher& prefetcher) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0, end = n; i < n; i = end, end = n) {
    if (rows.order) {
      for (end = i + 1; end < n && rows.order[end] == rows.order[end - 1] + 1;) ++end;
    }
    prefetcher.add(rows[i], rows.stride * kSize, end - i, elements * kSize, look);
  }
}

// What the next items read and write: heads of n tokens of a segment from `place` on.
struct HeadsToFetch {
  const AttentionParams& p;
  Prefetcher& prefetcher;
  int64_t place, n;

  // Heads [head, last_head] of x: one run of bytes a row where they lie side by side, else of the
  // first one only. `more`: elements behind the last head that are wanted too. Where heads lie side
  // by side in rows less than a page apart, the first heads' pages are those of all.
  template <class T>
  void add(const HeadsView& x, int64_t head, int64_t last_head, int64_t more = 0) const {
    constexpr int64_t kPage = 4096 / sizeof(T), kLongestRun = kPage;
    const int64_t one = p.head_dim + more, run = (last_head - head) * x.head_stride + one;
    const bool looked_up = head > 0 && x.head_stride <= x.token_stride && x.token_stride <= kPage;
    fetch_rows(rows_of<const T>(x, p.order, place, head), n,
               run >= one && run <= kLongestRun ? run : one, !looked_up, prefetcher);
  }
  // As many of q, k and v; in a fused projection [T, H, 3, D] they are one run.
  template <class T>
  void add_qkv(const HeadsView& q, const HeadsView& k, const HeadsView& v, int64_t head,
               int64_t last_head) const {
    const auto after_q = [&](const HeadsView& x) {
      return static_cast<const T*>(x.data) - static_cast<const T*>(q.data);
    };
    const int64_t dim = p.head_dim;
    if (after_q(k) == dim && after_q(v) == 2 * dim && q.head_stride == 3 * dim) {
      return add<T>(q, head, last_head, 2 * dim);
    }
    for (const HeadsView* x : {&q, &k, &v}) add<T>(*x, head, last_head);
  }
};

// The item that a thread of long segments would take now. Not taken, or a thread with two long ones
// would let others wait.
struct NextItem {
  const AttentionWork& work;
  const int64_t& taken;  // items, by all threads
  VLMK_MEMBER const AttentionItem* get() const {
    int64_t next;
#pragma omp atomic read
    next = taken;
    return next < work.count ? &work.items[next] : nullptr;
  }
};

// Whether the pages of long segments' rows are looked up at once (Prefetcher::add): a backward has
// twice as many (with looks the backward of 1,024 tokens is 1.02 to 1.04x, the forward 0.98x).
constexpr bool kForwardLooks = false, kBackwardLooks = true;

// Whether the items [first, last], which come next, are consecutive heads of one segment; nothing
// is fetched if not.
VLMK_INLINE bool start_list(const HeadsToFetch& next, const AttentionItem& first,
                            const AttentionItem& last) {
  next.prefetcher.clear();
  if (first.begin != last.begin || first.length > kPrefetchLength) return false;
  if (next.p.rotary) {
    next.add<float>({const_cast<float*>(next.p.rotary), next.p.head_dim, 0}, 0, 0);
  }
  return true;
}

// Steps of the tiles of one product of each of the items. The items at work, during which those
// that come next are fetched, have about as many.
VLMK_INLINE int64_t product_steps(const AttentionParams& p, const AttentionItem& first,
                                  const AttentionItem& last) {
  return (last.head - first.head + 1) * first.length * first.length * p.head_dim / kStepSize;
}

template <class T>
void prefetch_forward(const AttentionParams& p, const AttentionItem& first,
                      const AttentionItem& last, bool non_temporal, Prefetcher& prefetcher) {
  const int64_t group = p.heads / p.kv_heads;
  const HeadsToFetch next{p, prefetcher, first.begin, first.length};
  if (!start_list(next, first, last)) return;
  if (group == 1) {
    next.add_qkv<T>(p.q, p.k, p.v, first.head, last.head);
  } else {
    next.add<T>(p.q, first.head, last.head);
    next.add<T>(p.k, first.head / group, last.head / group);
    next.add<T>(p.v, first.head / group, last.head / group);
  }
  if (!non_temporal) next.add<T>(p.out, first.head, last.head);
  prefetcher.spread_over(2 * product_steps(p, first, last));
}

// Floats of a row of the probabilities that are kept of a segment: its queries, in whole lines.
VLMK_INLINE int64_t kept_row(int64_t queries) { return (queries + 15) / 16 * 16; }

// Where p.probabilities has those of a segment of at most 64 tokens, [keys / kStep, kept_row], else
// null.
template <class Math>
VLMK_INLINE float* probabilities_of(const AttentionParams& p, const AttentionItem& item,
                                    int64_t head) {
  if (!p.probabilities || item.length > kBlock) return nullptr;
  return p.probabilities + (head * p.tokens + item.begin) * (kBlock / Math::kStep);
}

template <class T, class Math = Fp32>
void prefetch_backward(const AttentionGradParams& g, const AttentionItem& first,
                       const AttentionItem& last, bool non_temporal, Prefetcher& prefetcher) {
  const AttentionParams& p = g.forward;
  const int64_t group = p.heads / p.kv_heads;
  const int64_t q_first = first.head * group, q_last = (last.head + 1) * group - 1;
  const HeadsToFetch next{p, prefetcher, first.begin, first.length};
  if (!start_list(next, first, last)) return;
  const auto add_three = [&](const HeadsView& q, const HeadsView& k, const HeadsView& v) {
    if (group == 1) return next.add_qkv<T>(q, k, v, first.head, last.head);
    next.add<T>(k, first.head, last.head);
    next.add<T>(v, first.head, last.head);
    next.add<T>(q, q_first, q_last);
  };
  add_three(p.q, p.k, p.v);
  next.add<T>(g.dout, q_first, q_last);
  if (!needs_no_out(first.length)) next.add<T>(p.out, q_first, q_last);
  if (!non_temporal) add_three(g.dq, g.dk, g.dv);
  for (const float* x : {p.row_max, p.row_sum}) {
    prefetcher.add(x + q_first * p.tokens + first.begin, 4 * p.tokens, q_last - q_first + 1,
                   4 * first.length);
  }
  const bool kept = p.probabilities && first.length <= kBlock;
  for (int64_t head = q_first; kept && head <= q_last; ++head) {
    prefetcher.add(probabilities_of<Math>(p, first, head), 0, 1,
                   4 * kept_row(first.length) * first.length / Math::kStep);
  }
  prefetcher.spread_over((kept ? 4 : 5) * group * product_steps(p, first, last));
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
