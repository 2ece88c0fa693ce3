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
        const __m512i a = load_row(outs[row + i], d, dim), b = load_row(douts[row + i], d, dim);
        low = fma(lower(a, T{}), lower(b, T{}), low);
        high = fma(upper(a, T{}), upper(b, T{}), high);
      }
      store(sums[i], low + high);
      prefetcher.fetch(1);
    }
    Vec r[kTile];
    for (int i = 0; i < kTile; ++i) r[i] = load(sums[i]);
    store(delta + row, reduce_rows(r, [](Vec a, Vec b) { return a + b; }));
  }
}

// What a strip of 32 keys leaves for the products that follow.
struct GradientStrip {
  uint32_t* p;   // [32, 32] P^T, pairs along queries
  uint32_t* ds;  // [32, 32] dS^T / scale
};

// st and dpt [32, 64]: scores and dP of `keys` <= 32 keys (rows) and vectors * 16 queries (lanes);
// pairs [16, 64]: dS^T / scale once more, in pairs along keys, 0 behind them.
template <class T>
VLMK_NOINLINE void gradient_strip(const float* st, const float* dpt, int keys, int vectors,
                                  float scale, const float* row_max, const float* inverse_sum,
                                  const float* delta, const GradientStrip& to, float* pairs,
                                  Prefetcher& prefetcher) {
  const Vec c = set1(scale);
  for (int j = 0; j < vectors; j += 2) {
    Vec shift[2], inverse[2], d[2];
    for (int v = 0; v < 2; ++v) {
      shift[v] = set1(0.f) - load(row_max + (j + v) * kWidth) * c;
      inverse[v] = load(inverse_sum + (j + v) * kWidth);
      d[v] = load(delta + (j + v) * kWidth);
    }
    int i = 0;
    for (; i < keys; i += 2) {
      Vec ds[2][2];
#pragma GCC unroll 2
      for (int u = 0; u < 2; ++u) {
        const int at = (i + u) * kBlock + j * kWidth;
        Vec p[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          p[v] = exp2<kDegree<T>>(fma(load(st + at + v * kWidth), c, shift[v])) * inverse[v];
          ds[u][v] = p[v] * (load(dpt + at + v * kWidth) - d[v]);
        }
        const int row = (i + u) * kBlock / 2 + j * kWidth / 2;
        _mm512_storeu_si512(to.p + row, narrow(p[0], p[1], T{}));
        _mm512_storeu_si512(to.ds + row, narrow(ds[u][0], ds[u][1], T{}));
      }
      const bool both = i + 1 < keys;  // mutant: gradient-both
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        store(pairs + i / 2 * kBlock + (j + v) * kWidth,
              narrow_pairs(ds[0][v], both ? ds[1][v] : set1(0.f), T{}));
      }
      prefetcher.fetch(3);
    }
    for (; i < kStrip; i += 2) {  // mutant: gradient-clear
      store(pairs + i / 2 * kBlock + j * kWidth, set1(0.f));
      store(pairs + i / 2 * kBlock + (j + 1) * kWidth, set1(0.f));
    }
  }
}

// pairs [16, 64 queries] of 32 keys -> 16 elements of each row of ds [64, 32].
VLMK_NOINLINE void transpose_pairs(const float* pairs, int vectors, float* ds) {
  for (int j = 0; j < vectors; ++j) {
    Vec r[kTile];
    for (int i = 0; i < kTile; ++i) r[i] = load(pairs + i * kBlock + j * kWidth);
    transpose(r);
    // mutant: transpose-pairs
    for (int i = 0; i < kTile; ++i) store(ds + (j * kWidth + i) * kBlock / 2, r[i]);
  }
}

int64_t backward_tiles_floats(const AttentionParams& p, const AttentionWork& work) {
  const int64_t ld = padded(p.head_dim), pairs = padded_pairs(p.head_dim);
  return 3 * gathered_floats(p, work)               // dq, dk, dv of windows
         + whole_blocks(work.max_rows) * 2 * ld     // dk, dv
         + whole_blocks(work.max_rows) * ld / 2     // keys by pairs of tokens
         + whole_blocks(work.max_rows) * 2 * pairs  // keys, values
         + kBlock * (2 * pairs + ld + ld)           // Q^T, dO^T, Q and dO by pairs, dq
         + 4 * kStrip * kBlock                      // S^T and dP^T of two strips
         + 2 * kStrip * kBlock                      // P^T and dS^T of two strips
         + kTile * kBlock                           // pairs
         + kBlock * kBlock                          // dS of two blocks of keys
         + 3 * kBlock;                              // row_max, inverse_sum, delta
}

template <class T>
void backward_tiles(const AttentionGradParams& g, const AttentionItem& item, const NextItem&,
                    const AttentionWork& work, Prefetcher& prefetcher, float* memory) {
  const AttentionParams& p = g.forward;
  const int64_t dim = p.head_dim, ld = padded(dim), length = item.length, kv_head = item.head;
  const int64_t keys_begin = item.rows_begin, keys = item.rows_end - keys_begin;
  const int64_t keys_place = item.begin + keys_begin, group = p.heads / p.kv_heads;
  const int64_t blocks = whole_blocks(keys);
  const int64_t pairs_of_dim = padded_pairs(dim);
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
  uint32_t* key_depth = take_pairs(blocks * ld / 2);  // [keys / 2, ld]
  float *key_buffer = take(blocks * pairs_of_dim), *value_buffer = take(blocks * pairs_of_dim);
  uint32_t *qt = take_pairs(kBlock * pairs_of_dim), *gt = take_pairs(kBlock * pairs_of_dim);
  uint32_t *q_depth = take_pairs(kBlock * ld / 2), *g_depth = take_pairs(kBlock * ld / 2);
  float* local_dq = take(kBlock * ld);
  float* st = take(2 * kStrip * kBlock);  // of two strips: [32 keys, 64 queries]
  float* dpt = take(2 * kStrip * kBlock);
  uint32_t* p_rows = take_pairs(kStrip * kBlock);  // of two strips: [32 keys, 32]
  uint32_t* ds_rows = take_pairs(kStrip * kBlock);
  float* pairs = take(kTile * kBlock);  // [16, 64 queries] of 32 keys
  float* ds = take(kBlock * kBlock);    // of two blocks of keys: [64 queries, 32]
  float *row_max = take(kBlock), *inverse_sum = take(kBlock), *delta = take(kBlock);

  Left key;
  with_rotated<Pairs>(p, rows_of<const T>(p.k, p.order, keys_place, kv_head), keys_place, keys,
                      key_buffer, [&](const auto& rows) {
                        pack_depth(rows, keys, dim, key_depth, Fetch{prefetcher, 1});
                        key = left_rows(rows, keys, dim, window, reinterpret_cast<T*>(key_buffer));
                      });
  const Left value = left_rows(rows_of<const T>(p.v, p.order, keys_place, kv_head), keys, dim,
                               window, reinterpret_cast<T*>(value_buffer));
  const float one = 1.f;

  // As in backward_item.
  const int64_t last_queries = (length - 1) / kBlock * kBlock;
  for (int64_t q0 = last_queries; q0 >= (p.causal ? keys_begin : 0); q0 -= kBlock) {
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const int64_t queries = minimum(kBlock, length - q0), place = item.begin + q0;
      const int lanes = static_cast<int>(whole_tiles(queries) / kWidth);  // mutant: backward-lanes
      const Rows<const T> dout = rows_of<const T>(g.dout, p.order, place, head);
      with_rotated<Pairs>(p, query_rows<const T>(p, p.q, place, head), place, queries, local_dq,
                          [&](const auto& rows) {
                            pack_right_rows(rows, queries, dim, score_sign(p), qt, prefetcher);
                            pack_depth(rows, queries, dim, q_depth, Fetch{prefetcher, 1});
                          });
      pack_right_rows(dout, queries, dim, 1.f, gt, prefetcher);
      pack_depth(dout, queries, dim, g_depth, Fetch{prefetcher, 1});
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
        multiply_strip<T>(key.from(k0), keys_of(k0), qt, kBlock, st + at, kBlock, lanes * kWidth,
                          steps, false, prefetcher);
        multiply_strip<T>(value.from(k0), keys_of(k0), gt, kBlock, dpt + at, kBlock, lanes * kWidth,
                          steps, false, prefetcher);
      };
      const auto ds_of = [&](int64_t k0) {
        return ds + k0 / kBlock % 2 * kBlock * kBlock / 2;  // mutant: backward-ds
      };
      const auto gradient = [&](int64_t unit) {
        const int64_t k0 = unit * kStrip, k = keys_begin + k0, at = unit % 2 * kStrip * kBlock;
        const int n = static_cast<int>(keys_of(k0));
        if (p.causal && k + n > q0 + 1) mask_causal(st + at, k, n, q0, lanes);
        gradient_strip<T>(st + at, dpt + at, n, lanes, score_scale(p), row_max, inverse_sum, delta,
                          {p_rows + at / 2, ds_rows + at / 2}, pairs, prefetcher);
        transpose_pairs(pairs, lanes, ds_of(k0) + k0 % kBlock / 2);
      };
      const auto products = [&](int64_t unit) {
        const int64_t k0 = unit * kStrip;
        const bool first = head == kv_head * group && q0 == last_queries;
        const auto add = [&](const uint32_t* rows, const uint32_t* right, float* sum) {
          const uint32_t* left = rows + unit % 2 * kStrip * kBlock / 2;
          multiply_strip<T>({reinterpret_cast<const char*>(left), 2 * kBlock}, keys_of(k0), right,
                            ld, sum + k0 * ld, ld, ld, lanes / 2, !first, prefetcher);
        };
        add(p_rows, g_depth, dv);
        add(ds_rows, q_depth, dk);
        const int64_t end = k0 + keys_of(k0), begin = k0 / kBlock * kBlock;
        if (end % kBlock != 0 && end != key_end) return;  // mutant: backward-block-end
        if (begin == 0) semaphore.wait();
        for (int64_t i = 0; i < queries; i += kStrip) {
          const float* left = ds_of(begin) + i * kBlock / 2;
          multiply_strip<T>({reinterpret_cast<const char*>(left), 2 * kBlock}, queries - i,
                            key_depth + begin / 2 * ld, ld, dq + i * ld, ld, ld,
                            static_cast<int>(whole_tiles(end - begin) / 32), keys_begin + begin > 0,
                            prefetcher);
        }
      };
      scores(0);
      for (int64_t unit = 0; unit < units; ++unit) {
        if (unit + 1 < units) scores(unit + 1);
        gradient(unit);
        if (unit > 0) products(unit - 1);
      }
      products(units - 1);
      if (semaphore.last) {
        const RowEpilogue<true, T> rows{dq_gather ? result_rows_of(p, item, work, g.dq, dq_gather)
                                                  : query_rows<T>(p, g.dq, place, head),
                                        dim, &p.scale, false};
        store_rotated_back(p, dq, place, queries, rows, Fetch{prefetcher, 1});
      }
      semaphore.release();
    }
  }
  const auto key_rows = [&](const HeadsView& x, T* gather) {
    return result_rows_of(p, item, work, x, gather).from(keys_begin);
  };
  const RowEpilogue<true, T> dk_rows{key_rows(g.dk, dk_gather), dim, &p.scale, false};
  store_rotated_back(p, dk, keys_place, keys, dk_rows, Fetch{prefetcher, 1});
  store_rows<true>(dv, ld, keys, dim, &one, key_rows(g.dv, dv_gather), false, Fetch{prefetcher, 1});
  write_gathered(p, item, work, g.dq, dq_gather);
  write_gathered(p, item, work, g.dk, dk_gather);
  write_gathered(p, item, work, g.dv, dv_gather);
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
