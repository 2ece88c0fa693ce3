// The rotary embedding (rotate-half), applied as rows are read and, transposed, as gradients leave.
// Included by kernel.cpp only.
#pragma once
#include <type_traits>

#include "cpu/attention/pack.inl"

namespace vlmk {
namespace VLMK_ISA {
namespace {

// A row's table: dim / 2 cosines, then as many sines. y1 = x1 c - x2 s, y2 = x2 c + x1 s on the
// halves of a row; kBack: the transpose, which is the inverse. In fp32, rounded to To once. `to`
// may be `rows` itself.
template <bool kBack, class From, class To>
VLMK_NOINLINE void rotate_rows(const Rows<From>& rows, const Rows<const float>& table, int64_t n,
                               int64_t dim, const Rows<To>& to) {
  const int64_t half = dim / 2, whole = half / kWidth * kWidth;
  const int left = static_cast<int>(half - whole);
  // A whole last vector instead of one in part, which is slow to store and to read again.
  const bool overlaps = left > 0 && half > kWidth;
  const int64_t fetched = n > kPrefetchLength ? n - kAhead : 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i < fetched) fetch_row(rows[i + kAhead], dim);
    const float *cosine = table[i], *sine = cosine + half;
    From* x = rows[i];
    To* y = to[i];
    struct Halves {
      Vec low, high;
    };
    const auto rotate = [](Vec a, Vec b, Vec c, Vec sines) {
      const Vec as = a * sines, bs = b * sines;
      return kBack ? Halves{fma(a, c, bs), fms(b, c, as)} : Halves{fms(a, c, bs), fma(b, c, as)};
    };
    const auto rotate_at = [&](int64_t d) {
      return rotate(load(x + d), load(x + half + d), load(cosine + d), load(sine + d));
    };
    const auto store_at = [&](int64_t d, const Halves& rotated) {
      store(y + d, rotated.low);
      store(y + half + d, rotated.high);
    };
    // Before the others are stored, as y may be x.
    const Halves last = overlaps ? rotate_at(half - kWidth) : Halves{set1(0.f), set1(0.f)};
    for (int64_t d = 0; d < whole; d += kWidth) store_at(d, rotate_at(d));
    if (overlaps) {
      store_at(half - kWidth, last);
    } else if (left) {
      const Halves rotated =
          rotate(load_n(x, left), load_n(x + half, left), load_n(cosine, left), load_n(sine, left));
      store_n(y, rotated.low, left);
      store_n(y + half, rotated.high, left);
    }
  }
}

// Rotated rows in scratch: floats, or for products of bf16 rounded as plain torch rounds them.
template <class Math, class T>
using Rotated = std::conditional_t<Math::kStep == 1, float, std::remove_const_t<T>>;

VLMK_INLINE Rows<const float> rotary_rows(const AttentionParams& p, int64_t place) {
  return Rows<const float>{p.rotary, p.head_dim, p.order}.from(place);
}

// Calls use(rows) with n rows of q or k as the products need them: x, or where there is a rotary
// table x rotated into buffer, dense. x starts at `place`.
template <class Math, class T, class Use>
VLMK_INLINE void with_rotated(const AttentionParams& p, const Rows<const T>& x, int64_t place,
                              int64_t n, void* buffer, Use use) {
  if (!p.rotary) return use(x);
  // mutant: rotary-stride
  const int64_t stride = Math::kStep * row_ld<Math>(p.head_dim);
  const Rows<Rotated<Math, T>> to{static_cast<Rotated<Math, T>*>(buffer), stride};
  rotate_rows<false>(x, rotary_rows(p, place), n, p.head_dim, to);
  use(Rows<const Rotated<Math, T>>{to.data, to.stride});
}

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
