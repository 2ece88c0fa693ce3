// The two passes of a resize, compiled once per instruction set (dispatch.h). Integers only: every
// instruction set gives the same bytes.
//
// A weight of 23 bits times a byte does not fit into 16-bit multiplications, and the 32-bit one
// (vpmulld) takes two slots and 10 cycles. So weights are split, w = high * 2^8 + low, and two
// neighbouring inputs are multiplied and added by one pmaddwd for each half.
#include <cstdint>
#include <cstring>

#include "cpu/image/resize.h"
#include "cpu/simd.h"

namespace vlmk::VLMK_ISA {
namespace {

#if defined(VLMK_HAS_BYTES)

constexpr int64_t kVector = static_cast<int64_t>(sizeof(VecInt));
static_assert(kVector <= kResizeSlack && kLanes <= kResizeMaxLanes);

// Two weights, for each of two inputs that stand beside each other.
inline VecInt weight_pair(const int16_t* p) {
  int32_t both;
  std::memcpy(&both, p, sizeof(both));
  return VecInt{} + both;
}

// Rounded as Pillow does, not yet clipped: that is the packs' saturation.
inline VecInt rounded(VecInt high, VecInt low) {
  return ((high << kResizeSplit) + low + (1 << (kResizeBits - 1))) >> kResizeBits;
}

// The inputs n and n + 1 of a lane's pixels, as 16-bit pairs for each of three channels.
inline VecInt pairs_of(int64_t pixel_bytes, int64_t n) {
  const char a = static_cast<char>(n * pixel_bytes), b = static_cast<char>(a + pixel_bytes);
  const char none = static_cast<char>(0x80);
  const char c = static_cast<char>(a + 1), d = static_cast<char>(b + 1);
  const char e = static_cast<char>(a + 2), f = static_cast<char>(b + 2);
  return set_lanes(
      _mm_setr_epi8(a, none, b, none, c, none, d, none, e, none, f, none, none, none, none, none));
}

// One output of kLanes rows: (r, g, b, 0) in each lane.
template <int64_t kPixel>
inline VecInt column(const ResizeAxis& axis, int64_t x, const uint8_t* const* rows, VecInt pairs01,
                     VecInt pairs23) {
  const int16_t *low = axis.low + x * axis.stride, *high = axis.high + x * axis.stride;
  const int64_t count = axis.count[x];
  VecInt sum_low{}, sum_high{};
  int64_t at = axis.first[x] * kPixel;
  for (int64_t j = 0; j < count; j += kResizeTaps, at += kResizeTaps * kPixel) {
    const VecInt pixels = load_lanes(rows, at);
    const VecInt one = shuffle(pixels, pairs01), two = shuffle(pixels, pairs23);
    sum_low += madd(one, weight_pair(low + j));
    sum_high += madd(one, weight_pair(high + j));
    sum_low += madd(two, weight_pair(low + j + 2));
    sum_high += madd(two, weight_pair(high + j + 2));
  }
  return rounded(sum_high, sum_low);
}

template <int64_t kPixel>
inline void across(const ResizeAxis& axis, const uint8_t* const* rows, uint8_t* const* to) {
  const VecInt pairs01 = pairs_of(kPixel, 0), pairs23 = pairs_of(kPixel, 2);
  const VecInt squeeze = set_lanes(  // (r, g, b, 0) four times to 12 bytes
      _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
  for (int64_t x = 0; x < axis.outputs; x += kResizeColumns) {
    const VecInt a = column<kPixel>(axis, x, rows, pairs01, pairs23);
    const VecInt b = column<kPixel>(axis, x + 1, rows, pairs01, pairs23);
    const VecInt c = column<kPixel>(axis, x + 2, rows, pairs01, pairs23);
    const VecInt d = column<kPixel>(axis, x + 3, rows, pairs01, pairs23);
    store_lanes(to, 3 * x, shuffle(pack_bytes(pack(a, b), pack(c, d)), squeeze));
  }
}

template <int64_t kPixel>
inline void across_all(const ResizeAxis& axis, const uint8_t* const* rows, uint8_t* const* to) {
  for (int64_t lane = 0; lane < kResizeMaxLanes; lane += kLanes)
    across<kPixel>(axis, rows + lane, to + lane);
}

// kVector output bytes from offset i on.
inline VecInt down(const uint8_t* const* rows, int64_t count, const int16_t* low,
                   const int16_t* high, int64_t i) {
  const VecInt none{};
  VecInt low0 = none, low1 = none, low2 = none, low3 = none;
  VecInt high0 = none, high1 = none, high2 = none, high3 = none;
  for (int64_t j = 0; j < count; j += 2) {
    const VecInt a = load(rows[j] + i), b = load(rows[j + 1] + i);
    const VecInt near = low_bytes(a, b), far = high_bytes(a, b);
    const VecInt p0 = low_bytes(near, none), p1 = high_bytes(near, none);
    const VecInt p2 = low_bytes(far, none), p3 = high_bytes(far, none);
    const VecInt weight_low = weight_pair(low + j), weight_high = weight_pair(high + j);
    low0 += madd(p0, weight_low);
    low1 += madd(p1, weight_low);
    low2 += madd(p2, weight_low);
    low3 += madd(p3, weight_low);
    high0 += madd(p0, weight_high);
    high1 += madd(p1, weight_high);
    high2 += madd(p2, weight_high);
    high3 += madd(p3, weight_high);
  }
  return pack_bytes(pack(rounded(high0, low0), rounded(high1, low1)),
                    pack(rounded(high2, low2), rounded(high3, low3)));
}

#else

constexpr int64_t kVector = 64;  // bytes of a row at once: sums in registers or L1

inline uint8_t clipped(uint32_t sum) {
  const int32_t value = static_cast<int32_t>(sum + (1u << (kResizeBits - 1))) >> kResizeBits;
  return static_cast<uint8_t>(value < 0 ? 0 : value > 255 ? 255 : value);
}

inline uint32_t weight(int16_t low, int16_t high) {
  return (static_cast<uint32_t>(high) << kResizeSplit) + static_cast<uint32_t>(low);
}

template <int64_t kPixel>
inline void across_all(const ResizeAxis& axis, const uint8_t* const* rows, uint8_t* const* to) {
  for (int64_t x = 0; x < axis.outputs; ++x) {
    const int16_t *low = axis.low + x * axis.stride, *high = axis.high + x * axis.stride;
    for (int64_t lane = 0; lane < kResizeMaxLanes; ++lane) {
      const uint8_t* pixel = rows[lane] + axis.first[x] * kPixel;
      uint32_t r = 0, g = 0, b = 0;
      for (int64_t j = 0; j < axis.count[x]; ++j, pixel += kPixel) {
        const uint32_t w = weight(low[j], high[j]);
        r += pixel[0] * w;
        g += pixel[1] * w;
        b += pixel[2] * w;
      }
      to[lane][3 * x] = clipped(r);
      to[lane][3 * x + 1] = clipped(g);
      to[lane][3 * x + 2] = clipped(b);
    }
  }
}

struct Ints {
  uint8_t bytes[kVector];
};
inline void store(uint8_t* p, const Ints& x) { std::memcpy(p, x.bytes, kVector); }

inline Ints down(const uint8_t* const* rows, int64_t count, const int16_t* low, const int16_t* high,
                 int64_t i) {
  uint32_t sums[kVector] = {};
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t w = weight(low[j], high[j]);
    const uint8_t* row = rows[j] + i;
    for (int64_t k = 0; k < kVector; ++k) sums[k] += row[k] * w;
  }
  Ints out;
  for (int64_t k = 0; k < kVector; ++k) out.bytes[k] = clipped(sums[k]);
  return out;
}

#endif

}  // namespace

void resize_across(const ResizeAxis& axis, const uint8_t* const* rows, int64_t pixel_bytes,
                   uint8_t* const* to) {
  if (pixel_bytes == 3)
    across_all<3>(axis, rows, to);
  else
    across_all<4>(axis, rows, to);
}

void resize_down(const uint8_t* const* rows, int64_t count, const int16_t* low, const int16_t* high,
                 uint8_t* out, int64_t bytes) {
  int64_t i = 0;
  for (; i + kVector <= bytes; i += kVector) store(out + i, down(rows, count, low, high, i));
  if (i < bytes) {
    uint8_t last[kVector];
    store(last, down(rows, count, low, high, i));
    std::memcpy(out + i, last, bytes - i);
  }
}

}  // namespace vlmk::VLMK_ISA
