// The backward on tiles, in strips of 32 keys: S^T = K Q^T and dP^T = V dO^T have keys in rows, and
// so have P^T and dS^T, the left operands of dV and dK; dS is transposed for dQ = dS K. Included by
// kernel.cpp only.
#pragma once

#include "cpu/attention/backward.inl"
#include "cpu/attention/tiles.inl"

namespace vlmk {
namespace VLMK_ISA {
namespace {

constexpr int kStrip = 32;  // keys

// row_dots(), the lanes of 16 rows added at a time. delta [n up to 16].
template <class T>
VLMK_NOINLINE void dots_of_rows(const Rows<const T>& outs, const Rows<const T>& douts, int64_t n,
                                int64_t dim, float* delta, Prefetcher& prefetcher) {
  for (int64_t row = 0; row < n; row += kTile) {
    alignas(64) float sums[kTile][kWidth];
    for (int64_t i = 0; i < kTile; ++i) {
      Vec low = set1(0.f), high = set1(0.f);
      for (int64_t d = 0; d < dim && row + i < n; d += 32) {  // mutant: dots-depth
        const T *out = outs[row + i], *dout = douts[row + i];
        if constexpr (std::is_same_v<T, float>) {
          const auto add = [&](int64_t from, Vec& sum) {
            const auto lanes = static_cast<int>(minimum(kWidth, dim - from));
            if (lanes > 0) sum = fma(load_n(out + from, lanes), load_n(dout + from, lanes), sum);
          };
          add(d, low);
          add(d + kWidth, high);
        } else {
          const __m512i a = load_row(out, d, dim), b = load_row(dout, d, dim);
          low = fma(lower(a, T{}), lower(b, T{}), low);
          high = fma(upper(a, T{}), upper(b, T{}), high);
        }
      }
      store(sums[i], low + high);
      prefetcher.fetch(1);
    }
    Vec r[kTile];
    for (int i = 0; i < kTile; ++i) r[i] = load(sums[i]);
    store(delta + row, reduce_rows(r, [](Vec a, Vec b) { return a + b; }));
  }
}

// The softmax's gradient on strips of 32 keys, in steps, so that tiles can multiply meanwhile.
template <class T>
class SoftmaxGradient {
 public:
  struct Strip {
    // [32, 64] scores and dP of `keys` <= 32 keys (rows) and vectors * 16 queries (lanes)
    const float *st, *dpt;
    int64_t keys, vectors;
    uint32_t* p;        // [32, parts, 32] becomes P^T, pairs along queries
    uint32_t* ds;       // [32, parts, 32] becomes dS^T / scale
    float* pairs;       // [16, parts, 64] the same once more, in pairs along keys, 0 behind them
    float* transposed;  // [64, parts, 32] the same once more, 16 elements of each row
  };

  VLMK_MEMBER SoftmaxGradient(float scale, const float* row_max, const float* inverse_sum,
                              const float* delta, Prefetcher& prefetcher)
      : scale_(scale),
        row_max_(row_max),
        inverse_sum_(inverse_sum),
        delta_(delta),
        prefetcher_(prefetcher) {}
  VLMK_MEMBER void start(const Strip& strip) {
    strip_ = strip;
    next_ = 0;
    last_ = strip.vectors / 2 * kPairs + strip.vectors;
  }
  VLMK_MEMBER bool busy() const { return next_ < last_; }
  __attribute__((noinline)) void step() { steps_up_to(next_ + 1); }
  __attribute__((noinline)) void finish() { steps_up_to(last_); }

 private:
  static constexpr int64_t kPairs = kStrip / 2;  // of keys

  // Two keys and two vectors of queries at a time, then transposes, a vector of queries at a time.
  VLMK_MEMBER void steps_up_to(int64_t end) {
    const int64_t pairs = strip_.vectors / 2 * kPairs;
    while (next_ < end) {
      if (next_ < pairs) {
        const int64_t from = next_ % kPairs, now = minimum(end - next_, kPairs - from);
        gradient(next_ / kPairs * 2, 2 * from, 2 * (from + now));
        next_ += now;
      } else {
        transpose_pairs(next_++ - pairs);
      }
    }
  }

  // Keys [begin, end) and the queries of vectors j and j + 1.
  VLMK_MEMBER void gradient(int64_t j, int64_t begin, int64_t end) {
    const Vec c = set1(scale_);
    Vec shift[2], inverse[2], d[2];
    for (int v = 0; v < 2; ++v) {
      shift[v] = set1(0.f) - load(row_max_ + (j + v) * kWidth) * c;
      inverse[v] = load(inverse_sum_ + (j + v) * kWidth);
      d[v] = load(delta_ + (j + v) * kWidth);
    }
    const float *const st = strip_.st + j * kWidth, *const dpt = strip_.dpt + j * kWidth;
    const int64_t keys = strip_.keys;
    __m512i parts[kParts<T>];
    int64_t i = begin;
    for (; i < minimum(end, keys); i += 2) {
      typename Parts<T>::Split ds[2][2];
#pragma GCC unroll 2
      for (int u = 0; u < 2; ++u) {
        typename Parts<T>::Split p[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const int64_t at = (i + u) * kBlock + v * kWidth;
          const Vec x = exp2<kDegree<T>>(fma(load(st + at), c, shift[v])) * inverse[v];
          p[v] = Parts<T>::split(x);
          ds[u][v] = Parts<T>::split(x * (load(dpt + at) - d[v]));
        }
        const auto put = [&](const auto& x, uint32_t* rows) {
          Parts<T>::of(x[0], x[1], parts);
          uint32_t* const row = rows + (i + u) * kParts<T> * kBlock / 2 + j * kWidth / 2;
          for (int part = 0; part < kParts<T>; ++part) {
            _mm512_storeu_si512(row + part * kBlock / 2, parts[part]);
          }
        };
        put(p, strip_.p);
        put(ds[u], strip_.ds);
      }
      const bool both = i + 1 < keys;  // mutant: gradient-both
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        Parts<T>::of_pairs(ds[0][v], both ? ds[1][v] : Parts<T>::split(set1(0.f)), parts);
        for (int part = 0; part < kParts<T>; ++part) {
          store(pairs_of(i) + part * kBlock + (j + v) * kWidth, _mm512_castsi512_ps(parts[part]));
        }
      }
      prefetcher_.fetch(3);
    }
    for (; i < end; i += 2) {  // mutant: gradient-clear
      for (int part = 0; part < kParts<T>; ++part) {
        for (int v = 0; v < 2; ++v) {
          store(pairs_of(i) + part * kBlock + (j + v) * kWidth, set1(0.f));
        }
      }
    }
  }

  VLMK_MEMBER float* pairs_of(int64_t key) const {
    return strip_.pairs + key / 2 * kParts<T> * kBlock;
  }

  VLMK_MEMBER void transpose_pairs(int64_t j) {
    for (int part = 0; part < kParts<T>; ++part) {
      Vec r[kTile];
      for (int i = 0; i < kTile; ++i) r[i] = load(pairs_of(2 * i) + part * kBlock + j * kWidth);
      transpose(r);
      float* const to = strip_.transposed + part * kBlock / 2;
      // mutant: transpose-pairs
      for (int i = 0; i < kTile; ++i) store(to + (j * kWidth + i) * kParts<T> * kBlock / 2, r[i]);
    }
  }

  const float scale_;
  const float *const row_max_, *const inverse_sum_, *const delta_;  // [64]
  Prefetcher& prefetcher_;
  Strip strip_{};
  int64_t next_ = 0, last_ = 0;
};

template <class T>
int64_t backward_tiles_floats(const AttentionParams& p, const AttentionWork& work) {
  const int64_t ld = padded(p.head_dim), count = kParts<T>,
                pairs = count * padded_pairs(p.head_dim);
  return 3 * gathered_floats(p, work)                    // dq, dk, dv of windows
         + whole_blocks(work.max_rows) * 2 * ld          // dk, dv
         + whole_blocks(work.max_rows) * count * ld / 2  // keys by pairs of tokens
         + whole_blocks(work.max_rows) * 2 * pairs       // keys, values
         + kBlock * (2 * pairs + count * ld + ld)        // Q^T, dO^T, Q and dO by pairs, dq
         + 4 * kStrip * kBlock                           // S^T and dP^T of two strips
         + 2 * kStrip * count * kBlock                   // P^T and dS^T of two strips
         + kTile * count * kBlock                        // pairs
         + kBlock * count * kBlock                       // dS of two blocks of keys
         + 3 * kBlock;                                   // row_max, inverse_sum, delta
}

template <class T>
void backward_tiles(const AttentionGradParams& g, const AttentionItem& item, const NextItem&,
                    const AttentionWork& work, Prefetcher& prefetcher, float* memory) {
  const AttentionParams& p = g.forward;
  constexpr int64_t kRow = kParts<T> * kBlock;  // of an operand that has 64 elements a row
  const int64_t dim = p.head_dim, ld = padded(dim), length = item.length, kv_head = item.head;
  const int64_t depth_ld = kParts<T> * ld;
  const int64_t keys_begin = item.rows_begin, keys = item.rows_end - keys_begin;
  const int64_t keys_place = item.begin + keys_begin, group = p.heads / p.kv_heads;
  const int64_t blocks = whole_blocks(keys);
  const int64_t pairs_of_dim = kParts<T> * padded_pairs(dim);
  const int steps = dim_steps(dim);
  const auto take = [&](int64_t floats) {
    float* const taken = memory;
    memory += floats;
    return taken;
  };
  const auto take_pairs = [&](int64_t n) { return reinterpret_cast<uint32_t*>(take(n)); };
  const bool window = length <= kBlock;
  T* const dq_gather = take_gathered<T>(p, work, &memory);
  T* const dk_gather = take_gathered<T>(p, work, &memory);
  T* const dv_gather = take_gathered<T>(p, work, &memory);
  float *dk = take(blocks * ld), *dv = take(blocks * ld);
  uint32_t* key_depth = take_pairs(blocks * depth_ld / 2);  // [keys / 2, parts, ld]
  uint32_t* key_buffer = take_pairs(blocks * pairs_of_dim);
  uint32_t* value_buffer = take_pairs(blocks * pairs_of_dim);
  uint32_t *qt = take_pairs(kBlock * pairs_of_dim), *gt = take_pairs(kBlock * pairs_of_dim);
  uint32_t *q_depth = take_pairs(kBlock * depth_ld / 2),
           *g_depth = take_pairs(kBlock * depth_ld / 2);
  float* local_dq = take(kBlock * ld);
  float* st = take(2 * kStrip * kBlock);  // of two strips: [32 keys, 64 queries]
  float* dpt = take(2 * kStrip * kBlock);
  uint32_t* p_rows = take_pairs(kStrip * kRow);  // of two strips: [32 keys, parts, 32]
  uint32_t* ds_rows = take_pairs(kStrip * kRow);
  float* pairs = take(kTile * kRow);  // [16, parts, 64 queries] of 32 keys
  float* ds = take(kBlock * kRow);    // of two blocks of keys: [64 queries, parts, 32]
  float *row_max = take(kBlock), *inverse_sum = take(kBlock), *delta = take(kBlock);

  Left key;
  with_rotated<RotatedFor<T>>(p, rows_of<const T>(p.k, p.order, keys_place, kv_head), keys_place,
                              keys, rotated_buffer<T>(key_buffer, dk), [&](const auto& rows) {
                                pack_right_depth(rows, keys, dim, key_depth, Fetch{prefetcher, 1});
                                key = left_rows(rows, keys, dim, window, key_buffer);
                              });
  const Left value = left_rows(rows_of<const T>(p.v, p.order, keys_place, kv_head), keys, dim,
                               window, value_buffer);
  const float one = 1.f;
  SoftmaxGradient<T> softmax(score_scale(p), row_max, inverse_sum, delta, prefetcher);
  int product = 0;
  const auto beside = [&]() __attribute__((always_inline)) {
    prefetcher.fetch(kParts<T> == 1 ? 4 : 2);
    if (kParts<T> == 1 || ++product % 3 != 0) return;
    if (softmax.busy()) softmax.step();
  };

  // As in backward_item.
  const int64_t last_queries = (length - 1) / kBlock * kBlock;
  for (int64_t q0 = last_queries; q0 >= (p.causal ? keys_begin : 0); q0 -= kBlock) {
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const int64_t queries = minimum(kBlock, length - q0), place = item.begin + q0;
      const int lanes = static_cast<int>(whole_tiles(queries) / kWidth);  // mutant: backward-lanes
      const Rows<const T> dout = rows_of<const T>(g.dout, p.order, place, head);
      with_rotated<RotatedFor<T>>(
          p, query_rows<const T>(p, p.q, place, head), place, queries, local_dq,
          [&](const auto& rows) {
            pack_right_rows(rows, queries, dim, score_sign(p), qt, prefetcher);
            pack_right_depth(rows, queries, dim, q_depth, Fetch{prefetcher, 1});
          });
      pack_right_rows(dout, queries, dim, 1.f, gt, prefetcher);
      pack_right_depth(dout, queries, dim, g_depth, Fetch{prefetcher, 1});
      load_stats(p, head, place, queries, row_max, inverse_sum, delta);
      dots_of_rows(rows_of<const T>(p.out, p.order, place, head), dout, queries, dim, delta,
                   prefetcher);

      const DqSemaphore semaphore(item, p, head - kv_head * group, q0, queries);
      float* dq = item.shared_dq ? semaphore.dq : local_dq;
      const int64_t key_end = p.causal ? minimum(q0 + queries - keys_begin, keys) : keys;
      const int64_t units = (key_end + kStrip - 1) / kStrip;
      const auto keys_of = [&](int64_t k0) { return minimum(kStrip, key_end - k0); };
      const auto scores = [&](int64_t unit) {
        const int64_t k0 = unit * kStrip, at = unit % 2 * kStrip * kBlock;
        multiply_strip<T>(key.from(k0), keys_of(k0), qt, kRow, st + at, kBlock, lanes * kWidth,
                          steps, false, beside);
        multiply_strip<T>(value.from(k0), keys_of(k0), gt, kRow, dpt + at, kBlock, lanes * kWidth,
                          steps, false, beside);
      };
      const auto ds_of = [&](int64_t k0) {
        return ds + k0 / kBlock % 2 * kBlock * kRow / 2;  // mutant: backward-ds
      };
      const auto start_gradient = [&](int64_t unit) {
        const int64_t k0 = unit * kStrip, k = keys_begin + k0, at = unit % 2 * kStrip * kBlock;
        const int64_t to = unit % 2 * kStrip * kRow / 2;
        const int n = static_cast<int>(keys_of(k0));
        if (p.causal && k + n > q0 + 1) mask_causal(st + at, k, n, q0, lanes);
        softmax.start({st + at, dpt + at, n, lanes, p_rows + to, ds_rows + to, pairs,
                       ds_of(k0) + k0 % kBlock / 2});
      };
      const auto products = [&](int64_t unit) {
        const int64_t k0 = unit * kStrip;
        const bool first = head == kv_head * group && q0 == last_queries;
        const auto add = [&](const uint32_t* rows, const uint32_t* right, float* sum) {
          const uint32_t* left = rows + unit % 2 * kStrip * kRow / 2;
          multiply_strip<T>({reinterpret_cast<const char*>(left), 2 * kRow}, keys_of(k0), right,
                            depth_ld, sum + k0 * ld, ld, ld, lanes / 2, !first, beside);
        };
        add(p_rows, g_depth, dv);
        add(ds_rows, q_depth, dk);
        const int64_t end = k0 + keys_of(k0), begin = k0 / kBlock * kBlock;
        if (end % kBlock != 0 && end != key_end) return;  // mutant: backward-block-end
        if (begin == 0) semaphore.wait();
        for (int64_t i = 0; i < queries; i += kStrip) {
          const float* left = ds_of(begin) + i * kRow / 2;
          multiply_strip<T>({reinterpret_cast<const char*>(left), 2 * kRow}, queries - i,
                            key_depth + begin / 2 * depth_ld, depth_ld, dq + i * ld, ld, ld,
                            static_cast<int>(whole_tiles(end - begin) / 32), keys_begin + begin > 0,
                            beside);
        }
      };
      scores(0);
      for (int64_t unit = 0; unit < units; ++unit) {
        if (kParts<T> > 1) start_gradient(unit);
        if (unit + 1 < units) scores(unit + 1);
        if (kParts<T> == 1) {
          start_gradient(unit);
          softmax.finish();
        }
        if (unit > 0) products(unit - 1);
        softmax.finish();
      }
      products(units - 1);
      if (semaphore.last) {
        const RowEpilogue<true, T> rows{dq_gather ? result_rows_of(p, item, work, g.dq, dq_gather)
                                                  : query_rows<T>(p, g.dq, place, head),
                                        dim, &p.scale, work.non_temporal};
        store_rotated_back(p, dq, place, queries, rows, Fetch{prefetcher, 1});
      }
      semaphore.release();
    }
  }
  const auto key_rows = [&](const HeadsView& x, T* gather) {
    return result_rows_of(p, item, work, x, gather).from(keys_begin);
  };
  const RowEpilogue<true, T> dk_rows{key_rows(g.dk, dk_gather), dim, &p.scale, work.non_temporal};
  store_rotated_back(p, dk, keys_place, keys, dk_rows, Fetch{prefetcher, 1});
  store_rows<true>(dv, ld, keys, dim, &one, key_rows(g.dv, dv_gather), work.non_temporal,
                   Fetch{prefetcher, 1});
  write_gathered(p, item, work, g.dq, dq_gather);
  write_gathered(p, item, work, g.dk, dk_gather);
  write_gathered(p, item, work, g.dv, dv_gather);
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
