// Rows that a thread will need next, fetched a cache line at a time between the steps of tiles:
// a window's attention takes about as long as its rows take to arrive. Spread out, because a core
// has few line fills in flight, which its own loads need too; rows of several heads, because the
// hardware's prefetcher follows those, but not rows a token apart. Included inside an ISA
// translation unit.
#pragma once
#include "cpu/dispatch.h"
#include "cpu/simd.h"

namespace vlmk {
namespace VLMK_ISA {
namespace {

class Prefetcher {
 public:
  // Steps of a float32 tile for a line, where there are so many; else two.
  static constexpr int kSpread = kWidth == 16 ? 3 : 6;

  VLMK_MEMBER void clear() {
    count_ = 0;
    lines_ = 0;
    spread_ = false;
    place_ = {};
  }
  // n rows of as many bytes, `stride` bytes apart. What doesn't find room is not fetched. With
  // `look` the first line of each is fetched at once: the core waits until its page is looked up,
  // and several look-ups one after the other run at the same time (windows on Zen 4: 1.05 to 1.1x).
  void add(const void* data, ptrdiff_t stride, int64_t n, int64_t bytes, bool look = true) {
    if (count_ == kMost || n <= 0) return;
    const auto* first = static_cast<const char*>(data);
    const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(first) % 64);
    // Rows that begin at different places of a line have as many lines as any of them may need.
    const int64_t lines = (63 + bytes + (stride % 64 == 0 ? offset : 63)) / 64;
    if (look) {
      for (int64_t i = 0; i < n; ++i) __builtin_prefetch(first + i * stride, 0, 2);
    }
    lines_ += n * lines;
    rows_[count_] = {first, stride - 64 * (lines - 1), lines, n * lines};
    if (count_++ == 0) place_.begin(rows_[0]);
  }

  // Whether lines are left.
  VLMK_MEMBER bool busy() const { return place_.index < count_; }
  // The next line. Without a branch where a row ends, which would be predicted wrongly.
  VLMK_MEMBER void step() { place_.step<2>(rows_, count_); }
  // Up to n lines at once, into the first-level cache (windows on AMX: 1.05x).
  VLMK_MEMBER void fetch(int n) {
    Place place = place_;  // in registers
    for (; n > 0 && place.index < count_; --n) place.step<3>(rows_, count_);
    place_ = place;
  }
  VLMK_MEMBER void finish() {
    while (busy()) step();
  }

  // Spreads the lines over as many steps of tiles, where these are enough. A core fetches a line
  // in 8 ns or more, and one that is asked for earlier keeps the tile's own lines waiting (windows
  // on Zen 3: 1.03 to 1.1x; the backward with AVX-512 on an Intel core 1.05x).
  VLMK_MEMBER void spread_over(int64_t steps) {
    spread_ = steps >= lines_ * kSpread && (kWidth < 16 || !is_amd());
  }
  // Whether a line every kSpread steps will do.
  VLMK_MEMBER bool spread() const { return spread_; }

 private:
  static constexpr int kMost = 128;
  struct Rows {
    const char* line;  // the first
    ptrdiff_t gap;     // from a row's last line to the next row's first
    int64_t lines;     // of a row
    int64_t all;       // lines of all rows
  };
  // The next line.
  struct Place {
    const char* line = nullptr;
    ptrdiff_t gap = 0;
    int64_t lines = 0, of_row = 0, all = 0;  // of_row, all: those left
    int index = 0;

    VLMK_MEMBER void begin(const Rows& rows) {
      line = rows.line;
      gap = rows.gap;
      lines = of_row = rows.lines;
      all = rows.all;
    }
    template <int kLocality>
    VLMK_MEMBER void step(const Rows* rows, int count) {
      __builtin_prefetch(line, 0, kLocality);
      const bool ends = --of_row == 0;
      line += ends ? gap : 64;
      of_row = ends ? lines : of_row;
      if (__builtin_expect(--all > 0, 1)) return;
      if (++index < count) {
        begin(rows[index]);
      } else {
        all = INT64_MAX;  // a tile that has begun goes on behind the last line
      }
    }
  };

  Rows rows_[kMost];
  int count_ = 0;
  int64_t lines_ = 0;  // of all rows
  bool spread_ = false;
  Place place_;
};

}  // namespace
}  // namespace VLMK_ISA
}  // namespace vlmk
