// The Adam step, compiled once per instruction set (dispatch.h).
//
// Speed of light, bytes an element (about 15 operations: memory-bound by far):
//   grad   moments  bf16 copy   reads         writes       bytes
//   fp32   fp32     no          4+4+4+4       4+4+4        28
//   bf16   fp32     yes         2+4+4+4       4+4+4+2      28   (+2 where the copy isn't streamed)
//   bf16   bf16     yes         2+4+2+2       4+2+2+2      20
//   bf16   8-bit    yes         2+4+1+1       4+1+1+2      16   (and 1/16 of scales; about 80
//                                                               operations: no longer memory-bound)
// Non-temporal stores to arrays that were just read cost 5%; for the bf16 copy, which is not read,
// they save reading it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/adam/adam.h"
#include "cpu/adam/dynamic_tree.inl"
#include "cpu/simd.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// exp_avg + (1 - beta1) * (grad - exp_avg) as torch's lerp computes it: from the nearer end.
struct Lerp {
  float weight;
  bool from_grad;
};

// Which product of beta2 * v + (1 - beta2) * g * g is rounded before the addition: that of v in
// torch's vectors of 8 or 16, that of g in the at most 7 last elements of a tensor, where its
// compiler chose the other contraction.
enum class Rounded { kV, kG };

// The lower half of a canonical NaN is 0, as is that of a bf16 number.
VLMK_INLINE Vec canonical_nan(Vec x) { return x != x ? set1(NAN) : x; }

// kCanonicalNan: of gradients, so that no NaN among the moments has a lower half either.
template <Rounded kRounded, bool kCanonicalNan>
VLMK_INLINE void update(const AdamConstants& c, const Lerp& lerp, Vec g, Vec& p, Vec& m, Vec& v) {
  if (c.scales) g = g * set1(c.grad_factor) * set1(c.grad_scale);
  if (c.decays) {
    if (c.decoupled) {
      p = p * set1(c.decay);
    } else {
      g = fma(p, set1(c.l2), g);
      if (kCanonicalNan) g = canonical_nan(g);
    }
  }
  m = fma(set1(lerp.weight), g - m, lerp.from_grad ? g : m);
  const Vec scaled_g = set1(c.beta2_rest) * g;
  v = kRounded == Rounded::kV ? fma(scaled_g, g, v * set1(c.beta2))
                              : fma(v, set1(c.beta2), scaled_g * g);
  const Vec denominator = sqrt(v) / set1(c.correction2) + set1(c.eps);
  p = p + set1(c.negative_step) * m / denominator;
}

// Random bits are a hash of counters: a Weyl sequence that starts elsewhere at each step, so that
// an element has the same whatever thread or vector it is in. Those of a vector from `first` on:
constexpr uint32_t kWeyl = 0x9e3779b1U;
VLMK_INLINE VecUint counters_from(uint32_t key, int64_t first) {
  VecUint x;
  for (int lane = 0; lane < kWidth; ++lane) x[lane] = static_cast<uint32_t>(lane) * kWeyl;
  return x + (static_cast<uint32_t>(first) * kWeyl + key);
}

// For each counter 16 random bits in the upper half and 16 in the lower: half a round of `mix`
// (launch.cpp).
VLMK_INLINE VecUint random_bits(VecUint x) {
  x ^= x >> 16;
  return x * 0x7feb352dU;
}

// The bf16 neighbour above in magnitude with the probability of how near it is, else the one below:
// the upper half of the result. `random` has 16 bits; a NaN has no lower half to which they add up.
// Rounded to nearest, exp_avg_sq could not follow falling gradients: with beta2 = 0.999 a step
// changes it by a tenth of a percent, and bf16 values lie 0.4 to 0.8% apart.
VLMK_INLINE VecUint round_randomly(Vec x, VecUint random) {
  return reinterpret_cast<VecUint>(x) + random;
}

VLMK_INLINE void store_upper(BFloat16* p, VecUint u) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), upper_halves(reinterpret_cast<__m512i>(u)));
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), upper_halves(reinterpret_cast<__m256i>(u)));
#else
  for (int i = 0; i < kWidth; ++i) p[i].bits = static_cast<uint16_t>(u[i] >> 16);
#endif
}

VLMK_INLINE void store_moments(float* exp_avg, float* exp_avg_sq, Vec m, Vec v, VecUint) {
  store(exp_avg, m);
  store(exp_avg_sq, v);
}
VLMK_INLINE void store_moments(BFloat16* exp_avg, BFloat16* exp_avg_sq, Vec m, Vec v,
                               VecUint counters) {
  const VecUint random = random_bits(counters);
  store_upper(exp_avg, round_randomly(m, random >> 16));
  store_upper(exp_avg_sq, round_randomly(v, random & 0xffffU));
}

enum class Low { kNone, kStored, kStreamed };

// Whether a copy of these parameters has a number that is too small to be normal and may be 0 where
// it should not: one instruction of AVX-512 BF16 rounds as six others do, but for these.
#if defined(__AVX512BF16__)
struct Smallest {
  Vec magnitude = set1(1.f);
  VLMK_MEMBER void see(Vec p) { magnitude = _mm512_range_ps(magnitude, p, 0b1010); }
  VLMK_MEMBER bool is_wrong() const {
    return _mm512_cmp_ps_mask(magnitude, set1(0x1p-126f), _CMP_LT_OQ) != 0;
  }
};
VLMK_INLINE void store_exactly(BFloat16* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_exactly(x));
}
#else
struct Smallest {
  VLMK_MEMBER void see(Vec) {}
  VLMK_MEMBER bool is_wrong() const { return false; }
};
VLMK_INLINE void store_exactly(BFloat16* p, Vec x, int n) { store_n(p, x, n); }
#endif

// Elements whose lines are prefetched together, an array's after another's, before as many are
// stepped. With 16-bit moments, which arithmetic bounds, 1.04x of a line of each array in turn on
// Zen 4, with float32 ones 1.00x.
constexpr int64_t kBurst = 64;

// Where that is, how far ahead and into which level of the caches: on Zen 4, one thread, with
// float32 moments, which memory bounds, 1 KB of float32 ahead into the second one 1.15x of 2 KB
// into the first (none: 1.09x of it); with 16-bit ones 512 bytes into the first 1.03x of 1 KB,
// which was 1.06x of 2 KB (into the second 1.00x).
template <class Moment>
constexpr int64_t kElementsAhead = sizeof(Moment) == sizeof(float) ? 256 : 128;
template <class Moment>
constexpr int kLevel = sizeof(Moment) == sizeof(float) ? 2 : 3;

template <int kLevel, class T>
VLMK_INLINE void prefetch(const T* x) {
  for (int64_t i = 0; i < kBurst; i += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(x + i, 0, kLevel);
  }
}

template <class Grad, class Moment, Low kLow>
void run(const AdamConstants& c, const Lerp& lerp, const AdamChunk& chunk) {
  constexpr bool kCanonicalNan = sizeof(Moment) == sizeof(BFloat16);
  float* param = chunk.tensor->param;
  const Grad* grad = static_cast<const Grad*>(chunk.tensor->grad);
  Moment* exp_avg = static_cast<Moment*>(chunk.tensor->exp_avg);
  Moment* exp_avg_sq = static_cast<Moment*>(chunk.tensor->exp_avg_sq);
  BFloat16* low = static_cast<BFloat16*>(chunk.tensor->low);
  const int64_t first = chunk.tensor->first;
  VecUint counters = counters_from(c.key, first + chunk.begin);
  Smallest smallest;
  const auto step = [&](int64_t i) __attribute__((always_inline)) {
    Vec p = load(param + i), m = load(exp_avg + i), v = load(exp_avg_sq + i), g = load(grad + i);
    if constexpr (kCanonicalNan && sizeof(Grad) == sizeof(float)) g = canonical_nan(g);
    update<Rounded::kV, kCanonicalNan>(c, lerp, g, p, m, v);
    store(param + i, p);
    store_moments(exp_avg + i, exp_avg_sq + i, m, v, counters);
    counters += kWidth * kWeyl;
    if (kLow == Low::kNone) return;
    smallest.see(p);
    if (kLow == Low::kStored) store(low + i, p);
    if (kLow == Low::kStreamed) stream(low + i, p);
  };
  const auto correct = [&](int64_t from, int64_t to) __attribute__((always_inline)) {
    if (kLow == Low::kNone || __builtin_expect(!smallest.is_wrong(), 1)) return;
    if (kLow == Low::kStreamed) fence_streams();
    for (; from < to; from += kWidth) store_exactly(low + from, load(param + from), kWidth);
    smallest = {};
  };
  int64_t i = chunk.begin;
  // Where the lines ahead are those of the tensor that comes then.
  const int64_t end_ahead =
      chunk.after ? std::max(chunk.end - kElementsAhead<Moment>, i) : chunk.end;
  const auto run_to = [&](int64_t end, const AdamTensor& ahead, int64_t by) {
    const float* const next_param = ahead.param + by;
    const auto* const next_grad = static_cast<const Grad*>(ahead.grad) + by;
    const auto* const next_avg = static_cast<const Moment*>(ahead.exp_avg) + by;
    const auto* const next_sq = static_cast<const Moment*>(ahead.exp_avg_sq) + by;
    while (i + kBurst <= end) {
      prefetch<kLevel<Moment>>(next_param + i);
      prefetch<kLevel<Moment>>(next_grad + i);
      prefetch<kLevel<Moment>>(next_avg + i);
      prefetch<kLevel<Moment>>(next_sq + i);
#pragma GCC unroll 2
      for (int64_t j = 0; j < kBurst; j += kWidth, i += kWidth) step(i);
      correct(i - kBurst, i);
    }
  };
  run_to(end_ahead, *chunk.tensor, kElementsAhead<Moment>);
  if (chunk.after) run_to(chunk.end, *chunk.after, -i);
  for (; i + kWidth <= chunk.end; i += kWidth) {
    step(i);
    correct(i, i + kWidth);
  }
  while (i < chunk.end) {  // the tensor's last elements: 8 at a time while there are 8, see Rounded
    const int64_t left = chunk.end - i;
    const int n = static_cast<int>(left >= 8 ? 8 : left);
    const int lanes = n < kWidth ? n : kWidth;
    Vec p = load_n(param + i, lanes), m = load_n(exp_avg + i, lanes);
    Vec v = load_n(exp_avg_sq + i, lanes);
    Vec g = load_n(grad + i, lanes);
    if (kCanonicalNan) g = canonical_nan(g);
    if (left >= 8) {
      update<Rounded::kV, kCanonicalNan>(c, lerp, g, p, m, v);
    } else {
      update<Rounded::kG, kCanonicalNan>(c, lerp, g, p, m, v);
    }
    store_n(param + i, p, lanes);
    Moment moments[2][kWidth];
    store_moments(moments[0], moments[1], m, v, counters_from(c.key, first + i));
    for (int lane = 0; lane < lanes; ++lane) {
      exp_avg[i + lane] = moments[0][lane];
      exp_avg_sq[i + lane] = moments[1][lane];
    }
    if (kLow != Low::kNone) store_exactly(low + i, p, lanes);
    i += lanes;
  }
  if (kLow == Low::kStreamed) fence_streams();
}

template <class Grad, class Moment>
void run(const AdamConstants& c, const Lerp& lerp, const AdamChunk& chunk) {
  const AdamTensor& t = *chunk.tensor;
  if (t.low == nullptr) {
    run<Grad, Moment, Low::kNone>(c, lerp, chunk);
  } else if (chunk.stream && reinterpret_cast<uintptr_t>(t.low) % 64 == 0) {
    run<Grad, Moment, Low::kStreamed>(c, lerp, chunk);
  } else {
    run<Grad, Moment, Low::kStored>(c, lerp, chunk);
  }
}

// The scale of a block whose magnitudes are at most `largest`: NaN where one was not finite, so
// that the whole block is NaN from then on; 0 where it has no inverse.
VLMK_INLINE float block_scale(Vec largest, Vec not_finite) {
  alignas(64) float lanes[kWidth];
  if (!(reduce_add(not_finite) == 0.f)) return NAN;
  store(lanes, largest);
  float scale = 0;
  for (int i = 0; i < kWidth; ++i) scale = lanes[i] > scale ? lanes[i] : scale;
  return scale < 0x1p-120f ? 0.f : scale;
}

// One block: param, grad, codes [n rounded up to kWidth], n <= 256.
template <class Grad>
VLMK_INLINE void step_block(const AdamConstants& c, const Lerp& lerp, const DynamicTrees& trees,
                            int64_t n, float* param, const Grad* grad, uint8_t* m_codes,
                            uint8_t* v_codes, float* m_scale, float* v_scale) {
  static const Decades<7> signed_decades;
  static const Decades<8> unsigned_decades;
  constexpr int64_t kAhead = 2048 / sizeof(float);
  alignas(64) float exp_avg[kMomentBlock], exp_avg_sq[kMomentBlock];
  const Vec zero = set1(0.f);
  Vec largest_m = zero, largest_v = zero, bad_m = zero, bad_v = zero;
  const Vec old_m = set1(*m_scale), old_v = set1(*v_scale);
  for (int64_t i = 0; i < n; i += kWidth) {
    __builtin_prefetch(param + i + kAhead, 1);
    __builtin_prefetch(grad + i + kAhead, 0);
    if (i % 64 == 0) {
      __builtin_prefetch(m_codes + i + kAhead, 1);
      __builtin_prefetch(v_codes + i + kAhead, 1);
    }
    Vec p = load(param + i);
    Vec m = decode_signed(signed_decades, trees.with_sign, load_codes(m_codes + i)) * old_m;
    Vec v = decode_unsigned(unsigned_decades, trees.without, load_codes(v_codes + i)) * old_v;
    update<Rounded::kV, false>(c, lerp, load(grad + i), p, m, v);
    store(param + i, p);
    store(exp_avg + i, m);
    store(exp_avg_sq + i, v);
    largest_m = max(largest_m, max(m, zero - m));
    largest_v = max(largest_v, v);
    bad_m = bad_m + m * zero;
    bad_v = bad_v + v * zero;
  }
  *m_scale = block_scale(largest_m, bad_m);
  *v_scale = block_scale(largest_v, bad_v);
  const Vec m_inverse = set1(*m_scale == 0.f ? 0.f : 1.f / *m_scale);
  const Vec v_inverse = set1(*v_scale == 0.f ? 0.f : 1.f / *v_scale);
  for (int64_t i = 0; i < n; i += kWidth) {
    store_codes(m_codes + i, encode_signed(signed_decades, load(exp_avg + i), m_inverse));
    store_codes(v_codes + i, encode_unsigned(unsigned_decades, load(exp_avg_sq + i), v_inverse));
  }
}

template <class Grad>
void run_blockwise(const AdamConstants& c, const Lerp& lerp, const AdamChunk& chunk) {
  const AdamTensor& t = *chunk.tensor;
  const DynamicTrees& trees = dynamic_trees();
  const Grad* grads = static_cast<const Grad*>(t.grad);
  uint8_t* m_codes = static_cast<uint8_t*>(t.exp_avg);
  uint8_t* v_codes = static_cast<uint8_t*>(t.exp_avg_sq);
  BFloat16* low = static_cast<BFloat16*>(t.low);
  for (int64_t begin = chunk.begin; begin < chunk.end; begin += kMomentBlock) {
    const int64_t left = chunk.end - begin;
    const int64_t n = left < kMomentBlock ? left : kMomentBlock;
    float* m_scale = t.exp_avg_scale + begin / kMomentBlock;
    float* v_scale = t.exp_avg_sq_scale + begin / kMomentBlock;
    if (n % kWidth == 0) {
      step_block(c, lerp, trees, n, t.param + begin, grads + begin, m_codes + begin,
                 v_codes + begin, m_scale, v_scale);
    } else {  // a tensor's last block: with zeros behind it
      alignas(64) float param[kMomentBlock] = {};
      alignas(64) Grad grad[kMomentBlock] = {};
      alignas(64) uint8_t m[kMomentBlock] = {}, v[kMomentBlock] = {};
      std::memcpy(param, t.param + begin, n * sizeof(float));
      std::memcpy(grad, grads + begin, n * sizeof(Grad));
      std::memcpy(m, m_codes + begin, n);
      std::memcpy(v, v_codes + begin, n);
      step_block(c, lerp, trees, n, param, grad, m, v, m_scale, v_scale);
      std::memcpy(t.param + begin, param, n * sizeof(float));
      std::memcpy(m_codes + begin, m, n);
      std::memcpy(v_codes + begin, v, n);
    }
    if (low == nullptr) continue;
    each_vector(n, [&](int64_t i, int lanes) {
      store_exactly(low + begin + i, load_first(t.param + begin + i, lanes), lanes);
    });
  }
}

template <class Grad>
void run(const AdamConstants& c, const Lerp& lerp, const AdamChunk& chunk) {
  if (chunk.tensor->moments == MomentType::kCodes) {
    run_blockwise<Grad>(c, lerp, chunk);
  } else if (chunk.tensor->moments == MomentType::kBFloat16) {
    run<Grad, BFloat16>(c, lerp, chunk);
  } else {
    run<Grad, float>(c, lerp, chunk);
  }
}

template <class Grad>
double squares(const Grad* grad, int64_t begin, int64_t end) {
  constexpr int kSums = 4;                    // hide the latency of the additions
  constexpr int64_t kBlock = 64 * kSums * 4;  // short enough for sums in float32
  double total = 0;
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t last = block + kBlock < end ? block + kBlock : end;
    Vec sums[kSums] = {set1(0.f), set1(0.f), set1(0.f), set1(0.f)};
    int64_t i = block;
    for (; i + kSums * kWidth <= last; i += kSums * kWidth) {
      for (int s = 0; s < kSums; ++s) {
        const Vec g = load(grad + i + s * kWidth);
        sums[s] = fma(g, g, sums[s]);
      }
    }
    double sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < last; ++i) {
      const double g = to_float(grad[i]);
      sum += g * g;
    }
    if (!(sum < INFINITY)) {  // squares overflow float32 where gradients need not
      sum = 0;
      for (i = block; i < last; ++i) {
        const double g = to_float(grad[i]);
        sum += g * g;
      }
    }
    total += sum;
  }
  return total;
}

}  // namespace

void adam_chunk(const AdamConstants& constants, const AdamChunk& chunk) {
  // A copy, which no store can change: behind the reference they were read anew for each vector
  // (bf16 gradients with AVX2, in the caches: 0.91x).
  const AdamConstants c = constants;
  const bool from_grad = !(c.beta1_rest < 0.5f);
  const Lerp lerp{from_grad ? c.beta1_rest - 1 : c.beta1_rest, from_grad};
  if (chunk.tensor->grad_dtype == DType::kBFloat16) {
    run<BFloat16>(c, lerp, chunk);
  } else {
    run<float>(c, lerp, chunk);
  }
}

void sum_of_squares_chunk(const AdamGradient& g, int64_t begin, int64_t end, double* sum) {
  *sum = g.dtype == DType::kBFloat16 ? squares(static_cast<const BFloat16*>(g.grad), begin, end)
                                     : squares(static_cast<const float*>(g.grad), begin, end);
}

}  // namespace VLMK_ISA
}  // namespace vlmk
