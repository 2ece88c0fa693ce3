// The weights, the order of rows, and threads; the arithmetic is in resize_kernel.cpp.
//
// Work per output pixel, shrinking by s in both directions: 3 * 4s weights along each axis, where
// the horizontal pass runs over s times as many rows: 12 s^2 + 12 s multiplications of a byte by a
// 23-bit weight; two of pmaddwd's 16-bit multiplications each. Memory: the input read and the
// output written once; the rows between the passes stay in the L2 cache.
#include "cpu/image/resize.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/scratch.h"

namespace vlmk {
namespace {

// Pillow's bicubic_filter, its operations in its order.
double bicubic(double x) {
  constexpr double a = -0.5;
  if (x < 0.0) x = -x;
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}

constexpr double kSupport = 2.0;

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

struct Weights {
  std::vector<int32_t> first, count;
  std::vector<int16_t> low, high;
  int64_t stride = 0;

  // Pillow's precompute_coeffs and normalize_coeffs_8bpc for the whole axis.
  Weights(int64_t in, int64_t out) {
    const double scale = static_cast<double>(in) / static_cast<double>(out);
    const double stretch = std::max(scale, 1.0), support = kSupport * stretch;
    stride = round_up(static_cast<int64_t>(std::ceil(support)) * 2 + 1, kResizeTaps);
    const int64_t outputs = round_up(out, kResizeColumns);
    first.assign(outputs, 0);
    count.assign(outputs, 0);
    low.assign(outputs * stride, 0);
    high.assign(outputs * stride, 0);
    std::vector<double> weights(stride);
    for (int64_t i = 0; i < out; ++i) {
      const double center = (static_cast<double>(i) + 0.5) * scale, inverse = 1.0 / stretch;
      const int64_t begin = std::max<int64_t>(static_cast<int64_t>(center - support + 0.5), 0);
      const int64_t end = std::min(static_cast<int64_t>(center + support + 0.5), in);
      double sum = 0.0;
      for (int64_t j = begin; j < end; ++j) {
        weights[j - begin] = bicubic((static_cast<double>(j) - center + 0.5) * inverse);
        sum += weights[j - begin];
      }
      for (int64_t j = 0; j < end - begin; ++j) {
        if (sum != 0.0) weights[j] /= sum;
        const double scaled = weights[j] * (1 << kResizeBits);
        const int fixed = static_cast<int>(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
        // Sums are modulo 2^32 and the true one fits, so any split is exact; this one keeps both
        // parts within 16 bits: |weight| is below 1.5.
        const int part = ((fixed + 128) & 255) - 128;
        low[i * stride + j] = static_cast<int16_t>(part);
        high[i * stride + j] = static_cast<int16_t>((fixed - part) >> kResizeSplit);
      }
      first[i] = static_cast<int32_t>(begin);
      count[i] = static_cast<int32_t>(end - begin);
    }
  }

  ResizeAxis axis() const {
    return {static_cast<int64_t>(first.size()),
            stride,
            first.data(),
            count.data(),
            low.data(),
            high.data()};
  }
};

// Pillow 13 and later do the vertical pass first where the height shrinks by more than twice the
// pixels that the width does, 12.2 and later for images 100 times as high as wide, earlier ones
// never. Found by comparing with them (tests/kernels/test_resize.py).
bool height_first(const ResizeParams& p) {
  if (p.out_height >= p.in_height) return false;
  if (p.pillow < 1202) return false;
  if (p.pillow < 1300) return p.in_height > 100 * p.in_width;
  return 2 * (p.in_width - p.out_width) < p.in_height - p.out_height;
}

// A thread's working memory, in one piece: `rows` rows between the passes, copies of the last input
// rows, after which nothing may be read, and pointers to the rows that one output row is made of.
struct Workspace {
  bool height_first;
  int64_t line;         // bytes of an input row
  int64_t tail;         // input rows that end too close to the end of the input
  int64_t rows;         // height first: kResizeMaxLanes; else row r stands at r modulo `rows`
  int64_t pitch;        // of these rows
  int64_t tail_pitch;   // of the copies
  int64_t final_pitch;  // height first: of kResizeMaxLanes finished rows, else 0
  int64_t pointers;     // bytes

  Workspace(const ResizeParams& p, const Weights& down)
      : height_first(vlmk::height_first(p)),
        line(p.in_width * p.pixel_bytes),
        tail(std::min(kResizeSlack / line + 1, p.frames * p.in_height)),
        rows(kResizeMaxLanes),
        tail_pitch(round_up(line + kResizeSlack, 64)),
        final_pitch(round_up(3 * round_up(p.out_width, kResizeColumns) + kResizeSlack, 64)),
        pointers(round_up(down.stride * static_cast<int64_t>(sizeof(void*)), 64)) {
    pitch = height_first ? tail_pitch : final_pitch;
    if (height_first) return;
    while (rows < down.stride + kResizeMaxLanes) rows *= 2;
    final_pitch = 0;
  }

  size_t floats() const {
    const int64_t bytes =
        pointers + rows * pitch + tail * tail_pitch + kResizeMaxLanes * final_pitch;
    return bytes / sizeof(float);
  }
};

// What one thread does: output rows, in stretches of one frame.
class Resizer {
 public:
  Resizer(const ResizeParams& p, const Weights& across, const Weights& down, const Workspace& space,
          char* memory)
      : p_(p),
        across_(across.axis()),
        down_(down.axis()),
        space_(space),
        pointers_(reinterpret_cast<const uint8_t**>(memory)),
        rows_(reinterpret_cast<uint8_t*>(memory + space.pointers)),
        tail_(rows_ + space.rows * space.pitch),
        finished_(tail_ + space.tail * space.tail_pitch),
        first_of_tail_(p.frames * p.in_height - space.tail) {
    for (int64_t row = 0; row < space.tail; ++row)
      std::memcpy(tail_ + row * space.tail_pitch, p.pixels + (first_of_tail_ + row) * space.line,
                  space.line);
  }

  void run(int64_t frame, int64_t begin, int64_t end) {
    if (space_.height_first)
      run_height_first(frame, begin, end);
    else
      run_width_first(frame, begin, end);
  }

 private:
  // An input row, readable for kResizeSlack bytes past its end.
  const uint8_t* input(int64_t frame, int64_t row) const {
    const int64_t place = frame * p_.in_height + row;
    return place < first_of_tail_ ? p_.pixels + place * space_.line
                                  : tail_ + (place - first_of_tail_) * space_.tail_pitch;
  }

  uint8_t* output(int64_t frame, int64_t row) const {
    return p_.out + (frame * p_.out_height + row) * 3 * p_.out_width;
  }

  // One row of the vertical pass, of the input rows that row(r) gives.
  template <class Row>
  void down(int64_t y, Row row, uint8_t* to, int64_t bytes) const {
    const int64_t first = down_.first[y], count = down_.count[y];
    for (int64_t j = 0; j < round_up(count, 2); ++j)
      pointers_[j] = row(first + std::min(j, count - 1));
    resize_down(pointers_, count, down_.low + y * down_.stride, down_.high + y * down_.stride, to,
                bytes);
  }

  void run_width_first(int64_t frame, int64_t begin, int64_t end) {
    const auto between = [&](int64_t row) { return rows_ + row % space_.rows * space_.pitch; };
    int64_t made = down_.first[begin];  // rows before it are there, or not needed
    for (int64_t y = begin; y < end; ++y) {
      for (; made < down_.first[y] + down_.count[y]; made += kResizeMaxLanes) {
        const uint8_t* rows[kResizeMaxLanes];
        uint8_t* to[kResizeMaxLanes];
        for (int64_t lane = 0; lane < kResizeMaxLanes; ++lane) {
          // Past the last row it is made again, and not looked at.
          rows[lane] = input(frame, std::min(made + lane, p_.in_height - 1));
          to[lane] = between(made + lane);
        }
        resize_across(across_, rows, p_.pixel_bytes, to);
      }
      down(y, between, output(frame, y), 3 * p_.out_width);
    }
  }

  void run_height_first(int64_t frame, int64_t begin, int64_t end) {
    const uint8_t* rows[kResizeMaxLanes];
    uint8_t* to[kResizeMaxLanes];
    for (int64_t lane = 0; lane < kResizeMaxLanes; ++lane) {
      rows[lane] = rows_ + lane * space_.pitch;
      to[lane] = finished_ + lane * space_.final_pitch;
    }
    for (int64_t y = begin; y < end; y += kResizeMaxLanes) {
      const int64_t lanes = std::min(kResizeMaxLanes, end - y);
      for (int64_t lane = 0; lane < lanes; ++lane)
        down(
            y + lane, [&](int64_t row) { return input(frame, row); }, rows_ + lane * space_.pitch,
            space_.line);
      resize_across(across_, rows, p_.pixel_bytes, to);
      for (int64_t lane = 0; lane < lanes; ++lane)
        std::memcpy(output(frame, y + lane), to[lane], 3 * p_.out_width);
    }
  }

  const ResizeParams& p_;
  const ResizeAxis across_, down_;
  const Workspace& space_;
  const uint8_t** pointers_;
  uint8_t *rows_, *tail_, *finished_;
  int64_t first_of_tail_;
};

}  // namespace

void resize_across(const ResizeAxis& axis, const uint8_t* const* rows, int64_t pixel_bytes,
                   uint8_t* const* to) {
  VLMK_DISPATCH(resize_across, axis, rows, pixel_bytes, to)
}

void resize_down(const uint8_t* const* rows, int64_t count, const int16_t* low, const int16_t* high,
                 uint8_t* out, int64_t bytes) {
  VLMK_DISPATCH(resize_down, rows, count, low, high, out, bytes)
}

// An axis whose size stays is passed through the same code: its weights are exactly 0 and 1.
void resize(const ResizeParams& p) {
  const Weights across(p.in_width, p.out_width), down(p.in_height, p.out_height);
  const Workspace space(p, down);
  const int64_t rows = p.frames * p.out_height, threads = std::min(p.threads, rows);
  std::atomic<bool> failed{false};
  // Each thread takes one stretch of rows: only where two meet are rows made twice.
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (threads > 1)
  for (int64_t thread = 0; thread < threads; ++thread) {
    char* memory = reinterpret_cast<char*>(scratch(space.floats()));
    if (memory == nullptr) {
      failed.store(true);
      continue;
    }
    Resizer resizer(p, across, down, space, memory);
    const int64_t last = rows * (thread + 1) / threads;
    for (int64_t row = rows * thread / threads; row < last;) {
      const int64_t frame = row / p.out_height, begin = row % p.out_height;
      const int64_t end = std::min(p.out_height, begin + last - row);
      resizer.run(frame, begin, end);
      row += end - begin;
    }
  }
  if (failed.load()) throw_out_of_memory(space.floats());
}

}  // namespace vlmk
