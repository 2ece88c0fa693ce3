// Deals the tensors out to threads; the arithmetic is in kernel.cpp.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/adam/adam.h"

namespace vlmk {
namespace {

constexpr int64_t kSmall = 1 << 14;  // floats a thread at least: starting one costs microseconds

int useful_threads(int64_t elements) {
  const int64_t useful = std::max<int64_t>(1, elements / kSmall);
  return static_cast<int>(std::min<int64_t>(omp_get_max_threads(), useful));
}

// Wellons' lowbias32, https://nullprogram.com/blog/2018/07/31/.
uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ (x >> 16);
}

AdamConstants constants_of(const AdamParams& a, double step) {
  AdamConstants c;
  c.decay = static_cast<float>(1 - a.lr * a.weight_decay);
  c.l2 = static_cast<float>(a.weight_decay);
  c.beta1_rest = static_cast<float>(1 - a.beta1);
  c.beta2 = static_cast<float>(a.beta2);
  c.beta2_rest = static_cast<float>(1 - a.beta2);
  c.correction2 = static_cast<float>(std::sqrt(1 - std::pow(a.beta2, step)));
  c.eps = static_cast<float>(a.eps);
  c.negative_step = static_cast<float>(-(a.lr / (1 - std::pow(a.beta1, step))));
  c.grad_factor = a.grad_factor;
  c.grad_scale = a.grad_scale;
  c.scales = a.grad_factor != 1 || a.grad_scale != 1;
  c.decoupled = a.decoupled;
  c.decays = a.weight_decay != 0;
  c.key = mix(static_cast<uint32_t>(step));
  return c;
}

double tree_value(int bits, int code) {
  if (code == 0) return 0;
  if (code == (1 << bits) - 1) return 1;
  int i = 0;
  while (code >> (i + 1)) ++i;
  const double within = (code - (1 << i) + 0.5) / (1 << i);
  return std::pow(10.0, i - bits + 1) * (0.1 + 0.9 * within);
}

}  // namespace

const DynamicTrees& dynamic_trees() {
  static const DynamicTrees trees = [] {
    DynamicTrees t;
    for (int code = 0; code < 256; ++code) {
      const double magnitude = tree_value(7, code & 0x7f);
      t.with_sign[code] = static_cast<float>(code & 0x80 ? -magnitude : magnitude);
      t.without[code] = static_cast<float>(tree_value(8, code));
    }
    return t;
  }();
  return trees;
}

void adam_chunk(const AdamConstants& c, const AdamChunk& chunk) {
  VLMK_DISPATCH_BF16(adam_chunk, c, chunk)
}

void sum_of_squares_chunk(const AdamGradient& g, int64_t begin, int64_t end, double* sum) {
  VLMK_DISPATCH(sum_of_squares_chunk, g, begin, end, sum)
}

// Each thread takes one equal share of all elements, across tensors, cut at cache lines of the
// narrowest state, 16 bits: no line is written by two threads, small tensors cost no region of
// their own, and a thread's memory streams stay long.
void adam_step(const AdamParams& p) {
  // With 8-bit moments no block that shares a scale is cut. All rows of a call are alike.
  const bool codes = p.count && p.tensors[0].moments == MomentType::kCodes;
  const int64_t line = codes ? kMomentBlock : 32;  // elements
  // A copy of this many floats would push everything else out of the caches.
  constexpr int64_t kStreamed = 1 << 22;
  std::vector<int64_t> first_line(p.count + 1, 0);
  for (int64_t i = 0; i < p.count; ++i) {
    first_line[i + 1] = first_line[i] + (p.tensors[i].numel + line - 1) / line;
  }
  const int64_t lines = first_line[p.count];
  const int threads = useful_threads(lines * line);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    const int64_t begin = lines * me / team, end = lines * (me + 1) / team;
    // The tensor that holds line `begin`: the last one that starts at or before it.
    int64_t i =
        std::upper_bound(first_line.begin(), first_line.end(), begin) - first_line.begin() - 1;
    AdamConstants constants;
    double step = std::nan("");  // the constants'
    for (; i < p.count && first_line[i] < end; ++i) {
      const AdamTensor& tensor = p.tensors[i];
      if (tensor.step != step) constants = constants_of(p, step = tensor.step);
      const int64_t from = std::max(begin - first_line[i], int64_t{0}) * line;
      const int64_t to = std::min((end - first_line[i]) * line, tensor.numel);
      // Over the gradient's own memory the lines are in the cache already.
      const bool stream = lines * line >= kStreamed && tensor.low != tensor.grad;
      const bool goes_on = i + 1 < p.count && first_line[i + 1] < end && p.tensors[i + 1].numel;
      if (from < to)
        adam_chunk(constants, {&tensor, from, to, stream, goes_on ? &tensor + 1 : nullptr});
    }
  }
}

double sum_of_squares(const AdamGradient* grads, int64_t count) {
  constexpr int64_t kPart = 1 << 16;  // summed on its own, so that threads don't change the order
  struct Part {
    const AdamGradient* grad;
    int64_t begin;
  };
  std::vector<Part> parts;
  int64_t elements = 0;
  for (int64_t i = 0; i < count; ++i) {
    elements += grads[i].numel;
    for (int64_t begin = 0; begin < grads[i].numel; begin += kPart) {
      parts.push_back({&grads[i], begin});
    }
  }
  std::vector<double> sums(parts.size(), 0.0);
  const int threads = useful_threads(elements);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    sum_of_squares_chunk(*part.grad, part.begin, std::min(part.begin + kPart, part.grad->numel),
                         &sums[i]);
  }
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace vlmk
