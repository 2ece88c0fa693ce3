// Softmax cross entropy, compiled once per instruction set (dispatch.h). One thread has a whole row
// and goes through it once for the statistics and once for the gradient: a row of 150,000 logits is
// in the second-level cache the second time. With x = logit, m = row_max, s = row_sum, e =
// label_smoothing, z = z_loss, V = classes, of which lse = m + ln s is the log-sum-exp:
//   loss = lse - (1 - e) x[target] - e / V * sum of x + z lse^2
//   d loss / d x = exp(x - m) * (1 + 2 z lse) / s - e / V, and less 1 - e at the target
#include <cmath>
#include <cstdint>

#include "cpu/loss/loss.h"
#include "cpu/simd.h"

namespace vlmk::VLMK_ISA {
namespace {

constexpr int64_t kTile = 1024;  // columns that share one maximum: 4 KB, in L1
constexpr int64_t kParallelFromLogits = 16 << 10;
constexpr float kLog2e = 1.44269504f;

// exp(x - largest)
VLMK_INLINE Vec exp_below(Vec x, float largest) { return exp2((x - set1(largest)) * set1(kLog2e)); }
VLMK_INLINE float exp_below(float x, float largest) { return exp_below(set1(x), largest)[0]; }

VLMK_INLINE float reduce_max(Vec x) {
  float largest = x[0];
  for (int i = 1; i < kWidth; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

template <class T>
void add_statistics(const CrossEntropyParams& p, const T* x, int64_t row) {
  float largest = p.row_max[row];
  double sum = p.row_sum[row], logit_sum = p.logit_sum[row];
  for (int64_t begin = 0; begin < p.columns; begin += kTile) {
    const int64_t n = minimum(kTile, p.columns - begin);
    Vec tile_max = set1(largest);
    each_vector(n, [&](int64_t c, int lanes) {
      const Vec v = load_first(x + begin + c, lanes);
      // NaN is passed over here; it arrives in the sum.
      tile_max = max(lanes == kWidth ? v : keep_from(lanes, set1(largest), v), tile_max);
    });
    const float before = largest;
    largest = reduce_max(tile_max);
    if (largest > before) sum *= exp_below(before, largest);
    Vec tile_sum = set1(0.f), tile_logits = set1(0.f);
    each_vector(n, [&](int64_t c, int lanes) {
      const Vec v = load_first(x + begin + c, lanes);
      tile_logits = tile_logits + v;
      const Vec e = exp_below(v, largest);
      tile_sum = tile_sum + (lanes == kWidth ? e : keep_from(lanes, set1(0.f), e));
    });
    sum += reduce_add(tile_sum);
    logit_sum += reduce_add(tile_logits);
  }
  p.row_max[row] = largest;
  p.row_sum[row] = static_cast<float>(sum);
  p.logit_sum[row] = static_cast<float>(logit_sum);
  const int64_t target = p.targets[row] - p.first_class;
  if (target >= 0 && target < p.columns) p.target_logit[row] = to_float(x[target]);
}

template <class T>
void write_gradient(const CrossEntropyParams& p, T* x, int64_t row) {
  const float largest = p.row_max[row];
  const double scale = p.scale[row], sum = p.row_sum[row], lse = largest + std::log(sum);
  const auto slope = static_cast<float>(scale * (1 + 2 * p.z_loss * lse) / sum);
  const auto even = static_cast<float>(scale * p.label_smoothing / p.classes);
  const int64_t target = p.targets[row] - p.first_class;
  const bool here = target >= 0 && target < p.columns;
  float at_target = 0;
  if (here) {
    const double probability = exp_below(to_float(x[target]), largest);
    at_target = static_cast<float>(probability * slope - even - scale * (1 - p.label_smoothing));
  }
  each_vector(p.columns, [&](int64_t c, int lanes) {
    const Vec e = exp_below(load_first(x + c, lanes), largest);
    store_first(x + c, fma(e, set1(slope), set1(-even)), lanes);
  });
  if (here) from_float(at_target, x[target]);
}

template <class T>
void one_row(const CrossEntropyParams& p, int64_t row) {
  T* const x = static_cast<T*>(p.logits) + row * p.columns;
  if (p.statistics) add_statistics(p, x, row);
  if (p.scale != nullptr) write_gradient(p, x, row);
}

}  // namespace

void cross_entropy(const CrossEntropyParams& p) {
  with_type(p.dtype, [&](auto zero) {
#pragma omp parallel for schedule(static) if (p.rows * p.columns >= kParallelFromLogits)
    for (int64_t row = 0; row < p.rows; ++row) one_row<decltype(zero)>(p, row);
  });
}

}  // namespace vlmk::VLMK_ISA
