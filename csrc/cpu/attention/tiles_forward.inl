// The forward on tiles: S = Q K^T has queries in rows, and so has P, the left operand of P V.
// Included by kernel.cpp only.
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

// Steps of the online softmax on strips of scores, a row at a time, so that tiles can multiply
// meanwhile.
template <class T>
class Softmax {
 public:
  struct Strip {
    float* s;     // [rows, 64] scores of 16 or 32 queries
    uint32_t* p;  // [rows, parts, 32 pairs] becomes 2^(scale * (s - max)) in T
    int64_t rows;
    int vectors;      // of keys, 2 or 4
    bool first;       // there is nothing earlier
    int64_t allowed;  // keys that the first query sees, the others one more each if `causal`
    bool causal;
    float *row_max, *row_sum, *correction;  // [rows], as softmax_step has them
    float* out;                             // [rows, ld], multiplied by the correction
    int64_t ld;
  };

  VLMK_MEMBER Softmax(float scale, Prefetcher& prefetcher)
      : scale_(scale), prefetcher_(prefetcher) {}
  VLMK_MEMBER void start(const Strip& strip) {
    strip_ = strip;
    row_ = 0;
  }
  VLMK_MEMBER bool busy() const { return row_ < strip_.rows; }
  __attribute__((noinline)) void step() { rows_up_to(row_ + 1); }
  __attribute__((noinline)) void finish() { rows_up_to(strip_.rows); }

 private:
  // Of 16 rows, from the next one on.
  template <int kVectors>
  VLMK_MEMBER void maxima() {
    float* const s = strip_.s + row_ * kBlock;
    // mutant: forward-allowed
    const int64_t allowed = strip_.causal ? minimum(strip_.allowed + row_, kBlock) : strip_.allowed;
    if (allowed < kVectors * kWidth) mask_rows(s, allowed, strip_.causal, kVectors);
    Vec r[kTile];
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) {
      const float* row = s + i * kBlock;
      r[i] = max(load(row), load(row + kWidth));
      if (kVectors == 4) r[i] = max(r[i], max(load(row + 2 * kWidth), load(row + 3 * kWidth)));
    }
    old_max_ = strip_.first ? set1(kLowest) : load(strip_.row_max + row_);
    const Vec found = reduce_rows(r, [](Vec a, Vec b) { return max(a, b); });
    const Vec rise = (found - old_max_) * set1(scale_);
    // mutant: slack
    const __mmask16 rises = _mm512_cmp_ps_mask(rise, set1(kSlack), _CMP_GT_OQ);
    const Vec new_max = _mm512_mask_mov_ps(old_max_, rises, found);
    store(shifts_, set1(0.f) - new_max * set1(scale_));  // no FMA: as in softmax_step
    store(strip_.row_max + row_, new_max);
  }

  VLMK_MEMBER void rows_up_to(int64_t end) {
    while (row_ < end) {
      const int64_t group = row_ / kTile * kTile, now = minimum(end, group + kTile);
      if (strip_.vectors == 4) {
        if (row_ == group) maxima<4>();
        exponentials<4>(now);
      } else {
        if (row_ == group) maxima<2>();
        exponentials<2>(now);
      }
      row_ = now;
      if (now == group + kTile) add_up(group);
    }
  }

  // Of the rows before `end`, in the same 16 as the next one.
  template <int kVectors>
  VLMK_MEMBER void exponentials(int64_t end) {
    const Vec c = set1(scale_);
    const float* s = strip_.s + row_ * kBlock;
    uint32_t* to = strip_.p + row_ * kParts<T> * (kBlock / 2);
    for (int64_t row = row_; row < end; ++row, s += kBlock, to += kParts<T> * (kBlock / 2)) {
      const Vec shift = set1(shifts_[row % kTile]);
      Vec e[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        e[j] = exp2<kDegree<T>>(fma(load(s + j * kWidth), c, shift));
      }
      Vec sum = e[0] + e[1];
      if (kVectors == 4) sum = sum + (e[2] + e[3]);
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; j += 2) {
        __m512i parts[kParts<T>];
        Parts<T>::of(Parts<T>::split(e[j]), Parts<T>::split(e[j + 1]), parts);
        for (int part = 0; part < kParts<T>; ++part) {
          _mm512_storeu_si512(to + part * kBlock / 2 + j / 2 * kWidth, parts[part]);
        }
      }
      store(sums_[row % kTile], sum);
      prefetcher_.fetch(2);
    }
  }

  // Of 16 rows, from `row` on.
  VLMK_MEMBER void add_up(int64_t row) {
    Vec r[kTile];
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) r[i] = load(sums_[i]);
    const Vec sum = reduce_rows(r, [](Vec a, Vec b) { return a + b; });
    if (strip_.first) return store(strip_.row_sum + row, sum);
    const Vec moved = exp2<kDegree<T>>(old_max_ * set1(scale_) + load(shifts_));
    store(strip_.row_sum + row, fma(load(strip_.row_sum + row), moved, sum));
    // mutant: forward-moves
    if (_mm512_cmp_ps_mask(moved, set1(1.f), _CMP_NEQ_UQ) == 0) return;
    float* const factors = strip_.correction + row;
    store(factors, moved);
    float* o = strip_.out + row * strip_.ld;
    for (int i = 0; i < kTile; ++i, o += strip_.ld) {
      const Vec factor = set1(factors[i]);
      for (int64_t d = 0; d < strip_.ld; d += kWidth) store(o + d, load(o + d) * factor);
    }
  }

  const float scale_;
  Prefetcher& prefetcher_;
  Strip strip_{};
  int64_t row_ = 0;
  Vec old_max_;
  alignas(64) float shifts_[kTile];  // of the 16 rows
  alignas(64) float sums_[kTile][kWidth];
};

// Queries of a strip. Of 16-bit types with 32 long segments were 0.9x as fast, less stays in the
// first-level cache; parts of keys and values are six products' at a time.
template <class T>
constexpr int64_t kStripQueries = kParts<T> == 1 ? kTile : 2 * kTile;
// Queries that go through all keys together: parts of keys that a second-level cache has no room
// for are read half as often (fp32, 4,096 tokens: 1.1x).
template <class T>
constexpr int64_t kQueries = kParts<T> == 1 ? kBlock : 2 * kBlock;

template <class T>
int64_t forward_tiles_floats(const AttentionParams& p, const AttentionWork& work) {
  const int64_t pairs = kParts<T> * padded_pairs(p.head_dim), ld = padded(p.head_dim);
  return gathered_floats(p, work)                     // output of a window
         + 2 * whole_blocks(work.max_seqlen) * pairs  // keys, values
         + kQueries<T> * (pairs + ld)                 // queries, output
         // scores and probabilities of two strips
         + 2 * kStripQueries<T> * (kBlock + kParts<T> * kBlock / 2) +
         3 * kQueries<T>;  // row_max, row_sum, correction
}

template <class T>
void forward_tiles(const AttentionParams& p, const AttentionItem& item, const NextItem&,
                   const AttentionWork& work, Prefetcher& prefetcher, float* memory) {
  constexpr int64_t kStrip = kStripQueries<T>, kKeyRow = kParts<T> * kBlock;
  const int64_t dim = p.head_dim, ld = padded(dim), pairs = kParts<T> * padded_pairs(dim);
  const int64_t value_ld = kParts<T> * ld, kv_head = item.head / (p.heads / p.kv_heads);
  const int64_t keys = p.causal ? item.rows_end : item.length;
  const int steps = dim_steps(dim);
  const bool window = item.length <= kBlock;
  T* const gather = take_gathered<T>(p, work, &memory);
  auto* kt = reinterpret_cast<uint32_t*>(memory);                        // [keys / 64][pairs, 64]
  uint32_t* values = kt + whole_blocks(keys) * pairs;                    // [keys / 2, value_ld]
  uint32_t* q_buffer = values + whole_blocks(keys) * pairs;              // [queries, pairs]
  auto* out = reinterpret_cast<float*>(q_buffer + kQueries<T> * pairs);  // [queries, ld]
  float* s = out + kQueries<T> * ld;                                     // of two strips: [., 64]
  // [., parts, 32 pairs]
  auto* probabilities = reinterpret_cast<uint32_t*>(s + 2 * kStrip * kBlock);
  auto* row_max = reinterpret_cast<float*>(probabilities + kStrip * kKeyRow);  // [queries]
  float* row_sum = row_max + kQueries<T>;
  float* correction = row_sum + kQueries<T>;

  // Rotated keys wait where the values come later.
  with_rotated<RotatedFor<T>>(
      p, rows_of<const T>(p.k, p.order, item.begin, kv_head), item.begin, keys, values,
      [&](const auto& rows) { pack_right_rows(rows, keys, dim, score_sign(p), kt, prefetcher); });
  pack_right_depth(rows_of<const T>(p.v, p.order, item.begin, kv_head), keys, dim, values,
                   Fetch{prefetcher, 3});

  Softmax<T> softmax(score_scale(p), prefetcher);
  for (int64_t q0 = item.rows_begin; q0 < item.rows_end; q0 += kQueries<T>) {
    const int64_t queries = minimum(kQueries<T>, item.rows_end - q0), place = item.begin + q0;
    const Rows<T> results = result_rows_of(p, item, work, p.out, gather).from(q0);
    Left q;
    with_rotated<RotatedFor<T>>(p, query_rows<const T>(p, p.q, place, item.head), place, queries,
                                rotated_buffer<T>(q_buffer, out), [&](const auto& rows) {
                                  q = left_rows(rows, queries, dim, window, q_buffer);
                                });
    // A strip of queries from `row` on and 64 keys. A strip's values come before its next softmax,
    // which scales them.
    struct Unit {
      int64_t row, k0;
      int buffer;  // of scores and probabilities
    };
    const int64_t key_end = p.causal ? q0 + queries : keys;
    const auto following = [&](const Unit& unit) {
      const int64_t row = unit.row + kStrip;
      if (row < queries) return Unit{row, unit.k0, 1 - unit.buffer};
      const int64_t k0 = unit.k0 + kBlock;  // earlier queries don't see these keys
      return Unit{p.causal && k0 > q0 ? k0 - q0 : 0, k0, 1 - unit.buffer};
    };
    // A window's strips leave one after the other, from lines that a first-level cache holds.
    const auto out_of = [&](int64_t row) {
      return out + (key_end <= kBlock ? row % (2 * kStrip) : row) * ld;
    };
    const auto rows_from = [&](int64_t row) { return minimum(kStrip, queries - row); };
    const auto keys_of = [&](const Unit& unit) { return minimum(kBlock, key_end - unit.k0); };
    const auto scores_of = [&](const Unit& unit) { return s + unit.buffer * kStrip * kBlock; };
    const auto probabilities_of = [&](const Unit& unit) {
      return probabilities + unit.buffer * kStrip * kKeyRow / 2;
    };
    bool other_product = false;
    const auto beside = [&]() __attribute__((always_inline)) {
      prefetcher.fetch(kParts<T> == 1 ? 4 : 2);
      if (kParts<T> == 1) return;
      other_product = !other_product;
      if (other_product && softmax.busy()) softmax.step();
    };
    const auto scores = [&](const Unit& unit) {
      multiply_strip<T>(q.from(unit.row), rows_from(unit.row), kt + unit.k0 * pairs, kKeyRow,
                        scores_of(unit), kBlock, whole_tiles(keys_of(unit)), steps, false, beside);
    };
    const auto start_softmax = [&](const Unit& unit) {
      const int64_t row = unit.row, n = keys_of(unit);
      softmax.start({scores_of(unit), probabilities_of(unit),
                     (rows_from(row) + kTile - 1) / kTile * kTile,
                     static_cast<int>(whole_tiles(n) / kWidth), unit.k0 == 0,
                     p.causal ? q0 + row - unit.k0 + 1 : n, p.causal, row_max + row, row_sum + row,
                     correction + row, out_of(row), ld});
    };
    const auto add_values = [&](const Unit& unit) {
      multiply_strip<T>({reinterpret_cast<const char*>(probabilities_of(unit)), 2 * kKeyRow},
                        rows_from(unit.row), values + unit.k0 / 2 * value_ld, value_ld,
                        out_of(unit.row), ld, ld, static_cast<int>(whole_tiles(keys_of(unit)) / 32),
                        unit.k0 > 0, beside);
    };
    // After the values of a strip's last keys.
    const auto finish = [&](const Unit& unit) {
      const int64_t row = unit.row, n = rows_from(row);
      if (unit.k0 + kBlock < (p.causal ? q0 + row + n : keys)) return;
      for (int64_t i = row; i < row + kStrip; i += kTile) {
        store(correction + i, set1(1.f) / load(row_sum + i));
      }
      store_rows<false>(out_of(row), ld, n, dim, correction + row, results.from(row),
                        work.non_temporal, Fetch{prefetcher, 2});
    };
    int64_t done = 0;
    Unit before_last{}, last{};
    for (Unit unit{}, coming; unit.k0 < key_end; before_last = last, last = unit, unit = coming) {
      coming = following(unit);
      const bool same_strip = done > 0 && last.row == unit.row;
      if (done == 0) scores(unit);
      if (same_strip) add_values(last);
      if (kParts<T> > 1) start_softmax(unit);
      if (coming.k0 < key_end) scores(coming);
      if (kParts<T> == 1) {
        start_softmax(unit);
        softmax.finish();
      }
      if (done > 0 && !same_strip) add_values(last);
      softmax.finish();
      if (done > 1) finish(before_last);
      ++done;
    }
    add_values(last);
    if (done > 1) finish(before_last);
    finish(last);

    const int64_t first_row = item.head * p.tokens + place;
    copy(row_max, queries, p.row_max + first_row);
    copy(row_sum, queries, p.row_sum + first_row);
  }
  write_gathered(p, item, work, p.out, gather);
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
