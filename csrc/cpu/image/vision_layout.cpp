// One pass over frames, windows and units in the order of the outputs: every array is written once,
// front to back, but for the inverse. Bytes per patch: 16 of positions, 4 of the window order, 4
// (= 16 / merge_size^2) of the index and its inverse.
#include "cpu/image/vision_layout.h"

#include <algorithm>

namespace vlmk {

VisionLayoutSizes vision_layout_sizes(const VisionLayoutParams& p) {
  const int64_t m = p.merge_size, side = p.window_side;
  VisionLayoutSizes sizes{};
  for (int64_t i = 0; i < p.count; ++i) {
    const int64_t frames = p.grid[3 * i], rows = p.grid[3 * i + 1], columns = p.grid[3 * i + 2];
    sizes.frames += frames;
    sizes.units += frames * (rows / m) * (columns / m);
    sizes.max_frame = std::max(sizes.max_frame, rows * columns);
    sizes.max_side = std::max({sizes.max_side, rows, columns});
    if (side == 0) continue;
    sizes.windows += frames * ((rows / m + side - 1) / side) * ((columns / m + side - 1) / side);
    sizes.max_window =
        std::max(sizes.max_window, std::min(rows / m, side) * std::min(columns / m, side) * m * m);
  }
  return sizes;
}

namespace {

// Positions of a frame's patches: units row by row, in each its m x m patches.
int64_t* write_positions(int64_t rows, int64_t columns, int64_t m, int64_t* at) {
  for (int64_t top = 0; top < rows; top += m) {
    for (int64_t left = 0; left < columns; left += m) {
      for (int64_t r = top; r < top + m; ++r) {
        for (int64_t c = left; c < left + m; ++c, at += 2) at[0] = r, at[1] = c;
      }
    }
  }
  return at;
}

}  // namespace

void vision_layout_fill(const VisionLayoutParams& p) {
  const int64_t m = p.merge_size, side = p.window_side;
  int64_t* position = p.position_ids;
  int32_t *frame_end = p.cu_seqlens, *window_end = p.cu_window_seqlens;
  int64_t first = 0, place = 0;  // units before this frame; place in window order
  *frame_end = 0;
  if (side) *window_end = 0;
  for (int64_t i = 0; i < p.count; ++i) {
    const int64_t rows = p.grid[3 * i + 1] / m, columns = p.grid[3 * i + 2] / m;  // units
    for (int64_t frame = 0; frame < p.grid[3 * i]; ++frame, first += rows * columns) {
      position = write_positions(rows * m, columns * m, m, position);
      *++frame_end = static_cast<int32_t>((first + rows * columns) * m * m);
      if (!side) continue;
      for (int64_t top = 0; top < rows; top += side) {
        const int64_t bottom = std::min(top + side, rows);
        for (int64_t left = 0; left < columns; left += side) {
          const int64_t right = std::min(left + side, columns);
          for (int64_t r = top; r < bottom; ++r) {
            int64_t unit = first + r * columns + left;
            for (int64_t c = left; c < right; ++c, ++unit, ++place) {
              p.window_index[place] = unit;
              p.reverse_index[unit] = place;
              for (int64_t j = 0; j < m * m; ++j) {
                p.window_order[place * m * m + j] = static_cast<int32_t>(unit * m * m + j);
              }
            }
          }
          *++window_end = static_cast<int32_t>(place * m * m);
        }
      }
    }
  }
}

}  // namespace vlmk
