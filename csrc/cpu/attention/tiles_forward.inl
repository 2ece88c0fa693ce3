// The forward on tiles, in strips of 16 queries (with 32, long segments were 0.9x as fast: less
// stays in the first-level cache): S = Q K^T has queries in rows, and so has P, the left operand of
// P V. Included by kernel.cpp only.
#pragma once

#include "cpu/attention/tiles.inl"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// Row i's lanes from first + i * slope on become -inf. s [16, 64].
VLMK_INLINE void mask_rows(float* s, int64_t first, int slope, int vectors) {
  for (int i = 0; i < kTile; ++i) {
    for (int j = 0; j < vectors; ++j) {
      float* at = s + i * kBlock + j * kWidth;
      const int from = static_cast<int>(first + i * slope) - j * kWidth;
      // mutant: mask-rows
      if (from < kWidth) store(at, keep_from(from, set1(-__builtin_inff()), load(at)));
    }
  }
}

// How far, in powers of two, scores may be above what their row's exponentials are relative to. To
// scale the row's sums for each larger score takes as long as its exponentials (the forward of
// 1,024 tokens: 1.1x; method: FlashAttention-4).
constexpr float kSlack = 8;

// One step of the online softmax on the scores s [16, 64] of 16 queries and kVectors * 16 keys:
// p [16, 64] = 2^(scale * (s - max)) in T. row_max, row_sum and correction as softmax_step has
// them; returns whether correction is other than 1.
template <class T, int kVectors>
VLMK_NOINLINE bool softmax_strip(const float* s, float scale, bool first, float* row_max,
                                 float* row_sum, float* correction, uint32_t* p,
                                 Prefetcher& prefetcher) {
  const Vec c = set1(scale);
  Vec r[kTile];
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) {
    const float* row = s + i * kBlock;
    r[i] = max(load(row), load(row + kWidth));
    if (kVectors == 4) r[i] = max(r[i], max(load(row + 2 * kWidth), load(row + 3 * kWidth)));
  }
  const Vec old_max = first ? set1(kLowest) : load(row_max);
  const Vec found = reduce_rows(r, [](Vec a, Vec b) { return max(a, b); });
  const Vec rise = (found - old_max) * c;
  // mutant: slack
  const __mmask16 rises = _mm512_cmp_ps_mask(rise, set1(kSlack), _CMP_GT_OQ);
  const Vec new_max = _mm512_mask_mov_ps(old_max, rises, found);
  alignas(64) float shifts[kTile];
  const Vec shift = set1(0.f) - new_max * c;  // no FMA: as in softmax_step
  store(shifts, shift);
  alignas(64) float sums[kTile][kWidth];
  for (int i = 0; i < kTile; ++i) {
    const Vec shift_of_row = set1(shifts[i]);
    Vec e[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      e[j] = exp2<kDegree<T>>(fma(load(s + i * kBlock + j * kWidth), c, shift_of_row));
    }
    uint32_t* to = p + i * (kBlock / 2);
    _mm512_storeu_si512(to, narrow(e[0], e[1], T{}));
    Vec sum = e[0] + e[1];
    if constexpr (kVectors == 4) {
      _mm512_storeu_si512(to + kWidth, narrow(e[2], e[3], T{}));
      sum = sum + (e[2] + e[3]);
    }
    store(sums[i], sum);
    prefetcher.fetch(2);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) r[i] = load(sums[i]);
  Vec sum = reduce_rows(r, [](Vec a, Vec b) { return a + b; });
  bool moves = false;
  if (!first) {
    const Vec moved = exp2<kDegree<T>>(old_max * c + shift);
    store(correction, moved);
    sum = fma(load(row_sum), moved, sum);
    moves = _mm512_cmp_ps_mask(moved, set1(1.f), _CMP_NEQ_UQ) != 0;
  }
  store(row_max, new_max);
  store(row_sum, sum);
  return moves;
}

int64_t forward_tiles_floats(const AttentionParams& p, const AttentionWork& work) {
  const int64_t pairs = padded_pairs(p.head_dim), ld = padded(p.head_dim);
  return gathered_floats(p, work)                     // output of a window
         + 2 * whole_blocks(work.max_seqlen) * pairs  // keys, values
         + kBlock * (pairs + ld)                      // queries, output
         + 2 * kTile * (kBlock + kBlock / 2)          // scores and probabilities of two strips
         + 3 * kBlock;                                // row_max, row_sum, correction
}

template <class T>
void forward_tiles(const AttentionParams& p, const AttentionItem& item, const NextItem&,
                   const AttentionWork& work, Prefetcher& prefetcher, float* memory) {
  const int64_t dim = p.head_dim, ld = padded(dim), pairs = padded_pairs(dim);
  const int64_t kv_head = item.head / (p.heads / p.kv_heads);
  const int64_t keys = p.causal ? item.rows_end : item.length;
  const int steps = dim_steps(dim);
  const bool window = item.length <= kBlock;
  T* const gather = take_gathered<T>(p, work, &memory);
  auto* kt = reinterpret_cast<uint32_t*>(memory);                   // [keys / 64][pairs, 64]
  uint32_t* values = kt + whole_blocks(keys) * pairs;               // [keys / 2, ld]
  uint32_t* q_buffer = values + whole_blocks(keys) * pairs;         // [64, pairs]
  auto* out = reinterpret_cast<float*>(q_buffer + kBlock * pairs);  // [64, ld]
  float* s = out + kBlock * ld;                                     // of two strips: [16, 64 keys]
  auto* probabilities = reinterpret_cast<uint32_t*>(s + 2 * kTile * kBlock);  // [16, 32 pairs]
  auto* row_max = reinterpret_cast<float*>(probabilities + kTile * kBlock);   // [64]
  float* row_sum = row_max + kBlock;
  float* correction = row_sum + kBlock;

  // Rotated keys wait where the values come later.
  with_rotated<Pairs>(
      p, rows_of<const T>(p.k, p.order, item.begin, kv_head), item.begin, keys, values,
      [&](const auto& rows) { pack_right_rows(rows, keys, dim, score_sign(p), kt, prefetcher); });
  pack_depth(rows_of<const T>(p.v, p.order, item.begin, kv_head), keys, dim, values,
             Fetch{prefetcher, 3});

  for (int64_t q0 = item.rows_begin; q0 < item.rows_end; q0 += kBlock) {
    const int64_t queries = minimum(kBlock, item.rows_end - q0), place = item.begin + q0;
    Left q;
    with_rotated<Pairs>(p, query_rows<const T>(p, p.q, place, item.head), place, queries, q_buffer,
                        [&](const auto& rows) {
                          q = left_rows(rows, queries, dim, window, reinterpret_cast<T*>(q_buffer));
                        });
    const int64_t key_end = p.causal ? q0 + queries : keys;
    const int64_t strips = (queries + kTile - 1) / kTile;
    const int64_t units = strips * ((key_end + kBlock - 1) / kBlock);
    // A window's strips leave one after the other, from lines that a first-level cache holds.
    const auto out_of = [&](int64_t row) {
      return out + (units == strips ? row % (2 * kTile) : row) * ld;
    };
    const auto row_of = [&](int64_t unit) { return unit % strips * kTile; };
    const auto scores = [&](int64_t unit) {
      const int64_t k0 = unit / strips * kBlock;
      multiply_strip<T>(q.from(row_of(unit)), kTile, kt + k0 * pairs, kBlock,
                        s + unit % 2 * kTile * kBlock, kBlock,
                        whole_tiles(minimum(kBlock, key_end - k0)), steps, false, prefetcher);
    };
    const auto softmax = [&](int64_t unit) {
      const int64_t row = row_of(unit), k0 = unit / strips * kBlock;
      const int64_t n = minimum(kBlock, key_end - k0);
      const int vectors = static_cast<int>(whole_tiles(n) / kWidth);
      float* scores = s + unit % 2 * kTile * kBlock;
      uint32_t* to = probabilities + unit % 2 * kTile * kBlock / 2;
      // mutant: forward-allowed
      const int64_t allowed = p.causal ? minimum(q0 + row - k0 + 1, kBlock) : n;
      if (allowed < vectors * kWidth) mask_rows(scores, allowed, p.causal, vectors);
      const auto step = vectors == 4 ? softmax_strip<T, 4> : softmax_strip<T, 2>;
      const bool moves = step(scores, score_scale(p), k0 == 0, row_max + row, row_sum + row,
                              correction + row, to, prefetcher);
      if (!moves) return;  // mutant: forward-moves
      float* o = out_of(row);
      for (int i = 0; i < kTile; ++i, o += ld) {
        const Vec factor = set1(correction[row + i]);
        for (int64_t d = 0; d < ld; d += kWidth) store(o + d, load(o + d) * factor);
      }
    };
    const auto add_values = [&](int64_t unit) {
      const int64_t k0 = unit / strips * kBlock;
      const uint32_t* rows = probabilities + unit % 2 * kTile * kBlock / 2;
      multiply_strip<T>({reinterpret_cast<const char*>(rows), 2 * kBlock}, kTile,
                        values + k0 / 2 * ld, ld, out_of(row_of(unit)), ld, ld,
                        static_cast<int>(whole_tiles(minimum(kBlock, key_end - k0)) / 32), k0 > 0,
                        prefetcher);
    };
    // After the values of a strip's last keys.
    const auto finish = [&](int64_t unit) {
      const int64_t row = (unit - (units - strips)) * kTile;
      if (row < 0) return;
      store(correction + row, set1(1.f) / load(row_sum + row));
      store_rows<false>(out_of(row), ld, minimum(kTile, queries - row), dim, correction + row,
                        result_rows_of(p, item, work, p.out, gather).from(q0 + row), false,
                        Fetch{prefetcher, 2});
    };
    // A strip's values come before its next softmax, which scales them.
    scores(0);
    for (int64_t unit = 0; unit < units; ++unit) {
      if (strips == 1 && unit > 0) add_values(unit - 1);
      if (unit + 1 < units) scores(unit + 1);
      softmax(unit);
      if (strips > 1 && unit > 0) add_values(unit - 1);
      finish(unit - 2);
    }
    add_values(units - 1);
    finish(units - 2);
    finish(units - 1);

    const int64_t first_row = item.head * p.tokens + place;
    copy(row_max, queries, p.row_max + first_row);
    copy(row_sum, queries, p.row_sum + first_row);
  }
  write_gathered(p, item, work, p.out, gather);
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
