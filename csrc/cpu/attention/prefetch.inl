// Which rows attention fetches ahead of their use: Prefetcher, of gemm.h, brings them while
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

// Rows of heads of some tensors, at the same places of a segment.
class PrefetchList {
 public:
  // The rows of heads [head, last_head] of x from `place` on: one run of bytes a row where heads
  // lie side by side, else of the first head only. `more`: elements behind the last head that are
  // wanted too.
  template <class T>
  VLMK_MEMBER void add(const HeadsView& x, const int32_t* order, int64_t place, int64_t head,
                       int64_t last_head, int64_t dim, int64_t more = 0) {
    constexpr int64_t kLongestRun = 4096;
    const auto size = static_cast<int64_t>(sizeof(T));
    const int64_t run = ((last_head - head) * x.head_stride + dim + more) * size;
    const int64_t one = (dim + more) * size;
    const Rows<const T> rows = rows_of<const T>(x, order, place, head);
    tensors_[count_++] = {reinterpret_cast<const char*>(rows.data), rows.stride * size,
                          run >= one && run <= kLongestRun ? run : one, rows.order};
  }

  // q, k and v of as many heads; in a fused projection [T, H, 3, D] they are one run.
  template <class T>
  VLMK_MEMBER void add_qkv(const HeadsView& q, const HeadsView& k, const HeadsView& v,
                           const int32_t* order, int64_t place, int64_t head, int64_t last_head,
                           int64_t dim) {
    const auto after_q = [&](const HeadsView& x) {
      return static_cast<const T*>(x.data) - static_cast<const T*>(q.data);
    };
    if (after_q(k) == dim && after_q(v) == 2 * dim && q.head_stride == 3 * dim) {
      add<T>(q, order, place, head, last_head, dim, 2 * dim);
      return;
    }
    add<T>(q, order, place, head, last_head, dim);
    add<T>(k, order, place, head, last_head, dim);
    add<T>(v, order, place, head, last_head, dim);
  }

  // Hands n rows of each to the prefetcher, row by row, as they will be used, while products of as
  // many multiply-adds run.
  __attribute__((noinline)) void hand_over(int64_t n, int64_t multiply_adds,
                                           Prefetcher& prefetcher) const {
    for (int64_t i = 0; i < n; ++i) {
      for (int t = 0; t < count_; ++t) {
        const Tensor& x = tensors_[t];
        prefetcher.add(x.row + (x.order ? x.order[i] : i) * x.stride, x.bytes);
      }
    }
    prefetcher.spread_over(multiply_adds);
  }

 private:
  struct Tensor {
    const char* row;
    ptrdiff_t stride;  // bytes
    int64_t bytes;     // of a row
    const int32_t* order;
  };
  Tensor tensors_[9];
  int count_ = 0;
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

// n rows of a head.
template <class T>
VLMK_NOINLINE void fetch_rows(const Rows<T>& rows, int64_t n, int64_t dim, bool look,
                              Prefetcher& prefetcher) {
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < n; ++i) {
    prefetcher.add(reinterpret_cast<const char*>(rows[i]), bytes, look);
  }
}

// Whether the items [first, last], which come next, are consecutive heads of one segment; nothing
// is fetched if not.
VLMK_INLINE bool start_list(PrefetchList& list, const AttentionParams& p,
                            const AttentionItem& first, const AttentionItem& last) {
  if (first.begin != last.begin || first.length > kPrefetchLength) return false;
  if (p.rotary) {
    const HeadsView table{const_cast<float*>(p.rotary), p.head_dim, 0};
    list.add<float>(table, p.order, first.begin, 0, 0, p.head_dim);
  }
  return true;
}

// Of one product of each of the items. The items at work, during which those that come next are
// fetched, are about as long.
VLMK_INLINE int64_t multiply_adds(const AttentionParams& p, const AttentionItem& first,
                                  const AttentionItem& last) {
  return (last.head - first.head + 1) * first.length * first.length * p.head_dim;
}

template <class T>
void prefetch_forward(const AttentionParams& p, const AttentionItem& first,
                      const AttentionItem& last, bool non_temporal, Prefetcher& prefetcher) {
  const int64_t group = p.heads / p.kv_heads, dim = p.head_dim, at = first.begin;
  PrefetchList list;
  prefetcher.clear();
  if (!start_list(list, p, first, last)) return;
  if (group == 1) {
    list.add_qkv<T>(p.q, p.k, p.v, p.order, at, first.head, last.head, dim);
  } else {
    list.add<T>(p.q, p.order, at, first.head, last.head, dim);
    list.add<T>(p.k, p.order, at, first.head / group, last.head / group, dim);
    list.add<T>(p.v, p.order, at, first.head / group, last.head / group, dim);
  }
  if (!non_temporal) list.add<T>(p.out, p.order, at, first.head, last.head, dim);
  list.hand_over(first.length, 2 * multiply_adds(p, first, last), prefetcher);
}

template <class T>
void prefetch_backward(const AttentionGradParams& g, const AttentionItem& first,
                       const AttentionItem& last, bool non_temporal, Prefetcher& prefetcher) {
  const AttentionParams& p = g.forward;
  const int64_t group = p.heads / p.kv_heads, dim = p.head_dim, at = first.begin;
  const int64_t q_first = first.head * group, q_last = (last.head + 1) * group - 1;
  PrefetchList list;
  prefetcher.clear();
  if (!start_list(list, p, first, last)) return;
  const auto add_three = [&](const HeadsView& q, const HeadsView& k, const HeadsView& v) {
    if (group == 1) {
      list.add_qkv<T>(q, k, v, p.order, at, first.head, last.head, dim);
      return;
    }
    list.add<T>(k, p.order, at, first.head, last.head, dim);
    list.add<T>(v, p.order, at, first.head, last.head, dim);
    list.add<T>(q, p.order, at, q_first, q_last, dim);
  };
  add_three(p.q, p.k, p.v);
  list.add<T>(g.dout, p.order, at, q_first, q_last, dim);
  if (!needs_no_out(first.length)) list.add<T>(p.out, p.order, at, q_first, q_last, dim);
  if (!non_temporal) add_three(g.dq, g.dk, g.dv);
  for (int64_t head = q_first; head <= q_last; ++head) {
    for (const float* x : {p.row_max, p.row_sum}) {
      prefetcher.add(reinterpret_cast<const char*>(x + head * p.tokens + at), 4 * first.length);
    }
  }
  list.hand_over(first.length, 5 * group * multiply_adds(p, first, last), prefetcher);
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
