// Results of windows in 16-bit types, written past the caches, which would read the lines first. A
// head's row is seldom whole cache lines, those of the heads that a thread takes at a time are:
// they are gathered. Included by kernel.cpp only.
#pragma once
#include "cpu/attention/attention.h"
#include "cpu/attention/pack.inl"

namespace vlmk {
namespace VLMK_ISA {
namespace {

constexpr int64_t kLine = 32;  // elements of 16 bits

// Whether x is written past the caches: in fp32 if a head's rows are whole lines, in 16 bits if
// those of a chunk of heads are.
VLMK_INLINE bool past_caches(const AttentionParams& p, const AttentionWork& work,
                             const HeadsView& x) {
  if (!work.non_temporal || !kStreams) return false;
  if (p.dtype == DType::kFloat32) return whole_lines(x, p.head_dim) && p.q_group_gap % 16 == 0;
  return work.max_seqlen <= kBlock && p.heads == p.kv_heads && p.q_group_gap == 0 &&
         x.head_stride == p.head_dim && x.token_stride % kLine == 0 &&
         work.chunk * p.head_dim % kLine == 0 && reinterpret_cast<uintptr_t>(x.data) % 64 == 0;
}

// What is gathered of one tensor: [64 rows, heads of a chunk, dim].
VLMK_INLINE int64_t gathered_floats(const AttentionParams& p, const AttentionWork& work) {
  return (kBlock * work.chunk * p.head_dim / 2 + 15) / 16 * 16;
}

// Takes its part of memory; null where T's results are not gathered.
template <class T>
VLMK_INLINE T* take_gathered(const AttentionParams& p, const AttentionWork& work, float** memory) {
  if (sizeof(T) != 2) return nullptr;
  auto* const taken = reinterpret_cast<T*>(*memory);
  *memory += gathered_floats(p, work);
  return work.non_temporal ? taken : nullptr;
}

// Where an item's rows of x go: to x, or, if buffer is not null, there.
template <class T>
VLMK_INLINE Rows<T> result_rows_of(const AttentionParams& p, const AttentionItem& item,
                                   const AttentionWork& work, const HeadsView& x, T* buffer) {
  if (!buffer) return rows_of<T>(x, p.order, item.begin, item.head);
  // mutant: gather-head
  return {buffer + item.head % work.chunk * p.head_dim,
          static_cast<ptrdiff_t>(work.chunk * p.head_dim)};
}

// After the last head of a chunk: from buffer to x.
template <class T>
VLMK_NOINLINE void write_gathered(const AttentionParams& p, const AttentionItem& item,
                                  const AttentionWork& work, const HeadsView& x, const T* buffer) {
  if (!buffer || (item.head + 1) % work.chunk != 0) return;  // mutant: gather-last
  const int64_t width = work.chunk * p.head_dim;
  const auto rows = rows_of<T>(x, p.order, item.begin, item.head + 1 - work.chunk);
  for (int64_t i = 0; i < item.length; ++i, buffer += width) {
    auto* const to = reinterpret_cast<float*>(rows[i]);
    const auto* const from = reinterpret_cast<const float*>(buffer);
    for (int64_t d = 0; d < width / 2; d += kWidth) stream(to + d, load(from + d));
  }
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
