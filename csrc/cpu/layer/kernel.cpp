// RMSNorm (Zhang and Sennrich, arXiv 1910.07467) and SwiGLU (Shazeer, arXiv 2002.05202), compiled
// once per instruction set (dispatch.h). All arithmetic is fp32, rounded once. A row is read twice,
// from a first-level cache the second time. Gradients of weight and bias are sums over rows: first
// of kSumRows rows each, then of these sums in their order, so the number of threads changes no
// bit.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cpu/layer/layer.h"
#include "cpu/simd.h"

namespace vlmk::VLMK_ISA {
namespace {

constexpr int64_t kParallelFrom = 16 << 10;  // elements
// While a norm reads a row for the second time, the next one of each operand comes, where a
// first-level cache has room for two rows of all (Zen 3: 1.05 to 1.25x; of 4 KB 0.97x).
constexpr int64_t kRowAhead = 3 << 10;  // bytes

VLMK_INLINE void add_to(float* sum, Vec v, int lanes) {
  store_first(sum, load_first(sum, lanes) + v, lanes);
}

// run(row) for all rows on torch's threads, kSumRows in their order at a time.
template <class Run>
void each_row(int64_t rows, int64_t columns, const Run& run) {
  const int64_t parts = (rows + kSumRows - 1) / kSumRows;
#pragma omp parallel for schedule(static) if (rows * columns >= kParallelFrom)
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t end = minimum((part + 1) * kSumRows, rows);
    for (int64_t row = part * kSumRows; row < end; ++row) run(row);
  }
}

// The sums of a row's part, zero before its first row; null without a gradient.
VLMK_INLINE float* sums_of(const ColumnSums& s, int64_t columns, int64_t row) {
  if (s.parts == nullptr) return nullptr;
  float* sum = s.parts + row / kSumRows * columns;
  for (int64_t c = 0; row % kSumRows == 0 && c < columns; ++c) sum[c] = 0.f;
  return sum;
}

// The total of all parts of `rows` rows.
template <class T>
void add_parts(const ColumnSums& s, int64_t rows, int64_t columns) {
  if (s.parts == nullptr) return;
  const int64_t parts = (rows + kSumRows - 1) / kSumRows;
  // kGroup columns of a row of sums at once: the next row is often pages away.
  constexpr int64_t kGroup = 8 * kWidth;
  const int64_t groups = (columns + kGroup - 1) / kGroup;
#pragma omp parallel for schedule(static) if (parts * columns >= kParallelFrom)
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t begin = group * kGroup, n = minimum(kGroup, columns - begin);
    Vec group_sums[kGroup / kWidth] = {};
    for (int64_t part = 0; part < parts; ++part) {
      const float* of_part = s.parts + part * columns + begin;
      each_vector(n, [&](int64_t c, int lanes) {
        Vec& sum = group_sums[c / kWidth];
        sum = sum + load_first(of_part + c, lanes);
      });
    }
    each_vector(n, [&](int64_t c, int lanes) {
      const Vec sum = group_sums[c / kWidth];
      if (s.adds) {
        add_to(static_cast<float*>(s.total) + begin + c, sum, lanes);
      } else {
        store_first(static_cast<T*>(s.total) + begin + c, sum, lanes);
      }
    });
  }
}

template <class T>
void norm_forward(const RmsNormParams& p) {
  const auto *weight = static_cast<const T*>(p.weight), *bias = static_cast<const T*>(p.bias);
  const auto* residual = static_cast<const T*>(p.residual);
  const bool fetches = p.width * sizeof(T) <= kRowAhead;
  each_row(p.rows, p.width, [&](int64_t row) {
    T* x = static_cast<T*>(p.x) + row * p.width;
    T* y = static_cast<T*>(p.y) + row * p.width;
    const T* added = residual == nullptr ? nullptr : residual + row * p.width;
    Vec squares = set1(0.f);
    each_vector(p.width, [&](int64_t c, int lanes) {
      if (added != nullptr) {
        Vec sum = load_first(x + c, lanes) + load_first(added + c, lanes);
        if (bias != nullptr) sum = sum + load_first(bias + c, lanes);
        store_first(x + c, sum, lanes);
      }
      const Vec v = load_first(x + c, lanes);  // as rounded
      squares = fma(v, v, squares);
    });
    const float mean = reduce_add(squares) / static_cast<float>(p.width);
    const float rstd = 1.f / std::sqrt(mean + p.eps);
    p.rstd[row] = rstd;
    each_vector(p.width, [&](int64_t c, int lanes) {
      if (fetches) {
        __builtin_prefetch(x + p.width + c);
        if (added != nullptr) __builtin_prefetch(added + p.width + c);
        __builtin_prefetch(y + p.width + c, 1);
      }
      const Vec v = load_first(x + c, lanes) * set1(rstd);
      store_first(y + c, v * load_first(weight + c, lanes), lanes);
    });
  });
}

// With n = x rstd and g = dy w: dx = (g - n mean(g n)) rstd + ds, dw = sum over rows of dy n, db =
// sum over rows of dx.
template <class T>
void norm_backward(const RmsNormGradParams& p) {
  const auto *weight = static_cast<const T*>(p.weight), *sums_grad = static_cast<const T*>(p.ds);
  const bool fetches = p.width * sizeof(T) <= kRowAhead;
  each_row(p.rows, p.width, [&](int64_t row) {
    float* sums = sums_of(p.dweight, p.width, row);
    float* bias_sums = sums_of(p.dbias, p.width, row);
    const T* x = static_cast<const T*>(p.x) + row * p.width;
    const T* dy = static_cast<const T*>(p.dy) + row * p.width;
    const T* ds = sums_grad == nullptr ? nullptr : sums_grad + row * p.width;
    T* dx = static_cast<T*>(p.dx) + row * p.width;
    const Vec rstd = set1(p.rstd[row]);
    Vec dots = set1(0.f);
    each_vector(p.width, [&](int64_t c, int lanes) {
      const Vec g = load_first(dy + c, lanes);
      const Vec product = g * (load_first(x + c, lanes) * rstd);
      dots = fma(product, load_first(weight + c, lanes), dots);
      if (sums != nullptr) add_to(sums + c, product, lanes);
    });
    const Vec mean = set1(reduce_add(dots) / static_cast<float>(p.width));
    each_vector(p.width, [&](int64_t c, int lanes) {
      if (fetches) {
        __builtin_prefetch(x + p.width + c);
        __builtin_prefetch(dy + p.width + c);
        if (ds != nullptr) __builtin_prefetch(ds + p.width + c);
        __builtin_prefetch(dx + p.width + c, 1);
      }
      const Vec g = load_first(dy + c, lanes) * load_first(weight + c, lanes);
      const Vec n = load_first(x + c, lanes) * rstd;
      Vec v = (g - n * mean) * rstd;
      if (ds != nullptr) v = v + load_first(ds + c, lanes);
      store_first(dx + c, v, lanes);
      if (bias_sums != nullptr) add_to(bias_sums + c, v, lanes);
    });
  });
  add_parts<T>(p.dweight, p.rows, p.width);
  add_parts<T>(p.dbias, p.rows, p.width);
}

// use(first element, how many vectors, lanes of each that count): some vectors at once, see exp2,
// then the rest one by one. Of float32 two: four are slower where rows of 27 KB come from memory
// (Zen 3: 0.9x).
template <class T, class Use>
VLMK_INLINE void each_group(int64_t n, const Use& use) {
  constexpr int kGroup = 8 / sizeof(T);
  int64_t i = 0;
  for (; i + kGroup * kWidth <= n; i += kGroup * kWidth) {
    use(i, std::integral_constant<int, kGroup>{}, kWidth);
  }
  each_vector(n - i, [&](int64_t c, int lanes) __attribute__((always_inline)) {
    use(i + c, std::integral_constant<int, 1>{}, lanes);
  });
}

// 1 / (1 + exp(-x)), of exp(-|x|), which never overflows. A type of 16 bits needs fewer digits.
template <class T, int kCount>
VLMK_INLINE void sigmoid(const Vec (&x)[kCount], Vec (&s)[kCount]) {
  constexpr int kDegree = sizeof(T) == 2 ? 4 : 6;
  const Vec zero = set1(0.f), one = set1(1.f);
#pragma GCC unroll 4
  for (int j = 0; j < kCount; ++j) s[j] = max(x[j], zero - x[j]) * set1(-1.44269504f);
  exp2<kDegree>(s);
#pragma GCC unroll 4
  for (int j = 0; j < kCount; ++j) s[j] = (x[j] < zero ? s[j] : one) / (one + s[j]);
}

// Fetches kCount vectors that lie n elements ahead.
template <class T, int kCount>
VLMK_INLINE void fetch_ahead(const T* x, int64_t n, bool writes = false) {
  constexpr int kLine = 64 / sizeof(T) / kWidth;  // vectors
#pragma GCC unroll 4
  for (int j = 0; j < kCount; j += kLine > 1 ? kLine : 1) {
    writes ? __builtin_prefetch(x + n + j * kWidth, 1) : __builtin_prefetch(x + n + j * kWidth);
  }
}

// x [N, 2 F] = [gate | up], y [N, F] = gate sigmoid(gate) up. With a bias [2 F] x becomes x + bias.
// The next row is fetched.
template <class T>
void swiglu_forward(const SwigluParams& p) {
  const auto* bias = static_cast<const T*>(p.bias);
  const int64_t width = p.width;
  each_row(p.rows, 2 * width, [&](int64_t row) {
    T* x = static_cast<T*>(p.x) + row * 2 * width;
    T* y = static_cast<T*>(p.y) + row * width;
    const auto with_bias = [&](int64_t c, int lanes) {
      if (bias == nullptr) return load_first(x + c, lanes);
      store_first(x + c, load_first(x + c, lanes) + load_first(bias + c, lanes), lanes);
      return load_first(x + c, lanes);  // as rounded
    };
    each_group<T>(width, [&](int64_t c, auto count, int lanes) __attribute__((always_inline)) {
      constexpr int kCount = decltype(count)::value;
      fetch_ahead<T, kCount>(x + c, 2 * width);
      fetch_ahead<T, kCount>(x + width + c, 2 * width);
      Vec gate[kCount], up[kCount], s[kCount];
#pragma GCC unroll 4
      for (int j = 0; j < kCount; ++j) {
        gate[j] = with_bias(c + j * kWidth, lanes);
        up[j] = with_bias(width + c + j * kWidth, lanes);
      }
      sigmoid<T>(gate, s);
#pragma GCC unroll 4
      for (int j = 0; j < kCount; ++j) {
        store_first(y + c + j * kWidth, gate[j] * s[j] * up[j], lanes);
      }
    });
  });
}

// With s = sigmoid(gate): dup = dy gate s, dgate = dy up s (1 + gate (1 - s)). The next rows are
// fetched.
template <class T, bool kNonTemporal>
void swiglu_gradient(const SwigluGradParams& p) {
  const int64_t width = p.width;
  each_row(p.rows, 2 * width, [&](int64_t row) {
    float* sums = sums_of(p.dbias, 2 * width, row);
    const T* x = static_cast<const T*>(p.x) + row * 2 * width;
    const T* dy = static_cast<const T*>(p.dy) + row * width;
    T* dx = static_cast<T*>(p.dx) + row * 2 * width;
    const auto put = [&](int64_t c, Vec v, int lanes) {
      if constexpr (kNonTemporal) {
        stream(dx + c, v);
      } else {
        store_first(dx + c, v, lanes);
      }
      if (sums != nullptr) add_to(sums + c, v, lanes);
    };
    each_group<T>(width, [&](int64_t c, auto count, int lanes) __attribute__((always_inline)) {
      constexpr int kCount = decltype(count)::value;
      fetch_ahead<T, kCount>(x + c, 2 * width);
      fetch_ahead<T, kCount>(x + width + c, 2 * width);
      fetch_ahead<T, kCount>(dy + c, width);
      if constexpr (!kNonTemporal) {
        fetch_ahead<T, kCount>(dx + c, 2 * width, true);
        fetch_ahead<T, kCount>(dx + width + c, 2 * width, true);
      }
      Vec gate[kCount], s[kCount], ds[kCount], dgate[kCount];
#pragma GCC unroll 4
      for (int j = 0; j < kCount; ++j) gate[j] = load_first(x + c + j * kWidth, lanes);
      sigmoid<T>(gate, s);
#pragma GCC unroll 4
      for (int j = 0; j < kCount; ++j) {
        ds[j] = load_first(dy + c + j * kWidth, lanes) * s[j];
        const Vec up = load_first(x + width + c + j * kWidth, lanes);
        dgate[j] = ds[j] * up * fma(gate[j], set1(1.f) - s[j], set1(1.f));
        ds[j] = ds[j] * gate[j];
      }
#pragma GCC unroll 4
      for (int j = 0; j < kCount; ++j) put(c + j * kWidth, dgate[j], lanes);
#pragma GCC unroll 4
      for (int j = 0; j < kCount; ++j) put(width + c + j * kWidth, ds[j], lanes);
    });
    if (kNonTemporal && ((row + 1) % kSumRows == 0 || row + 1 == p.rows)) fence_streams();
  });
  add_parts<T>(p.dbias, p.rows, 2 * width);
}

// Whether dx goes past the caches, which would read its lines before they are written: of float32,
// large, and of whole lines (Zen 3: 1.2x).
bool past_caches(const SwigluGradParams& p) {
  constexpr int64_t kNonTemporalBytes = 16 << 20;
  return p.dtype == DType::kFloat32 && p.rows * 2 * p.width * 4 >= kNonTemporalBytes &&
         reinterpret_cast<uintptr_t>(p.dx) % 64 == 0 && p.width % 16 == 0;
}

}  // namespace

void rms_norm(const RmsNormParams& p) {
  with_type(p.dtype, [&](auto zero) { norm_forward<decltype(zero)>(p); });
}
void rms_norm_backward(const RmsNormGradParams& p) {
  with_type(p.dtype, [&](auto zero) { norm_backward<decltype(zero)>(p); });
}
void swiglu(const SwigluParams& p) {
  with_type(p.dtype, [&](auto zero) { swiglu_forward<decltype(zero)>(p); });
}
void swiglu_backward(const SwigluGradParams& p) {
  if (past_caches(p)) return swiglu_gradient<float, true>(p);
  with_type(p.dtype, [&](auto zero) { swiglu_gradient<decltype(zero), false>(p); });
}

}  // namespace vlmk::VLMK_ISA
