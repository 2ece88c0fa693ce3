// The Adam step for one instruction set, included by adam_<isa>.cpp, which defines VLMK_ISA.
//
// Speed of light: 28 bytes an element with fp32 gradients (4 reads, 3 writes in place), about 15
// operations: memory-bound by far. Prefetching 2 KiB ahead gives 8 to 13% on one core; non-temporal
// stores to arrays that were just read cost 5%.
#include <cmath>

#include "cpu/adam.h"
#include "cpu/simd.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// torch's constants: computed in double, rounded once.
struct Constants {
  float decay;          // 1 - lr * weight_decay, AdamW
  float l2;             // weight_decay, Adam
  float beta1_rest;     // 1 - beta1
  float beta2;
  float beta2_rest;     // 1 - beta2
  float correction2;    // sqrt(1 - beta2^step)
  float eps;
  float negative_step;  // -lr / (1 - beta1^step)
};

// exp_avg + (1 - beta1) * (grad - exp_avg) as torch's lerp computes it: from the nearer end.
struct Lerp {
  float weight;
  bool from_grad;
};

// Which product of beta2 * v + (1 - beta2) * g * g is rounded before the addition: that of v in
// torch's vectors of 8 or 16, that of g in the at most 7 last elements of a tensor, where its
// compiler chose the other contraction.
enum class Rounded { kV, kG };

template <Rounded kRounded>
VLMK_INLINE void update(const Constants& c, const Lerp& lerp, bool decoupled, bool decays, Vec g,
                        Vec& p, Vec& m, Vec& v) {
  if (decays) {
    if (decoupled) {
      p = p * set1(c.decay);
    } else {
      g = fma(p, set1(c.l2), g);
    }
  }
  m = fma(set1(lerp.weight), g - m, lerp.from_grad ? g : m);
  const Vec scaled_g = set1(c.beta2_rest) * g;
  v = kRounded == Rounded::kV ? fma(scaled_g, g, v * set1(c.beta2))
                              : fma(v, set1(c.beta2), scaled_g * g);
  const Vec denominator = sqrt(v) / set1(c.correction2) + set1(c.eps);
  p = p + set1(c.negative_step) * m / denominator;
}

template <class Grad>
void run(const Constants& c, const Lerp& lerp, bool decoupled, bool decays, const AdamChunk& chunk) {
  constexpr int64_t kAhead = 2048 / sizeof(float);
  float* param = chunk.tensor->param;
  const Grad* grad = static_cast<const Grad*>(chunk.tensor->grad);
  float* exp_avg = chunk.tensor->exp_avg;
  float* exp_avg_sq = chunk.tensor->exp_avg_sq;
  int64_t i = chunk.begin;
  for (; i + kWidth <= chunk.end; i += kWidth) {
    __builtin_prefetch(param + i + kAhead, 1);
    __builtin_prefetch(grad + i + kAhead, 0);
    __builtin_prefetch(exp_avg + i + kAhead, 1);
    __builtin_prefetch(exp_avg_sq + i + kAhead, 1);
    Vec p = load(param + i), m = load(exp_avg + i), v = load(exp_avg_sq + i);
    update<Rounded::kV>(c, lerp, decoupled, decays, load(grad + i), p, m, v);
    store(param + i, p);
    store(exp_avg + i, m);
    store(exp_avg_sq + i, v);
  }
  while (i < chunk.end) {  // the tensor's last elements: 8 at a time while there are 8, see Rounded
    const int64_t left = chunk.end - i;
    const int n = static_cast<int>(left >= 8 ? 8 : left);
    const int lanes = n < kWidth ? n : kWidth;
    Vec p = load_n(param + i, lanes), m = load_n(exp_avg + i, lanes);
    Vec v = load_n(exp_avg_sq + i, lanes);
    const Vec g = load_n(grad + i, lanes);
    if (left >= 8) {
      update<Rounded::kV>(c, lerp, decoupled, decays, g, p, m, v);
    } else {
      update<Rounded::kG>(c, lerp, decoupled, decays, g, p, m, v);
    }
    store_n(param + i, p, lanes);
    store_n(exp_avg + i, m, lanes);
    store_n(exp_avg_sq + i, v, lanes);
    i += lanes;
  }
}

}  // namespace

void adam_chunk(const AdamParams& a, const AdamChunk& chunk) {
  const double step = chunk.tensor->step;
  Constants c;
  c.decay = static_cast<float>(1 - a.lr * a.weight_decay);
  c.l2 = static_cast<float>(a.weight_decay);
  c.beta1_rest = static_cast<float>(1 - a.beta1);
  c.beta2 = static_cast<float>(a.beta2);
  c.beta2_rest = static_cast<float>(1 - a.beta2);
  c.correction2 = static_cast<float>(std::sqrt(1 - std::pow(a.beta2, step)));
  c.eps = static_cast<float>(a.eps);
  c.negative_step = static_cast<float>(-(a.lr / (1 - std::pow(a.beta1, step))));
  const bool from_grad = !(c.beta1_rest < 0.5f);
  const Lerp lerp{from_grad ? c.beta1_rest - 1 : c.beta1_rest, from_grad};
  const bool decays = a.weight_decay != 0;
  if (chunk.tensor->grad_dtype == DType::kBFloat16) {
    run<BFloat16>(c, lerp, a.decoupled, decays, chunk);
  } else {
    run<float>(c, lerp, a.decoupled, decays, chunk);
  }
}

}  // namespace VLMK_ISA
}  // namespace vlmk
