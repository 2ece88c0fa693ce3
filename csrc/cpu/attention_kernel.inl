// Attention for one instruction set, included by attention_<isa>.cpp, which defines VLMK_ISA.
//
// Scores are computed transposed, S^T = K Q^T, with up to 64 queries in vector lanes: row maxima and
// sums are then vertical operations, and a ragged number of keys needs no masks, because keys are
// loop counts. The softmax is online over blocks of 64 keys. Every product is gemm() of gemm.h on
// panels in cache:
//   forward   S^T = K Q^T          O  = P V
//   backward  S^T = K Q^T          dP^T = V dO^T      dV += P^T dO      dK += dS^T Q      dQ += dS K
// Storage types are converted while packing; all arithmetic is fp32.
//
// Speed of light: 4 D (forward) or 10 D (backward) FLOPs per query-key pair, against one exp2 (about
// 12 operations) per pair: GEMM-bound for every D >= 64.
#include <omp.h>

#include <type_traits>

#include "cpu/attention.h"
#include "cpu/gemm.h"
#include "cpu/scratch.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

constexpr int kBlock = 64;            // queries in lanes; also keys per step of the online softmax
constexpr float kLowest = -3e38f;
constexpr int64_t kInPlaceRows = 128;  // more rows than that at a large stride cost TLB misses

VLMK_INLINE int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
VLMK_INLINE int vectors_of(int64_t n) { return static_cast<int>((n + kWidth - 1) / kWidth); }
// Leading dimension of packed rows: whole cache lines.
VLMK_INLINE int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

// Scores are kept as sign(scale) * q.k, whose order is that of the probabilities; |scale| and the
// change to base 2 come in one FMA before exp2. So a score has no rounding that plain torch's has
// not, and -inf * scale is no NaN, scale = 0 included.
VLMK_INLINE float score_sign(const AttentionParams& p) { return p.scale < 0 ? -1.f : 1.f; }
VLMK_INLINE float score_scale(const AttentionParams& p) {
  const float scale = __builtin_fabsf(p.scale) * 1.44269504f;
  return scale > 1e-30f ? scale : 1e-30f;
}

template <class T>
VLMK_INLINE T* rows_of(const HeadsView& x, int64_t token, int64_t head) {
  return static_cast<T*>(x.data) + token * x.token_stride + head * x.head_stride;
}

// An fp32 matrix, rows contiguous.
struct Panel {
  const float* data;
  ptrdiff_t ld;
};

// src [n, dim] -> dst [n, padded(dim)], zeros behind dim.
template <class T>
VLMK_NOINLINE void pack_rows(const T* src, int64_t stride, int64_t n, int64_t dim, float* dst) {
  const int64_t ld = padded(dim), whole = dim / kWidth * kWidth;
  for (int64_t i = 0; i < n; ++i, src += stride, dst += ld) {
    int64_t d = 0;
    for (; d < whole; d += kWidth) store(dst + d, load(src + d));
    if (d < dim) {
      store(dst + d, load_n(src + d, static_cast<int>(dim - d)));
      d += kWidth;
    }
    for (; d < ld; d += kWidth) store(dst + d, set1(0.f));
  }
}

// As pack_rows, but fp32 rows are used where they are: for panels that gemm() reads by broadcasts.
template <class T>
VLMK_INLINE Panel pack_or_view(const T* src, int64_t stride, int64_t n, int64_t dim, float* dst) {
  if constexpr (std::is_same<T, float>::value) {
    if (n <= kInPlaceRows) return {src, stride};
  }
  pack_rows(src, stride, n, dim, dst);
  return {dst, padded(dim)};
}

// src [n <= 64, dim] -> dst [dim, 64] times scale; zeros in the lanes from n to a whole vector.
template <class T>
VLMK_NOINLINE void pack_transposed(const T* src, int64_t stride, int64_t n, int64_t dim,
                                   float scale, float* dst) {
  const Vec factor = set1(scale);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t rows = minimum(kWidth, n - i);
    for (int64_t d = 0; d < dim; d += kWidth) {
      const int64_t columns = minimum(kWidth, dim - d);
      const T* from = src + i * stride + d;
      Vec r[kWidth];
      if (rows == kWidth && columns == kWidth) {
#pragma GCC unroll 16
        for (int j = 0; j < kWidth; ++j) r[j] = load(from + j * stride);
      } else {
        for (int j = 0; j < kWidth; ++j) {
          r[j] = j < rows ? load_n(from + j * stride, static_cast<int>(columns)) : set1(0.f);
        }
      }
      transpose(r);
      float* to = dst + d * kBlock + i;
      if (columns == kWidth) {
#pragma GCC unroll 16
        for (int j = 0; j < kWidth; ++j) store(to + j * kBlock, r[j] * factor);
      } else {
        for (int j = 0; j < columns; ++j) store(to + j * kBlock, r[j] * factor);
      }
    }
  }
}

VLMK_INLINE void copy(const float* src, int64_t n, float* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = src[i];
}

// src [n, padded(dim)], row i times scale[i] (or scale[0] if kOneScale) -> dst [n, dim]
template <bool kOneScale, class T>
VLMK_NOINLINE void store_rows(const float* src, int64_t n, int64_t dim, const float* scale, T* dst,
                              int64_t stride) {
  const int64_t ld = padded(dim), whole = dim / kWidth * kWidth;
  for (int64_t i = 0; i < n; ++i, src += ld, dst += stride) {
    const Vec s = set1(scale[kOneScale ? 0 : i]);
    for (int64_t d = 0; d < whole; d += kWidth) store(dst + d, load(src + d) * s);
    if (whole < dim) {
      store_n(dst + whole, load(src + whole) * s, static_cast<int>(dim - whole));
    }
  }
}

// Scores of keys after their query become -inf. s [keys, 64]: key i is at position k0 + i, the query
// of lane j at q0 + j.
VLMK_INLINE void mask_causal(float* s, int64_t k0, int64_t keys, int64_t q0, int vectors) {
  for (int64_t i = 0; i < keys; ++i) {
    for (int j = 0; j < vectors; ++j) {
      float* at = s + i * kBlock + j * kWidth;
      const int first = static_cast<int>(k0 + i - q0) - j * kWidth;
      if (first > 0) store(at, keep_from(first, load(at), set1(-__builtin_inff())));
    }
  }
}

// One step of the online softmax on the scores s [keys, 64]: s becomes 2^(scale * (s - max)); row_max,
// row_sum and correction [64] (what earlier sums and outputs must be multiplied by) are updated.
VLMK_NOINLINE void softmax_step(float* s, int keys, int vectors, float scale, float* row_max,
                                float* row_sum, float* correction) {
  const Vec c = set1(scale);
  for (int j = 0; j < vectors; ++j) {
    float* column = s + j * kWidth;
    const Vec old_max = load(row_max + j * kWidth);
    Vec m0 = old_max, m1 = old_max, m2 = old_max, m3 = old_max;
    int i = 0;
    for (; i + 4 <= keys; i += 4) {
      m0 = max(m0, load(column + i * kBlock));
      m1 = max(m1, load(column + (i + 1) * kBlock));
      m2 = max(m2, load(column + (i + 2) * kBlock));
      m3 = max(m3, load(column + (i + 3) * kBlock));
    }
    for (; i < keys; ++i) m0 = max(m0, load(column + i * kBlock));
    const Vec new_max = max(max(m0, m1), max(m2, m3));
    // The rounding of this product is the same for all keys and cancels, in the backward too; hence
    // no FMA in `moved`, which takes sums from the old product to the new.
    const Vec shift = set1(0.f) - new_max * c;

    Vec sum0 = set1(0.f), sum1 = set1(0.f);
    i = 0;
    for (; i + 2 <= keys; i += 2) {
      const Vec e0 = exp2(fma(load(column + i * kBlock), c, shift));
      const Vec e1 = exp2(fma(load(column + (i + 1) * kBlock), c, shift));
      store(column + i * kBlock, e0);
      store(column + (i + 1) * kBlock, e1);
      sum0 = sum0 + e0;
      sum1 = sum1 + e1;
    }
    if (i < keys) {
      const Vec e = exp2(fma(load(column + i * kBlock), c, shift));
      store(column + i * kBlock, e);
      sum0 = sum0 + e;
    }
    const Vec moved = exp2(old_max * c + shift);
    store(correction + j * kWidth, moved);
    store(row_max + j * kWidth, new_max);
    store(row_sum + j * kWidth, fma(load(row_sum + j * kWidth), moved, sum0 + sum1));
  }
}

int64_t forward_floats(const AttentionParams& p, int64_t max_length) {
  return 2 * max_length * padded(p.head_dim)           // keys, values
         + kBlock * (padded(p.head_dim) * 2 + kBlock)  // Q^T, output, S^T
         + 3 * kBlock;                                 // row_max, row_sum, correction
}

template <class T>
void forward_item(const AttentionParams& p, const AttentionItem& item, float* memory) {
  const int64_t dim = p.head_dim, ld = padded(dim);
  const int64_t kv_head = item.head / (p.heads / p.kv_heads);
  const int64_t keys = p.causal ? item.q_end : item.length;
  float* key_buffer = memory;
  float* values = key_buffer + keys * ld;  // [keys, ld]
  float* qt = values + keys * ld;          // [dim, 64]
  float* out = qt + ld * kBlock;           // [64, ld]
  float* s = out + ld * kBlock;            // [64 keys, 64 queries]
  float* row_max = s + kBlock * kBlock;    // [64]
  float* row_sum = row_max + kBlock;
  float* correction = row_sum + kBlock;

  const Panel key = pack_or_view(rows_of<const T>(p.k, item.begin, kv_head), p.k.token_stride, keys,
                                 dim, key_buffer);
  pack_rows(rows_of<const T>(p.v, item.begin, kv_head), p.v.token_stride, keys, dim, values);

  for (int64_t q0 = item.q_begin; q0 < item.q_end; q0 += kBlock) {
    const int64_t queries = minimum(kBlock, item.q_end - q0);
    const int lanes = vectors_of(queries);
    pack_transposed(rows_of<const T>(p.q, item.begin + q0, item.head), p.q.token_stride, queries,
                    dim, score_sign(p), qt);
    for (int j = 0; j < lanes; ++j) {
      store(row_max + j * kWidth, set1(kLowest));
      store(row_sum + j * kWidth, set1(0.f));
    }
    const int64_t key_end = p.causal ? q0 + queries : keys;
    for (int64_t k0 = 0; k0 < key_end; k0 += kBlock) {
      const int n = static_cast<int>(minimum(kBlock, key_end - k0));
      gemm<false>({key.data + k0 * key.ld, key.ld, qt, kBlock, s, kBlock, n, lanes,
                   static_cast<int>(dim), Start::kZero, nullptr});
      if (p.causal && k0 + n > q0 + 1) mask_causal(s, k0, n, q0, lanes);
      softmax_step(s, n, lanes, score_scale(p), row_max, row_sum, correction);
      gemm<true>({s, kBlock, values + k0 * ld, ld, out, ld, static_cast<int>(queries),
                  vectors_of(dim), n, k0 == 0 ? Start::kZero : Start::kScale, correction});
    }
    const int64_t stats = item.head * p.tokens + item.begin + q0;
    copy(row_max, queries, p.row_max + stats);
    copy(row_sum, queries, p.row_sum + stats);
    for (int j = 0; j < lanes; ++j) {
      store(correction + j * kWidth, set1(1.f) / load(row_sum + j * kWidth));
    }
    store_rows<false>(out, queries, dim, correction, rows_of<T>(p.out, item.begin + q0, item.head),
                      p.out.token_stride);
  }
}

// delta [64] = sum over dim of out * dout, a row's share of the softmax's gradient.
template <class T>
VLMK_NOINLINE void row_dots(const T* out, int64_t out_stride, const T* dout, int64_t dout_stride,
                            int64_t n, int64_t dim, float* delta) {
  const int64_t whole = dim / kWidth * kWidth;
  for (int64_t i = 0; i < n; ++i, out += out_stride, dout += dout_stride) {
    Vec sum = set1(0.f);
    for (int64_t d = 0; d < whole; d += kWidth) sum = fma(load(out + d), load(dout + d), sum);
    if (whole < dim) {
      const int left = static_cast<int>(dim - whole);
      sum = fma(load_n(out + whole, left), load_n(dout + whole, left), sum);
    }
    delta[i] = reduce_add(sum);
  }
}

// st [keys, 64]: scores -> probabilities; dpt [keys, 64]: dP^T -> dS^T / scale.
VLMK_NOINLINE void softmax_gradient(float* st, float* dpt, int keys, int vectors, float scale,
                                    const float* row_max, const float* inverse_sum,
                                    const float* delta) {
  const Vec c = set1(scale);
  for (int j = 0; j < vectors; ++j) {
    const Vec shift = set1(0.f) - load(row_max + j * kWidth) * c;
    const Vec inverse = load(inverse_sum + j * kWidth), d = load(delta + j * kWidth);
    for (int i = 0; i < keys; ++i) {
      const int at = i * kBlock + j * kWidth;
      const Vec p = exp2(fma(load(st + at), c, shift)) * inverse;
      store(st + at, p);
      store(dpt + at, p * (load(dpt + at) - d));
    }
  }
}

int64_t backward_floats(const AttentionParams& p, int64_t max_length) {
  const int64_t ld = padded(p.head_dim);
  return 4 * max_length * ld                    // keys, values, dk, dv
         + kBlock * (5 * ld + 2 * kBlock + 3);  // Q^T, dO^T, Q, dO, dq, S^T, dP^T, 3 rows
}

template <class T>
void backward_item(const AttentionGradParams& g, const AttentionItem& item, float* memory) {
  const AttentionParams& p = g.forward;
  const int64_t dim = p.head_dim, ld = padded(dim), length = item.length, kv_head = item.head;
  const int columns = vectors_of(dim), depth = static_cast<int>(dim);
  float* keys = memory;               // [length, ld]
  float* value_buffer = keys + length * ld;
  float* dk = value_buffer + length * ld;
  float* dv = dk + length * ld;
  float* qt = dv + length * ld;       // [dim, 64]
  float* gt = qt + ld * kBlock;
  float* q_rows = gt + ld * kBlock;   // [64, ld]
  float* g_rows = q_rows + ld * kBlock;
  float* dq = g_rows + ld * kBlock;
  float* st = dq + ld * kBlock;       // [64 keys, 64 queries]
  float* dpt = st + kBlock * kBlock;
  float* row_max = dpt + kBlock * kBlock;  // [64]
  float* inverse_sum = row_max + kBlock;
  float* delta = inverse_sum + kBlock;

  pack_rows(rows_of<const T>(p.k, item.begin, kv_head), p.k.token_stride, length, dim, keys);
  const Panel value = pack_or_view(rows_of<const T>(p.v, item.begin, kv_head), p.v.token_stride,
                                   length, dim, value_buffer);

  const int64_t group = p.heads / p.kv_heads;
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int64_t q0 = 0; q0 < length; q0 += kBlock) {
      const int64_t queries = minimum(kBlock, length - q0), token = item.begin + q0;
      const int lanes = vectors_of(queries), rows = static_cast<int>(queries);
      const T* q = rows_of<const T>(p.q, token, head);
      const T* dout = rows_of<const T>(g.dout, token, head);
      pack_transposed(q, p.q.token_stride, queries, dim, score_sign(p), qt);
      pack_transposed(dout, g.dout.token_stride, queries, dim, 1.f, gt);
      pack_rows(q, p.q.token_stride, queries, dim, q_rows);
      pack_rows(dout, g.dout.token_stride, queries, dim, g_rows);
      for (int i = 0; i < kBlock; ++i) {
        row_max[i] = i < rows ? p.row_max[head * p.tokens + token + i] : 0.f;
        inverse_sum[i] = i < rows ? 1.f / p.row_sum[head * p.tokens + token + i] : 0.f;
        delta[i] = 0.f;
      }
      row_dots(rows_of<const T>(p.out, token, head), p.out.token_stride, dout, g.dout.token_stride,
               queries, dim, delta);

      const int64_t key_end = p.causal ? q0 + queries : length;
      for (int64_t k0 = 0; k0 < key_end; k0 += kBlock) {
        const int n = static_cast<int>(minimum(kBlock, key_end - k0));
        gemm<false>({keys + k0 * ld, ld, qt, kBlock, st, kBlock, n, lanes, depth, Start::kZero,
                     nullptr});
        gemm<false>({value.data + k0 * value.ld, value.ld, gt, kBlock, dpt, kBlock, n, lanes, depth,
                     Start::kZero, nullptr});
        if (p.causal && k0 + n > q0 + 1) mask_causal(st, k0, n, q0, lanes);
        softmax_gradient(st, dpt, n, lanes, score_scale(p), row_max, inverse_sum, delta);
        // Blocks of keys are first met by the group's first head: at the first block of queries, or
        // with a causal mask at the diagonal.
        const bool first = head == kv_head * group && q0 == (p.causal ? k0 : 0);
        const Start start = first ? Start::kZero : Start::kAdd;
        gemm<false>({st, kBlock, g_rows, ld, dv + k0 * ld, ld, n, columns, rows, start, nullptr});
        gemm<false>({dpt, kBlock, q_rows, ld, dk + k0 * ld, ld, n, columns, rows, start, nullptr});
        gemm<true>({dpt, kBlock, keys + k0 * ld, ld, dq, ld, rows, columns, n,
                    k0 == 0 ? Start::kZero : Start::kAdd, nullptr});
      }
      store_rows<true>(dq, queries, dim, &p.scale, rows_of<T>(g.dq, token, head),
                       g.dq.token_stride);
    }
  }
  const float one = 1.f;
  store_rows<true>(dk, length, dim, &p.scale, rows_of<T>(g.dk, item.begin, kv_head),
                   g.dk.token_stride);
  store_rows<true>(dv, length, dim, &one, rows_of<T>(g.dv, item.begin, kv_head), g.dv.token_stride);
}

// Runs function(params, item, memory) over all items on torch's threads.
template <class Params, class Function>
VLMK_INLINE void run_items(const Params& params, const AttentionWork& work, int64_t floats,
                           Function function) {
  bool out_of_memory = false;
#pragma omp parallel for schedule(dynamic, 1) if (work.count > 1)
  for (int64_t i = 0; i < work.count; ++i) {
    if (float* memory = scratch(static_cast<size_t>(floats))) {
      function(params, work.items[i], memory);
    } else {
#pragma omp atomic write
      out_of_memory = true;
    }
  }
  if (out_of_memory) throw_out_of_memory(floats);
}

}  // namespace

void attention_forward_items(const AttentionParams& p, const AttentionWork& work) {
  const int64_t floats = forward_floats(p, work.max_length);
  switch (p.dtype) {
    case DType::kFloat32:
      return run_items(p, work, floats, forward_item<float>);
    case DType::kBFloat16:
      return run_items(p, work, floats, forward_item<BFloat16>);
    case DType::kFloat16:
      return run_items(p, work, floats, forward_item<Float16>);
  }
}

void attention_backward_items(const AttentionGradParams& g, const AttentionWork& work) {
  const int64_t floats = backward_floats(g.forward, work.max_length);
  switch (g.forward.dtype) {
    case DType::kFloat32:
      return run_items(g, work, floats, backward_item<float>);
    case DType::kBFloat16:
      return run_items(g, work, floats, backward_item<BFloat16>);
    case DType::kFloat16:
      return run_items(g, work, floats, backward_item<Float16>);
  }
}

}  // namespace VLMK_ISA
}  // namespace vlmk
